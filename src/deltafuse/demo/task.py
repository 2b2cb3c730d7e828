"""The demo as a task of the training loop: teach one digit, measure it, draw it before and after."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..training.task import Split, make_loader
from .data import check_digit, load_digits
from .diffusion import denoising_loss, evaluate, random_times, sample
from .model import IMAGE_SIZE
from .pictures import draw_samples

SAMPLES_NAME = "samples.png"
_SAMPLES = 24


class DemoTask:
    """Denoising of one digit's images under that digit's label; the held-out numbers come from images never trained on.

    ``evaluate`` reports ``loss`` for the digit and ``other_digits_loss`` for the nine others, with the same noise in
    every call. The digit's images fit in memory many times over, so noise is the only thing that changes per epoch.
    """

    name = "demo"

    def __init__(self, digit: int, seed: int = 0, sample_steps: int = 30) -> None:
        self.digit = check_digit(digit)
        self.seed = seed
        self.sample_steps = sample_steps
        train, held_out = load_digits()
        self.splits = {"train": train.only(digit), "held_out": held_out.only(digit)}
        self.others = held_out.without(digit)
        self.before: Tensor | None = None

    def batches(self, split: Split, batch_size: int) -> DataLoader[Any]:
        """Pairs of images (batch, 1, 8, 8) and labels (batch,)."""
        data = self.splits[split]
        return make_loader(TensorDataset(data.images, data.labels), batch_size, split)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Velocity error at random times; noise and times come from the global random state."""
        images, labels = batch
        times = random_times(len(images)).to(images.device)
        return denoising_loss(model, images, labels, times, torch.randn_like(images))

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Held-out loss of the digit and of the others."""
        parts = list(batches)
        images = torch.cat([images for images, _ in parts]).cpu()
        labels = torch.cat([labels for _, labels in parts]).cpu()
        return {
            "loss": evaluate(model, images, labels),
            "other_digits_loss": evaluate(model, self.others.images, self.others.labels, rounds=2),
        }

    def samples(self, model: nn.Module, out_dir: Path, step: int) -> Path | None:
        """Keep the first call's images; draw later ones beside them in ``samples.png``."""
        images = self.draw(model)
        if self.before is None:
            self.before = images
            return None
        path = out_dir / SAMPLES_NAME
        titles = (f'base model, asked for "{self.digit}"', f"with the adapter, step {step}, same noise")
        draw_samples(self.before, images, titles, path)
        return path

    def draw(self, model: nn.Module) -> Tensor:
        """Samples (24, 1, 8, 8) of the digit from noise that depends on the seed alone."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(_SAMPLES, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        return sample(model, torch.full((_SAMPLES,), self.digit), noise, steps=self.sample_steps)
