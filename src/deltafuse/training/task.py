"""What the loop asks of a task. A task owns its data and its loss; the loop owns everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ..core.errors import DataError

Split = Literal["train", "held_out"]


@runtime_checkable
class Task(Protocol):
    """A kind of training job.

    A task may also define ``attach(network)``, called once with the applied adapter, and
    ``samples(model, out_dir: Path, step: int) -> Path | None``. The loop calls the latter in eval mode, without
    gradients and with a fixed seed, before the first step and after the last one; training randomness is not disturbed.
    """

    name: str

    def batches(self, split: Split, batch_size: int) -> DataLoader[Any] | None:
        """Batches of one split (see :func:`make_loader`), or None where there are no held-out data.

        Items must not draw from the global random state: noise belongs in :meth:`loss`, so that a resumed run sees
        the same numbers as an uninterrupted one.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Scalar mean loss of one batch that is already on the model's device."""
        ...

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Numbers on held-out batches, at least ``loss``. Called in eval mode, without gradients, fixed seed."""
        ...


class EndlessShuffle(Sampler[int]):
    """Indices of a dataset of ``size`` items, shuffled anew each epoch, without end.

    Every epoch's order depends on the seed and the epoch only and epochs follow each other inside a batch, so any
    position can be taken up again and every micro-batch is full, also where the data are fewer than one batch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.seed = 0
        self.position = 0

    def begin(self, seed: int, position: int = 0) -> None:
        """Set the seed and the first sample (counted over all epochs) of the next iteration."""
        self.seed, self.position = seed, position

    def __iter__(self) -> Iterator[int]:
        epoch, offset = divmod(self.position, self.size)
        while True:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            yield from torch.randperm(self.size, generator=generator).tolist()[offset:]
            epoch, offset = epoch + 1, 0


def make_loader(
    dataset: Dataset[Any], batch_size: int, split: Split, collate: Any = None, workers: int = 0
) -> DataLoader[Any]:
    """Endless shuffled batches for ``train``, one ordered pass for ``held_out``; global random state is left alone."""
    size = len(dataset)  # type: ignore[arg-type]
    if size == 0:
        raise DataError(f"the {split} data hold no samples.")
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=EndlessShuffle(size) if split == "train" else None,
        collate_fn=collate,
        num_workers=workers,
        generator=torch.Generator(),
    )


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0]
    items = batch.values() if isinstance(batch, dict) else batch
    return batch_length(next(iter(items)))


def mean_loss(task: Task, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """``{"loss": mean over samples}``: the evaluation of a task that has nothing better to measure."""
    pairs = [(task.loss(model, batch).detach().double(), batch_length(batch)) for batch in batches]
    if not pairs:
        return {}
    total = torch.stack([loss * length for loss, length in pairs]).sum()
    return {"loss": (total / sum(length for _, length in pairs)).item()}


def attach_task(task: Task, network: Any) -> None:
    """Call the task's optional ``attach`` where it has one."""
    attach = getattr(task, "attach", None)
    if callable(attach):
        attach(network)


def write_samples(task: Task, model: nn.Module, out_dir: Path, step: int) -> Path | None:
    """Call the task's optional ``samples`` where it has one."""
    samples = getattr(task, "samples", None)
    return samples(model, out_dir, step) if callable(samples) else None
