"""Pictures of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.optional import require


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Bias-corrected exponential mean, one value per input."""
    out, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = weight * mean + (1 - weight) * value
        out.append(mean / (1 - weight**count))
    return out


def plot_loss(records: Sequence[dict[str, Any]], path: Path, title: str = "") -> Path:
    """Training loss (raw and smoothed) and held-out loss over steps, written to ``path`` in one move."""
    require("matplotlib", extra="train", purpose="loss.png")
    figure_class = require("matplotlib.figure", extra="train").Figure
    canvas = require("matplotlib.backends.backend_agg", extra="train").FigureCanvasAgg
    figure = figure_class(figsize=(7, 4), dpi=120)
    canvas(figure)
    axes = figure.add_subplot()
    train = [(r["step"], r["loss"]) for r in records if isinstance(r.get("loss"), float)]
    held = [(r["step"], r["eval_loss"]) for r in records if isinstance(r.get("eval_loss"), float)]
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training, each step")
        axes.plot(steps, smooth(losses), color="tab:blue", label="training, smoothed")
    if held:
        steps, losses = zip(*held, strict=True)
        axes.plot(steps, losses, color="tab:orange", marker="o", markersize=4, label="held out")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if train or held:
        axes.legend()
    figure.tight_layout()
    temporary = path.with_name(f".{path.stem}.tmp.png")
    figure.savefig(temporary)
    os.replace(temporary, path)
    return path
