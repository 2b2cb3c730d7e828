"""``deltafuse bench``: time single operations (``ops``) and whole training steps (``steps``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .tables import print_table

if TYPE_CHECKING:
    from ..benchmarking.ops import Arm, Plan, Row


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    group = typer.Typer(help="Time operations and training steps; every arm is checked before it is timed.")
    group.command("ops", help="Time each primitive, forward and backward, against eager, compile and the floor.")(ops)
    group.command("steps", help="Time a training step of every adapter next to the frozen model.")(steps)
    group.callback(invoke_without_command=True)(_overview)
    app.add_typer(group, name="bench")


def _overview(context: typer.Context) -> None:
    """Time operations and training steps; every arm is checked before it is timed."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def ops(
    primitive: Annotated[
        list[str] | None, typer.Option(help="Primitive to time; may be repeated. Default: all with examples.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Size as rows x out x in and rank, 4096x3072x3072r16; may be repeated.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, float16 or bfloat16. Default: bfloat16, float32 on a CPU.")
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="eager, compile or a backend; may be repeated. Default: eager, compile, triton."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU where there is one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for every sample.")] = None,
    small: Annotated[bool, typer.Option("--small", help="One tiny size and few rounds: a smoke run.")] = False,
    first: Annotated[bool, typer.Option("--first", help="Only the first example of each primitive.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each arm.")] = 15,
    calls: Annotated[int, typer.Option(min=1, help="Calls in the loop behind one wall-time sample.")] = 10,
    commit: Annotated[str, typer.Option(help="Recorded where the machine has no git history.")] = "",
) -> None:
    """Measure, save and print; exit code 1 where an arm computes something wrong."""
    from ..benchmarking.ops import bench, cases
    from .devices import progress

    plan = _plan(primitive, shape, dtype, arm, device, small, first, rounds, calls)
    total = sum(1 for _ in cases(plan))
    rows = list(progress(bench(plan, out, commit), total, "bench"))
    show(rows, list(plan.arms))
    if out is not None:
        typer.echo(f"every sample: {out}")
    if any("WrongResult" in item.note for row in rows for item in row.arms.values()):
        raise typer.Exit(1)


def _plan(
    primitive: list[str] | None, shape: list[str] | None, dtype: list[str] | None, arm: list[str] | None,
    device: str | None, small: bool, first: bool, rounds: int, calls: int,
) -> Plan:  # fmt: skip
    from ..backends import available_backends
    from ..benchmarking.ops import COMPILE, DEFAULT_ARMS, EAGER, Plan
    from ..core.errors import OptionError, unknown_name
    from ..primitives import shapes
    from .devices import parse_device, parse_dtype

    where = parse_device(device)
    known = available_backends(where)
    for name in arm or ():
        if name not in (EAGER, COMPILE, *known):
            raise OptionError(unknown_name("arm", name, [EAGER, COMPILE, *known]))
    arms = arm or [name for name in DEFAULT_ARMS if name == EAGER or known[name]]
    sizes = [shapes.parse(text) for text in shape or ()] or list(shapes.TINY if small else shapes.common())
    default = "bfloat16" if where.type == "cuda" else "float32"
    dtypes = [parse_dtype(name) for name in dtype or [default]]
    if small:
        rounds, calls = min(rounds, 2), min(calls, 2)
    return Plan(where, dtypes, sizes, primitive or (), arms, rounds, calls, first_example_only=first)


def show(rows: list[Row], arms: list[str]) -> None:
    """One line an arm."""
    columns = ("primitive", "example", "M x N x K, rank", "dtype", "arm", "device us", "floor us", "wall us", "host us",
               "launches", "peak MB", "error", "note")  # fmt: skip
    lines = [_line(row, row.arms[name]) for row in rows for name in arms if name in row.arms]
    print_table("Forward and backward, medians", columns, lines)
    for row in rows:
        if row.note:
            typer.echo(f"{row.primitive} [{row.example}]: not run: {row.note}")


def _line(row: Row, arm: Arm) -> list[str]:
    from ..benchmarking.ops import median

    sizes = row.sizes
    times = [_plain(median(samples), ".1f") for samples in (arm.device_us, arm.wall_us, arm.host_us)]
    peak = None if arm.peak_bytes is None else arm.peak_bytes / 2**20
    return [
        row.primitive, row.example, f"{sizes.rows} x {sizes.out} x {sizes.inner}, {sizes.rank}",
        str(row.dtype).removeprefix("torch."), arm.name, times[0], f"{row.floor_us:.1f}", *times[1:],
        "-" if arm.launches is None else str(arm.launches), _plain(peak, ".1f"), _plain(arm.error, ".1e"), arm.note,
    ]  # fmt: skip


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def steps(
    out: Annotated[Path, typer.Option(help="JSON file for every round.")] = Path("steps.json"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU where there is one.")] = None,
    small: Annotated[bool, typer.Option("--small", help="A tiny model: a smoke run.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Add compiled arms.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Adapter to run, such as 'lokr f8'; may be repeated.")] = None,
    commit: Annotated[str, typer.Option(help="Recorded where the machine has no git history.")] = "",
    count: Annotated[int, typer.Option("--steps", min=1, help="Steps in a round.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each arm.")] = 5,
) -> None:
    """Measure every arm, printing a line and saving after each."""
    from ..benchmarking.steps import Options, main
    from .devices import parse_device

    kind = parse_device(device).type
    main(Options(out, kind, small, compiled, tuple(only or ()), commit, count, rounds))
