"""``deltafuse demo``: teach a small model a digit that it has never seen, in minutes, on a CPU, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..demo.recipes import Recipe
    from ..demo.run import Demo, DemoResult


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo", help="Teach a small image model a digit it has never seen: minutes on a CPU, no network.")(demo)


def demo(
    algo: Annotated[str, typer.Option(help="Adapter algorithm; 'deltafuse doctor' lists them.")] = "lokr",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 300,
    out: Annotated[Path, typer.Option(help="Directory for the four files.")] = Path("deltafuse-demo"),
    rank: Annotated[int | None, typer.Option(min=1, help="Adapter rank; default: suits the algorithm.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="The scale is alpha / rank; default: suits the algorithm.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: suits the algorithm.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    digit: Annotated[
        int | None, typer.Option(help="Digit to teach; default: the one the base has never seen.", min=0, max=9)
    ] = None,
    strength: Annotated[float, typer.Option(help="Strength of the adapter: 0 is the base, 1 the adapter.")] = 1.0,
    option: Annotated[
        list[str] | None, typer.Option(help="Algorithm option key=value, such as factor=4; may be repeated.")
    ] = None,
) -> None:
    """Check everything, train, show where things are; exit code 1 if the written file does not reload."""
    from ..demo.run import Demo, DemoSettings
    from ..training.adapter import OWN_FLAGS, parse_options
    from ..training.progress import make_progress

    settings = DemoSettings(
        algo, steps, out, rank, alpha, lr, seed, digit, strength, parse_options(option or [], OWN_FLAGS)
    )
    prepared = Demo(settings)
    print(introduction(prepared))
    result = prepared.run(make_progress())
    if result.training.interrupted:
        place = result.training.adapter
        typer.echo(f"interrupted after step {result.training.steps}; the adapter so far is '{place}'", err=True)
        raise typer.Exit(130)
    print(summary(prepared, result))
    if not result.reload_ok:
        typer.echo(reload_line(result), err=True)
        raise typer.Exit(1)


def introduction(demo: Demo) -> str:
    """What is about to happen, in a few lines."""
    recipe, settings = demo.recipe, demo.settings
    layers = demo.network.loras
    count = sum(parameter.numel() for parameter in demo.network.parameters())
    base = sum(parameter.numel() for parameter in demo.model.parameters())
    seen = "has never seen" if demo.digit == demo.base.left_out else "already knows"
    return "\n".join(
        [
            f"deltafuse demo: teach a digit denoiser the {demo.digit}, which its base {seen}.",
            f"  base     {base:,} parameters, frozen; trained {demo.base.steps} steps on the digits"
            f" except {demo.base.left_out}",
            f"  adapter  {settings.algo}{_size(recipe, layers)}, on {len(layers)} layers,"
            f" {count:,} trainable parameters",
            f"  data     {len(demo.task.images)} images of the {demo.digit} to train on,"
            f" {len(demo.task.held_out)} held out",
            f"  run      {settings.steps} steps of {demo.config.batch_size} images, learning rate {recipe.lr:g},"
            f" seed {settings.seed}",
        ]
    )


def _size(recipe: Recipe, layers: Sequence[Any]) -> str:
    """Rank, alpha and the scales in force, where the algorithm has them; LoKr with two full factors has scale 1."""
    text = f", rank {recipe.rank}" if any(hasattr(layer, "lora_dim") for layer in layers) else ""
    scales = sorted({float(layer.scale) for layer in layers if getattr(layer, "scale", None) is not None})
    shown = ", ".join(f"{value:g}" for value in scales)
    return f"{text}, alpha {recipe.alpha:g} (scale {shown})" if scales else text


def reload_line(result: DemoResult) -> str:
    """One sentence on the reload check."""
    from ..demo.reload import TOLERANCE

    verdict = "the same" if result.reload_ok else "NOT the same"
    return (
        f"reload check: '{result.training.adapter.name}' on a fresh base gives {verdict} outputs"
        f" (largest difference {result.reload_difference:.1e}, allowed {TOLERANCE:.0e})"
    )


def summary(demo: Demo, result: DemoResult) -> str:
    """Numbers, places, and what to try next."""
    training = result.training
    size = training.adapter.stat().st_size / 1024
    out = demo.settings.out
    lines = [
        "",
        f"Denoising loss on held-out images of the {demo.digit}: {_fall(result, 'loss')}",
        f"  on the nine other digits:         {_fall(result, 'other_digits_loss')}",
        f"{training.steps} steps in {training.seconds:.0f} s.",
        *([reload_line(result)] if result.reload_ok else []),
        "",
        f"Written to {out}/",
        f"  {training.adapter.name}  the adapter, {size:.0f} KiB",
        f"  {training.metrics.name}        every step's numbers",
        f"  {training.plot.name}             loss over steps",
        f"  {result.samples.name}          before and after, side by side",
        "",
        "Try next:",
        *_suggestions(demo),
    ]
    return "\n".join(lines)


def _fall(result: DemoResult, key: str) -> str:
    before, after = result.before[key], result.after[key]
    return f"{before:.4f} -> {after:.4f} ({100 * (after / before - 1):+.0f} %)"


def _suggestions(demo: Demo) -> list[str]:
    algo = "loha" if demo.settings.algo != "loha" else "lokr"
    out = demo.settings.out
    return [
        f"  deltafuse demo --algo {algo} --out {out}-{algo}    another algorithm on the same task",
        f"  deltafuse explain --adapter {out / 'adapter.safetensors'}    which form each layer runs, and why",
        "  deltafuse train --help    your own model and data",
    ]
