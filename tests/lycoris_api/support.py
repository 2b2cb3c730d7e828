"""Layers, inputs and parameter values that every test of the suite draws from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .target import ON_PEER

STRENGTHS = (-1.0, 0.3, 1.0, 2.0)


@dataclass(frozen=True)
class Layer:
    """A base layer and the shape of an input it takes."""

    make: Any
    shape: tuple[int, ...]

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(11)
        layer = self.make().to(dtype)
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        return layer

    def input(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(5)).to(dtype)


LAYERS: dict[str, Layer] = {
    "linear": Layer(lambda: nn.Linear(40, 24), (3, 5, 40)),
    "linear-nobias": Layer(lambda: nn.Linear(15, 24, bias=False), (7, 15)),
    "linear-odd": Layer(lambda: nn.Linear(21, 15), (2, 3, 21)),
    "conv1d": Layer(lambda: nn.Conv1d(15, 24, 3, stride=2, padding=1), (2, 15, 11)),
    "conv2d": Layer(lambda: nn.Conv2d(10, 24, 3, padding=1), (2, 10, 7, 6)),
    "conv2d-nobias": Layer(lambda: nn.Conv2d(10, 24, 3, padding=1, bias=False), (2, 10, 7, 6)),
    "conv2d-1x1": Layer(lambda: nn.Conv2d(14, 24, 1), (3, 14, 5, 4)),
    "conv2d-uneven": Layer(lambda: nn.Conv2d(9, 24, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 9, 8, 7)),
    "conv3d": Layer(lambda: nn.Conv3d(6, 24, (1, 3, 2), padding=(0, 1, 0)), (2, 6, 3, 5, 4)),
    "conv2d-dilated": Layer(lambda: nn.Conv2d(9, 24, 3, padding=2, dilation=2), (2, 9, 9, 8)),
    "conv2d-grouped": Layer(lambda: nn.Conv2d(12, 24, 3, padding=1, groups=3), (2, 12, 6, 5)),
}
MAIN_LAYERS = ("linear", "linear-nobias", "conv1d", "conv2d", "conv2d-1x1", "conv3d")


def randomise(module: nn.Module, seed: int = 3) -> nn.Module:
    """Give every parameter a value away from its start; a fresh adapter would hide a dead path."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor)

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "scalar":
                parameter.fill_(0.7)
            elif leaf in ("dora_scale", "rescale"):
                parameter.mul_(1.0 + 0.1 * noise(parameter))
            else:
                parameter.add_(0.15 * noise(parameter))
    return module


def saved(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's own tensors under their file names.

    lycoris-lora's full module writes ``-W`` before apply_to (semantics.md rule 43); its parameters are read instead.
    """
    if ON_PEER and type(module).__name__ == "FullModule" and module.is_diff:
        named = {"diff": module.weight, "diff_b": module.bias}
        return {key: value.detach().clone() for key, value in named.items() if value is not None}
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def delta_of(module: nn.Module, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the adapted forward adds to the base output."""
    with torch.no_grad():
        return module(x) - layer(x)


def functional_op(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    """The layer's own operation with another weight, in the dtype of ``x``."""
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    return layer._conv_forward(x, weight, bias)


class ToyBlock(nn.Module):
    def __init__(self, width: int = 18) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width + 3)
        self.to_out = nn.Linear(width + 3, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.to_out(torch.tanh(self.to_q(x))))


class ToyModel(nn.Module):
    """Two blocks, a convolution, a norm and a head; ``net(x)`` takes (batch, 5, 6, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(5, 18, 3, padding=1)
        self.group_norm = nn.GroupNorm(3, 18)
        self.blocks = nn.ModuleList([ToyBlock(), ToyBlock()])
        self.head = nn.Linear(18, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.group_norm(self.conv_in(x)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def toy_model() -> ToyModel:
    torch.manual_seed(2)
    model = ToyModel().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def toy_input() -> torch.Tensor:
    return torch.randn(3, 5, 6, 6, generator=torch.Generator().manual_seed(8))


@dataclass
class Case:
    """One constructor call: algorithm, layer and options."""

    algo: str
    layer: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items() if key not in ("lora_dim", "alpha")]
        return "-".join([self.algo, self.layer, *words])
