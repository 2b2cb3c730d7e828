"""``deltafuse explain``: which form and backend each layer runs, and why, before any training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import CheckpointError, OptionError
from .tables import print_table

if TYPE_CHECKING:
    from torch import nn

_COLUMNS = ("layer", "algorithm", "form", "backend", "scale", "parameters", "saved_bytes", "reason")


@dataclasses.dataclass(frozen=True)
class Question:
    """What to explain: a model (None: the demo's) with a new adapter or with one from a file."""

    algo: str = "lokr"
    model: str | None = None
    adapter: Path | None = None
    rank: int = 8
    alpha: float = 4.0
    preset: str | None = None
    options: tuple[str, ...] = ()


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("explain", help="Show per layer which form and backend run, and why.")(explain)


def explain(
    algo: Annotated[str, typer.Option(help="Adapter algorithm.")] = "lokr",
    model: Annotated[
        str | None, typer.Option(help="Model directory or .gguf file; without it, the denoiser of the demo.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="The denoiser of the demo, as without --model.")] = False,
    adapter: Annotated[Path | None, typer.Option(help="Explain this adapter file instead of a new adapter.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Adapter rank.")] = 8,
    alpha: Annotated[float, typer.Option(help="Adapter alpha; the scale is alpha / rank.")] = 4.0,
    preset: Annotated[str | None, typer.Option(help="Target preset: which modules are adapted.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Algorithm option key=value; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Attach the adapter, print the report, train nothing."""
    import deltafuse

    if demo and model is not None:
        raise OptionError(f"--demo and --model '{model}' name two models; give one of them")
    network = attach(Question(algo, model, adapter, rank, alpha, preset, tuple(option or ())))
    report = deltafuse.explain(network)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)


def attach(question: Question) -> Any:
    """The network to explain, on its model."""
    if question.adapter is not None and not question.adapter.is_file():
        raise CheckpointError(f"no adapter file '{question.adapter}'")
    model, preset = _load_model(question.model)
    network = _from_file(question.adapter, model) if question.adapter else _new(question, model, preset)
    network.apply_to()
    return network


def _load_model(source: str | None) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model, and for the demo's the preset of its blocks."""
    if source is None:
        from ..demo.base import load_base
        from ..demo.recipes import ADAPTED_BLOCKS

        return load_base(), {"target_module": list(ADAPTED_BLOCKS)}
    if _is_denoiser(Path(source).expanduser()):
        from ..integrations.diffusers import load_denoiser

        return load_denoiser(source)[0], None
    from ..integrations.transformers import load_causal_lm

    return load_causal_lm(source)[0], None


def _is_denoiser(path: Path) -> bool:
    """Whether ``path`` is a directory in diffusers' layout."""
    if any((path / name).is_file() for name in ("model_index.json", "unet/config.json", "transformer/config.json")):
        return True
    config = path / "config.json"
    try:
        return config.is_file() and "_class_name" in json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"'{config}' is not JSON: {error}") from error


def _from_file(path: Path, model: nn.Module) -> Any:
    from .. import create_lycoris_from_weights

    return create_lycoris_from_weights(1.0, str(path), model)[0]


def _new(question: Question, model: nn.Module, preset: dict[str, Any] | None) -> Any:
    from ..training.adapter import OWN_FLAGS, build_network, parse_options
    from ..training.config import AdapterConfig
    from ..training.targets import LINEAR_AND_CONV

    if preset is None or question.preset is not None:
        config = AdapterConfig(
            algo=question.algo,
            rank=question.rank,
            alpha=question.alpha,
            preset=question.preset,
            option=question.options,
        )
        return build_network(model, config, LINEAR_AND_CONV)
    from .. import create_lycoris

    options = parse_options(question.options, OWN_FLAGS)
    return create_lycoris(
        model,
        1.0,
        linear_dim=question.rank,
        linear_alpha=question.alpha,
        algo=question.algo,
        preset=preset,
        **options,
    )


def _print(report: Any) -> None:
    rows = [[_cell(getattr(row, column)) for column in _COLUMNS] for row in report.rows]
    print_table("Adapted layers", [column.replace("_", " ") for column in _COLUMNS], rows)
    totals = [(key.replace("_", " "), _cell(value)) for key, value in report.totals.items()]
    print_table(f"Totals, planned for {report.rows_planned} rows a call", ("what", "value"), totals)
    if report.skipped:
        print_table("Skipped", ("layer and reason",), [(line,) for line in report.skipped])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
