"""``deltafuse train``: flags made from the same fields as the config file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from ..training.config import GROUPS, JobConfig

_PANELS = {"adapter": "Adapter", "train": "Training"}
_EPILOG = "Example: deltafuse train --model MODEL_DIR --data notes/*.txt --algo lokr --out out --steps 100"
_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": bool}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("train", help="Train an adapter on a text or image model.", epilog=_EPILOG)(make_command())


def make_command() -> Callable[..., None]:
    """A function whose parameters are the fields of :class:`JobConfig`, each left out unless given."""

    def train(**given: Any) -> None:
        run_command(given)

    parameters = [_parameter(name, kind) for name, kind in _own_options().items()]
    for group, kind in [(None, JobConfig), *GROUPS.items()]:
        panel = _PANELS.get(group or "", "Job")
        parameters += [_field_option(item, panel) for item in fields(kind) if item.name not in GROUPS]
    parameters.append(_parameter("more_data", _more_data()))
    train.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    train.__annotations__ = {item.name: item.annotation for item in parameters}
    train.__doc__ = "Train an adapter on a text or image model."
    return train


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _field_option(item: Field[Any], panel: str) -> inspect.Parameter:
    """The flag of a field; its default stays None so that a config file can tell."""
    flag = f"--{item.name.replace('_', '-')}"
    kind = str(item.type).partition(" ")[0]
    text = item.metadata["help"] + _default_note(item.default)
    if kind == "bool":
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=text, rich_help_panel="Switches", show_default=False)
        return _parameter(item.name, Annotated[bool | None, option])
    option = typer.Option(flag, help=text, rich_help_panel=panel, show_default=False)
    wanted = list[str] if kind.startswith("tuple") else _TYPES[kind]
    return _parameter(item.name, Annotated[wanted | None, option])


def _default_note(default: Any) -> str:
    return "" if default is None or default in ((), "") else f" (default {str(default).lower()})"


def _own_options() -> dict[str, Any]:
    """Flags that are about this call, not about the job."""
    panel: dict[str, Any] = {"rich_help_panel": "Run", "show_default": False}
    return {
        "config": Annotated[
            str | None, typer.Option("--config", help="TOML or YAML file with the names of the flags", **panel)
        ],
        "resume": Annotated[bool | None, typer.Option("--resume", help="continue the run in --out", **panel)],
        "overwrite": Annotated[
            bool | None, typer.Option("--overwrite", help="replace the files of a run in --out", **panel)
        ],
        "dry_run": Annotated[
            bool | None, typer.Option("--dry-run", help="check and report everything, train and write nothing", **panel)
        ],
    }


def _more_data() -> Any:
    return Annotated[
        list[str] | None,
        typer.Argument(metavar="[DATA]...", help="more --data, so that --data *.txt works", show_default=False),
    ]


def run_command(values: dict[str, Any]) -> None:
    """Check, report, train and say where things are; exit code 130 after an interruption."""
    from ..training.job import execute, first_process, load_job, prepare
    from ..training.progress import make_progress
    from ..training.report import describe

    given = {key: value for key, value in values.items() if value is not None}
    own = {key: given.pop(key, None) for key in ("config", "resume", "overwrite", "dry_run", "more_data")}
    if own["more_data"]:
        given["data"] = [*given.get("data", []), *own["more_data"]]
    given = {key: value for key, value in given.items() if value != []}
    resume = bool(own["resume"])
    job = load_job(given, own["config"], resume)
    ready = prepare(job, resume=resume, overwrite=bool(own["overwrite"]), write=not own["dry_run"])
    if first_process():
        rows = job.train.batch_size * job.seq_len if job.task == "text" else None
        typer.echo(describe(ready.model, ready.network, job.train.save_dtype, rows))
    if own["dry_run"]:
        typer.echo("dry run: everything is in order; nothing was trained or written.")
        return
    result = execute(ready, make_progress())
    if first_process():
        _conclude(job, result)


def _conclude(job: JobConfig, result: Any) -> None:
    """Where things are and what to try next."""
    if result.interrupted:
        print(
            f"interrupted: saved after step {result.steps}; continue with: deltafuse train --resume --out {job.out}",
            file=sys.stderr,
        )
        raise typer.Exit(130)
    if len(result.evals) > 1:
        first, last = min(result.evals), max(result.evals)
        before, after = result.evals[first]["loss"], result.evals[last]["loss"]
        typer.echo(f"held-out loss {before:.4f} at step {first} -> {after:.4f} at step {last}")
    typer.echo(f"done: {result.steps} steps in {result.seconds:.0f} s")
    typer.echo(f"  adapter  {result.adapter}\n  numbers  {result.metrics}\n  picture  {result.plot}")
    typer.echo(f"  options  {result.adapter.parent / 'config.toml'}")
    typer.echo(f"next: deltafuse train --resume --out {job.out} --steps {2 * result.steps}   (train on)")
    typer.echo(
        f"      deltafuse.create_lycoris_from_weights(1.0, '{result.adapter}', model)   (use it; then net.apply_to())"
    )
