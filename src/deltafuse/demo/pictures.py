"""The pictures of the demo: samples before and after, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.optional import require


def tile(images: Tensor, columns: int, gap: int = 1) -> Tensor:
    """(count, 1, h, w) in [-1, 1] -> one (rows, columns) sheet in [0, 1] with a white gap between the images."""
    padded = torch.nn.functional.pad(images[:, 0] * 0.5 + 0.5, (gap, gap, gap, gap), value=1.0)
    rows = -(-len(padded) // columns)
    missing = rows * columns - len(padded)
    padded = torch.cat([padded, padded.new_ones(missing, *padded.shape[1:])])
    height, width = padded.shape[1:]
    return padded.view(rows, columns, height, width).permute(0, 2, 1, 3).reshape(rows * height, columns * width)


def enlarge(images: Tensor, factor: int = 6) -> Tensor:
    """Smooth enlargement, so that an 8x8 digit reads as one."""
    return torch.nn.functional.interpolate(images, scale_factor=factor, mode="bicubic").clamp(-1.0, 1.0)


def check_plotting() -> None:
    """Raise the error that names what to install, before any work is done."""
    require("matplotlib", extra="demo", purpose="the pictures of the demo")


def draw_samples(before: Tensor, after: Tensor, titles: tuple[str, str], path: Path, columns: int) -> None:
    """Two sheets (count, 1, h, w) beside each other: the same noise through the base and through the adapter."""
    sheets = [(title, tile(enlarge(images), columns)) for title, images in zip(titles, (before, after), strict=True)]
    pyplot = _pyplot()
    height, width = sheets[0][1].shape
    figure, axes = pyplot.subplots(1, len(sheets), figsize=(5.6 * len(sheets), 5.4 * height / width + 0.4))
    for axis, (title, sheet) in zip(axes, sheets, strict=True):
        axis.imshow(sheet.numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(title)
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _pyplot() -> Any:
    matplotlib = require("matplotlib", extra="demo", purpose="the pictures of the demo")
    matplotlib.use("Agg")
    return require("matplotlib.pyplot", extra="demo", purpose="the pictures of the demo")
