"""What is about to be trained, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_TABLE_UP_TO = 24  # layers; beyond that the table of explain is summed up by form


def describe(model: nn.Module, network: Any, save_dtype: str, rows: int | None = None) -> str:
    """Layers by algorithm, trainable and base parameters, size of the file, effective scale, and how layers run.

    ``rows`` are the tokens or output positions of one call, for the planner; None leaves it its own count.
    """
    import deltafuse

    report = deltafuse.explain(network) if rows is None else deltafuse.explain(network, rows)
    trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    own = {id(p) for p in network.parameters()}
    base = sum(p.numel() for p in model.parameters() if id(p) not in own)
    size = trainable * _BYTES[save_dtype]
    lines = [
        f"adapter     {_counted(row.algorithm for row in report)}",
        f"parameters  {trainable:,} trainable, {base:,} in the base ({100 * trainable / max(1, base):.2f} %)",
        f"file        about {_megabytes(size)} in {save_dtype}",
        f"scale       alpha / rank x strength = {_counted(f'{row.scale * row.strength:g}' for row in report)}",
    ]
    table = str(report).splitlines() if len(report) <= _TABLE_UP_TO else _summary(report)
    return "\n".join([*lines, *table])


def _counted(values: Iterable[str]) -> str:
    return ", ".join(f"{value} on {count} layers" for value, count in Counter(values).most_common(6))


def _summary(report: Any) -> list[str]:
    """One line per algorithm, form and backend, with the reason of its first layer, and the skipped layers."""
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for row in report:
        groups.setdefault((row.algorithm, row.form, row.backend), []).append(row)
    lines = []
    for (algorithm, form, backend), rows in groups.items():
        saved = sum(row.saved_bytes for row in rows)
        lines.append(
            f"form        {form} of {algorithm} on {backend}: {len(rows)} layers, "
            f"{_megabytes(saved)} kept for backward at {report.rows_planned} rows"
        )
        lines.append(f"            {rows[0].layer}: {rows[0].reason}")
    return [*lines, *(f"skipped     {line}" for line in report.skipped)]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB" if size >= 1e4 else f"{size} bytes"
