"""``deltafuse verify``: every backend's primitives against float64, on this machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .tables import print_table

if TYPE_CHECKING:
    from ..verification import Plan, Result

_COLUMNS = (
    "primitive", "example", "M x N x K, rank", "dtype", "backend", "error", "eager", "worst gradient", "eager",
    "ULP median / max", "of the limit", "result",
)  # fmt: skip
_QUICK = 1


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("verify", help="Check every backend's primitives, forward and backward, against float64.")(verify)


def verify(
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend to check; may be repeated. Default: all that can run here.")
    ] = None,
    primitive: Annotated[
        list[str] | None, typer.Option(help="Primitive to check; may be repeated. Default: all with examples.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU where there is one.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, float16 or bfloat16; may be repeated. Default: all it can run.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Size as rows x out x in and rank, 4096x3072x3072r16; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One small size instead of three.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Layers of real models too; for GPUs.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every result to this file.", metavar="FILE")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every row, not one a primitive and dtype.")] = False,
) -> None:
    """Print the worst rows, write all of them on request; exit code 1 where anything fails."""
    plan = make_plan(backend or [], primitive or [], device, dtype or [], shape or [], quick, full)
    results = run_plan(plan)
    if json_file is not None:
        write(json_file, plan, results)
    show(results, every)
    if any(result.status == "FAIL" for result in results):
        raise typer.Exit(1)


def make_plan(
    backends: list[str], primitives: list[str], device: str | None, dtypes: list[str], wanted: list[str], quick: bool,
    full: bool,
) -> Plan:  # fmt: skip
    """What to run; options that contradict one another are errors."""
    from ..core.errors import OptionError
    from ..primitives import shapes
    from ..verification import Plan
    from .devices import parse_device, parse_dtype

    if quick and full:
        raise OptionError("--quick and --full name two lists of sizes; give one of them")
    where = parse_device(device)
    if full and where.type != "cuda":
        raise OptionError(f"--full is for GPUs: on {where.type} its float64 references take hours")
    sizes = list(shapes.SMALL[:_QUICK] if quick else shapes.SMALL)
    if full:
        sizes += shapes.sweep()
    if wanted:
        sizes = [shapes.parse(text) for text in wanted]
    default = ["float32", "float16"] + (["bfloat16"] if where.type == "cuda" else [])
    return Plan(where, [parse_dtype(name) for name in dtypes or default], sizes, primitives, backends)


def run_plan(plan: Plan) -> list[Result]:
    """Every result, behind a progress bar on a terminal."""
    from ..verification import verify as run
    from ..verification.sweep import cases
    from .devices import progress

    total = sum(1 for _ in cases(plan))
    return [result for group in progress(run(plan), total, "verify") for result in group]


def write(path: Path, plan: Plan, results: list[Result]) -> None:
    """All results and where they come from."""
    from ..benchmarking.provenance import provenance

    record = {"provenance": provenance(plan.device), "results": [result.to_dict() for result in results]}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def show(results: list[Result], every: bool) -> None:
    """The table, and one line that counts."""
    print_table("Against float64", _COLUMNS, [_row(result) for result in (results if every else worst(results))])
    counts = {status: sum(1 for result in results if result.status == status) for status in ("pass", "FAIL", "not run")}
    typer.echo(f"{counts['pass']} passed, {counts['FAIL']} failed, {counts['not run']} not run")


def worst(results: list[Result]) -> list[Result]:
    """Every failure, and of the rest the worst one a backend, primitive, dtype and status."""
    kept: dict[Any, Result] = {}
    for index, result in enumerate(results):
        key: Any = (result.backend, result.primitive, result.dtype, result.status, result.note)
        if result.status == "FAIL":
            key = index
        if key not in kept or _badness(result) > _badness(kept[key]):
            kept[key] = result
    return list(kept.values())


def _badness(result: Result) -> float:
    value = result.error if math.isnan(result.ratio) else result.ratio
    return -1.0 if math.isnan(value) else value


def _row(result: Result) -> list[str]:
    sizes = result.sizes
    return [
        result.primitive, result.example, f"{sizes.rows} x {sizes.out} x {sizes.inner}, {sizes.rank}",
        str(result.dtype).removeprefix("torch."), "eager" if result.backend == "torch" else result.backend,
        _number(result.error), _number(result.eager), _number(result.grad), _number(result.eager_grad),
        "-" if math.isnan(result.ulp_max) else f"{result.ulp_median:.2g} / {result.ulp_max:.3g}",
        "-" if math.isnan(result.ratio) else f"{100 * result.ratio:.0f} %",
        f"{result.status}: {result.note}" if result.note else result.status,
    ]  # fmt: skip


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"
