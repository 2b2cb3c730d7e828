"""The UCI digits that scikit-learn ships, split by class and into training and held-out images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import OptionError
from ..core.optional import require
from .model import CLASSES

HELD_OUT_FRACTION = 0.2
_SPLIT_SEED = 20


@dataclass(frozen=True)
class Digits:
    """Grey images (count, 1, 8, 8) in [-1, 1] with their labels (count,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, digit: int) -> Digits:
        """The images of one digit."""
        return self._select(self.labels == digit)

    def without(self, digit: int) -> Digits:
        """The images of all other digits."""
        return self._select(self.labels != digit)

    def joined(self, other: Digits, times: int) -> Digits:
        """These images followed by ``other`` repeated ``times`` times."""
        images = torch.cat([self.images, other.images.repeat(times, 1, 1, 1)])
        return Digits(images, torch.cat([self.labels, other.labels.repeat(times)]))

    def _select(self, mask: Tensor) -> Digits:
        return Digits(self.images[mask], self.labels[mask])


def check_digit(digit: int) -> int:
    """``digit`` if it is one, else :class:`OptionError`."""
    if not 0 <= digit < CLASSES:
        raise OptionError(f"digit is {digit}; legal: 0 to {CLASSES - 1}")
    return digit


def load_digits() -> tuple[Digits, Digits]:
    """Training and held-out images of all ten digits; the split is the same in every run."""
    datasets = require("sklearn.datasets", extra="demo", purpose="the digits of the demo")
    raw = datasets.load_digits()
    images = torch.as_tensor(raw.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    labels = torch.as_tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    held_out = int(HELD_OUT_FRACTION * len(order))
    test, train = order[:held_out], order[held_out:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])
