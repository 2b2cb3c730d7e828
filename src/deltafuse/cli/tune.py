"""``deltafuse tune``: time the kernels' configurations ahead of a run and keep the best ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .tables import print_table

if TYPE_CHECKING:
    from ..benchmarking.tune import Plan, Report


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("tune", help="Time the Triton kernels' configurations on this card and keep the best ones.")(tune)


def tune(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer as rows x out x in and rank, 4096x3072x3072r16; may be repeated. Default: common layers of"
            " diffusion models and LLMs."
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, float16 or bfloat16. Default: bfloat16, float32 on a CPU.")
    ] = None,
    primitive: Annotated[
        list[str] | None, typer.Option(help="Operation to tune; may be repeated. Default: all with kernels.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU where there is one.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Time what has been tuned before, too.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write every result of this card to this table file.")] = None,
) -> None:
    """Tune, storing each result at once, and print the best configurations next to the defaults."""
    from ..benchmarking.tune import cases, start, write_table
    from ..benchmarking.tune import tune as run
    from .devices import progress

    plan = _plan(shape or [], dtype or [], primitive or [], device, again)
    report, calls = start(plan), cases(plan)
    try:
        for _ in progress(run(plan, report), len(calls), "tune"):
            pass
    finally:  # an interrupted run keeps and shows what it has
        show(report)
        if out is not None:
            typer.echo(f"table of {write_table(out, plan.device)} entries: {out}")


def _plan(shape: list[str], dtype: list[str], primitive: list[str], device: str | None, again: bool) -> Plan:
    from ..backends import require_backend
    from ..benchmarking.tune import BACKEND, Plan
    from ..primitives import shapes
    from .devices import parse_device, parse_dtype

    where = parse_device(device)
    require_backend(BACKEND, where)
    gpu = where.type == "cuda"
    sizes = [shapes.parse(text) for text in shape] or (shapes.to_tune() if gpu else list(shapes.TINY))
    dtypes = [parse_dtype(name) for name in dtype or ["bfloat16" if gpu else "float32"]]
    return Plan(where, dtypes, sizes, primitive, again)


def show(report: Report) -> None:
    """Best against default for each key, and where results are."""
    rows = []
    for item in report.outcomes:
        times = [f"{1e6 * seconds:.1f}" for seconds in (item.default_seconds, item.seconds)]
        config = "default" if item.config == item.default else _short(item.config)
        rows.append((item.kernel, item.key, *times, f"{item.default_seconds / item.seconds:.2f}x", config))
    columns = ("kernel", "dtype, row bucket, sizes, flags", "default us", "best us", "gain", "configuration")
    print_table("Tuned", columns, rows)
    for note in report.notes:
        typer.echo(note)
    better = sum(1 for item in report.outcomes if item.config != item.default)
    typer.echo(f"{len(report.outcomes)} tuned, {better} of them faster than the default; kept in {report.store}")


def _short(config: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in vars(config).items())
