"""A small class-conditioned image denoiser: convolutions, attention, MLPs and norms in one plain torch module.

It is a two-level U-Net in pixel space. Every width is a power of two, so that each algorithm finds a legal block in
each adapted layer; query, key, value and output are separate ``nn.Linear`` layers, as most trainers expect them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE_SIZE = 8
CLASSES = 10
NULL_LABEL = CLASSES


def timestep_features(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of ``t`` in [0, 1], shape (batch,) -> (batch, width)."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=t.device, dtype=t.dtype) / half)
    angles = 1000.0 * t[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class Conditioning(nn.Module):
    """One vector for time and class; the last row of the label table is the null label (no class)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)
        self.label = nn.Embedding(CLASSES + 1, width)

    def forward(self, t: Tensor, labels: Tensor) -> Tensor:
        """(batch,), (batch,) -> (batch, width)."""
        time = self.time_out(F.silu(self.time_in(timestep_features(t, self.width))))
        return F.silu(time + self.label(labels))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, scaled and shifted by the condition in between; a 1x1 skip where the widths differ."""

    def __init__(self, inputs: int, outputs: int, condition: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.condition = nn.Linear(condition, 2 * outputs)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(batch, inputs, h, w), (batch, condition) -> (batch, outputs, h, w)."""
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        return self.skip(x) + h


class Attention(nn.Module):
    """Multi-head self-attention over tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> (batch, tokens, width)."""
        batch, tokens, width = x.shape
        q, k, v = (
            project(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class FeedForward(nn.Module):
    """A two-layer MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> (batch, tokens, width)."""
        return self.down(F.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """Attention and MLP over the pixels of a feature map."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, h, w) -> (batch, width, h, w)."""
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(self.norm1(tokens))
        tokens = tokens + self.mlp(self.norm2(tokens))
        return tokens.transpose(1, 2).reshape(x.shape)


class DigitDenoiser(nn.Module):
    """Predicts the velocity of an 8x8 grey image at noise time ``t`` for a class label (or :data:`NULL_LABEL`).

    Shapes: x (batch, 1, 8, 8), t (batch,) in [0, 1], labels (batch,) int64 -> (batch, 1, 8, 8).
    """

    def __init__(self, width: int = 64, condition: int = 128) -> None:
        super().__init__()
        wide = 2 * width
        self.conditioning = Conditioning(condition)
        self.conv_in = nn.Conv2d(1, width, 3, padding=1)
        self.encode = ResidualBlock(width, width, condition)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.middle1 = ResidualBlock(width, wide, condition)
        self.middle_attention = TransformerBlock(wide, heads=4)
        self.middle2 = ResidualBlock(wide, wide, condition)
        self.up = nn.Conv2d(wide, width, 3, padding=1)
        self.decode = ResidualBlock(2 * width, width, condition)
        self.decode_attention = TransformerBlock(width, heads=4)
        self.norm_out = nn.GroupNorm(8, width)
        self.conv_out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        condition = self.conditioning(t, labels)
        high = self.encode(self.conv_in(x), condition)
        low = self.middle1(self.down(high), condition)
        low = self.middle2(self.middle_attention(low), condition)
        low = self.up(F.interpolate(low, scale_factor=2.0, mode="nearest"))
        h = self.decode(torch.cat([low, high], dim=1), condition)
        h = self.decode_attention(h)
        return self.conv_out(F.silu(self.norm_out(h)))
