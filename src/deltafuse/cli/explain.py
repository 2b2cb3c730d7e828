"""``deltafuse explain``: which form and backend each layer runs, and why, before any training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .tables import print_table

_COLUMNS = ("layer", "algorithm", "form", "backend", "scale", "parameters", "saved_bytes", "reason")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("explain", help="Show per layer which form and backend run, and why.")(explain)


def explain(
    algo: Annotated[str, typer.Option(help="Adapter algorithm.")] = "lokr",
    model: Annotated[
        str | None, typer.Option(help="A model directory or .gguf file; without it, the denoiser of the demo.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Explain the denoiser of the demo (the default model).")] = False,
    adapter: Annotated[Path | None, typer.Option(help="Explain this adapter file instead of a new adapter.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Adapter rank.")] = 8,
    alpha: Annotated[float, typer.Option(help="Adapter alpha; the scale is alpha / rank.")] = 4.0,
    preset: Annotated[str | None, typer.Option(help="Target preset: which modules are adapted.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Algorithm option key=value; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Attach the adapter, print the report, train nothing."""
    report = build_report(algo, model, demo, adapter, rank, alpha, preset, option or [])
    if as_json:
        typer.echo(json.dumps(report_data(report), indent=2))
    else:
        _print(report)


def report_data(report: Any) -> dict[str, Any]:
    """The report as plain data: ``{"rows": [...], "totals": {...}}``."""
    return {"rows": [_plain(row) for row in report], "totals": _plain(report.totals)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
