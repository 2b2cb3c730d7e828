"""A task small enough to train in a blink, on a model with a dropout and a batch norm."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deltafuse
from deltafuse.training.config import TrainConfig
from deltafuse.training.loop import TrainResult, run
from deltafuse.training.task import make_loader, mean_loss

TEST_DEVICE = os.environ.get("DELTAFUSE_TEST_DEVICE", "cpu")


class ToyTask:
    """Learn to reverse a vector, with noise on the input drawn from the global random state."""

    name = "toy"

    def __init__(self, noise: float = 0.0, size: int = 50, poison_at: int = -1) -> None:
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(size, 8, generator=generator)
        self.data = TensorDataset(data, data.flip(1))
        self.noise, self.poison_at, self.calls = noise, poison_at, 0

    def batches(self, split: Any, batch_size: int) -> DataLoader[Any]:
        return make_loader(self.data, batch_size, split)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        given, wanted = batch
        self.calls += model.training
        error = (model(given + self.noise * torch.randn_like(given)) - wanted).square().mean()
        return error * float("nan") if self.calls == self.poison_at else error

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        return mean_loss(self, model, batches)


def toy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


def toy_network(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(1)
    return deltafuse.create_lycoris(model, 1.0, **{"algo": "lora", "linear_dim": 4, "linear_alpha": 2.0, **options})


def train_toy(
    out: Path, task: ToyTask | None = None, *, resume: bool = False, **options: Any
) -> tuple[TrainResult, nn.Module, Any]:
    """Train, and give back the result, the model and the network."""
    model = toy_model()
    network = toy_network(model)
    config = TrainConfig(**{"steps": 6, "lr": 1e-2, "batch_size": 8, "device": TEST_DEVICE, **options})
    return run(task or ToyTask(), model, network, config, out, resume=resume), model, network


def parameters(network: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in network.named_parameters()}
