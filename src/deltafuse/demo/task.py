"""The demo as a task of the training loop: teach one digit, measure it, draw it before and after."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ..training.task import Split, make_loader
from .data import Digits, check_digit, load_digits
from .diffusion import denoising_loss, evaluate, random_times, sample
from .model import CLASSES, IMAGE_SIZE
from .pictures import draw_samples

SAMPLES_NAME = "samples.png"
OTHERS_SHARE = 0.25
_COLUMNS = 9
_SAMPLE_ROWS = 3
_OTHERS_MEASURED = 100
SAMPLE_STEPS = 30


class DemoTask:
    """Denoising of one digit's images under that digit's label, and of some others', so that they are not forgotten.

    On average :data:`OTHERS_SHARE` of a training batch shows other digits. ``evaluate`` reports ``loss`` for the digit
    and ``other_digits_loss`` for the nine others, on images never trained on and with the same noise in every call.
    """

    name = "demo"

    def __init__(self, digit: int, seed: int = 0) -> None:
        self.digit = check_digit(digit)
        self.seed = seed
        train, held_out = load_digits()
        self.images, self.other_images = train.only(digit), train.without(digit)
        self.held_out, self.others = held_out.only(digit), held_out.without(digit)
        self.before: Tensor | None = None

    def batches(self, split: Split, batch_size: int) -> DataLoader[Any]:
        """Pairs of images (batch, 1, 8, 8) and labels (batch,)."""
        data = self._mixture() if split == "train" else self.held_out
        return make_loader(TensorDataset(data.images, data.labels), batch_size, split)

    def _mixture(self) -> Digits:
        """All other digits' images once, the digit's repeated until the shares are right."""
        share = (1 - OTHERS_SHARE) / OTHERS_SHARE
        return self.other_images.joined(self.images, round(share * len(self.other_images) / len(self.images)))

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
            "other_digits_loss": evaluate(model, *self._few_others(), rounds=2),
        }

    def _few_others(self) -> tuple[Tensor, Tensor]:
        """The first held-out images of other digits: the split is shuffled, so they are of all nine."""
        return self.others.images[:_OTHERS_MEASURED], self.others.labels[:_OTHERS_MEASURED]

    def samples(self, model: nn.Module, out_dir: Path, step: int) -> Path | None:
        """Keep the first call's images; draw later ones beside them in ``samples.png``."""
        images = self.draw(model)
        if self.before is None:
            self.before = images
            return None
        path = out_dir / SAMPLES_NAME
        titles = (f'base, asked for "{self.digit}"', f"with the adapter after {step} steps, same noise")
        draw_samples(self.before, images, titles, path, _COLUMNS)
        return path

    def draw(self, model: nn.Module) -> Tensor:
        """Samples (36, 1, 8, 8) from noise that the seed alone decides: three rows of the digit, one of the others."""
        others = [digit for digit in range(CLASSES) if digit != self.digit]
        labels = torch.tensor([self.digit] * (_SAMPLE_ROWS * _COLUMNS) + others)
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        return sample(model, labels, noise, steps=SAMPLE_STEPS)
