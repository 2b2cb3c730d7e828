"""The last check of the demo: the file alone, put on a fresh model, gives the outputs of the trained network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from .base import load_base
from .diffusion import sample
from .model import CLASSES, IMAGE_SIZE

TOLERANCE = 1e-5
_PROBE_SEED = 1234


@torch.no_grad()
def probe(model: nn.Module, digit: int) -> Tensor:
    """Outputs to compare: one prediction per class over all noise levels, and a few sampled images of the digit."""
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    labels = torch.arange(CLASSES).repeat(3)
    noisy = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    times = torch.linspace(0.02, 0.98, len(labels))
    images = sample(model, torch.full((4,), digit), noisy[:4], steps=10)
    return torch.cat([model(noisy, times, labels), images])


def reload_difference(trained: Tensor, path: Path, digit: int, strength: float) -> float:
    """Largest absolute difference between ``trained`` (from :func:`probe`) and a fresh base with the file on it."""
    from .. import create_lycoris_from_weights

    fresh = load_base()
    network, _ = create_lycoris_from_weights(strength, str(path), fresh)
    network.apply_to()
    network.eval()
    return float((probe(fresh, digit) - trained).abs().max())
