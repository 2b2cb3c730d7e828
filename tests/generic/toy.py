"""A small model with every layer kind that networks wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import deltafuse
from deltafuse.algorithms import algorithms

from . import table

WIDTH = 12


class Toy(nn.Module):
    """Two convolutions, a grouped one, a norm, and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.mix = nn.Conv2d(WIDTH, WIDTH, 1)
        self.depth = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, 2 * WIDTH)
        self.k = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depth(torch.nn.functional.silu(self.mix(self.stem(x)))).flatten(2).transpose(1, 2)
        return self.head(self.k(torch.tanh(self.q(self.norm(x)))))


def toy(dtype: torch.dtype = table.DOUBLE, seed: int = 3) -> Toy:
    torch.manual_seed(seed)
    return Toy().to(dtype).requires_grad_(False).eval()


def toy_input(dtype: torch.dtype = table.DOUBLE) -> Tensor:
    return torch.randn(2, 4, 5, 5, dtype=table.DOUBLE).to(dtype)


def network(model: nn.Module, algo: str, multiplier: float = 0.7, **options: Any) -> Any:
    """A stirred network over ``model`` in eval mode; block sizes that every layer of the toy takes."""
    ranks = {"boft": 8, "oft": 2, "dylora": 4}
    options = {**table.spec(algo).always, **options}
    net = deltafuse.create_lycoris(model, multiplier, ranks.get(algo, 3), 5.0, algo=algo, **options)
    dtype = next(model.parameters()).dtype
    net.to(torch.float64 if dtype == torch.float64 else torch.float32)
    for adapter in net.loras:
        table.stir(adapter, 0.1)
    return net.eval()


ALGORITHMS = list(algorithms())
