"""The report behind ``deltafuse.explain``: per layer, which form and backend run and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..layers.planner import NOMINAL_ROWS

_COLUMNS = ("layer", "algorithm", "form", "backend", "scale", "parameters", "saved_bytes", "reason")


@dataclass(frozen=True)
class Row:
    """One adapted layer. saved_bytes: kept for backward beyond the layer's own input, at the reported row count."""

    layer: str
    algorithm: str
    form: str
    backend: str
    reason: str
    scale: float
    strength: float
    parameters: int
    saved_bytes: int
    base: str


@dataclass(frozen=True)
class Report(Sequence[Row]):
    """Rows, printable as a table. ``rows_planned`` is the row count the plans are for."""

    rows: tuple[Row, ...]
    rows_planned: int
    skipped: tuple[str, ...] = ()
    totals: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "rows_planned": self.rows_planned, "skipped": list(self.skipped), "totals": self.totals}

    def __str__(self) -> str:
        shared = self._shared_reason()
        cells = [[_cell(getattr(row, name)) for name in _COLUMNS] for row in self.rows]
        for line in cells:
            line[-1] = line[-1].removesuffix(shared)
        lines = _aligned([list(_COLUMNS), *cells])
        total = ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in self.totals.items())
        lines.append(f"{len(self.rows)} layers planned for {self.rows_planned} rows: {total}")
        if shared:
            lines.append(f"backend {shared.removeprefix('; ')}")
        lines.extend(f"skipped: {line}" for line in self.skipped)
        return "\n".join(lines)

    def _shared_reason(self) -> str:
        """Why the backend was chosen, where every row says the same: printed once."""
        tails = {row.reason[row.reason.rfind("; auto") :] for row in self.rows if "; auto" in row.reason}
        return tails.pop() if len(tails) == 1 else ""


def _aligned(table: list[list[str]]) -> list[str]:
    """Rows of cells as lines, a rule under the first."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    ruled = [table[0], ["-" * width for width in widths], *table[1:]]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in ruled]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def explain(network: Any, rows: int = NOMINAL_ROWS) -> Report:
    """What every layer of ``network`` runs for ``rows`` rows (tokens or output positions) a call, and why."""
    lines = tuple(_row(adapter, rows) for adapter in network.loras if not adapter.not_supported)
    totals = {
        "trainable_parameters": sum(row.parameters for row in lines),
        "file_bytes": sum(_file_bytes(adapter) for adapter in network.loras if not adapter.not_supported),
        "saved_bytes": sum(row.saved_bytes for row in lines),
    }
    return Report(lines, rows, tuple(getattr(network, "skipped", ())), totals)


def _row(adapter: Any, rows: int) -> Row:
    plan = adapter.nominal_plan(rows)
    return Row(
        layer=adapter.lora_name,
        algorithm=adapter.name + ("+dora" if adapter.wd else ""),
        form=plan.form,
        backend=plan.backend,
        reason=plan.reason,
        scale=float(getattr(adapter, "scale", 1.0)),
        strength=adapter.multiplier,
        parameters=sum(item.numel() for item in adapter.parameters() if item.requires_grad),
        saved_bytes=int(plan.cost.saved),
        base=adapter.geometry.describe() if adapter.module_type[:4] in ("line", "conv") else adapter.module_type,
    )


def _file_bytes(adapter: Any) -> int:
    return sum(value.numel() * value.element_size() for value in adapter.state_dict().values())
