"""Noise, loss and sampling for the demo: a cosine schedule, velocity prediction and the deterministic DDIM sampler.

At time t in [0, 1] an image x0 with noise e is seen as x = a x0 + s e with a = cos(pi t / 2), s = sin(pi t / 2); the
model predicts v = a e - s x0, from which x0 = a x - s v and e = s x + a v (Salimans & Ho, 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]

_FIRST_TIME = 0.99


def signal_and_noise(t: Tensor) -> tuple[Tensor, Tensor]:
    """The two weights at time ``t`` (batch,), each shaped (batch, 1, 1, 1)."""
    angle = (0.5 * math.pi * t)[:, None, None, None]
    return angle.cos(), angle.sin()


def denoising_loss(model: Denoiser, x0: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """Mean squared error of the velocity; ``x0`` and ``noise`` (batch, 1, h, w), ``t`` and ``labels`` (batch,)."""
    signal, sigma = signal_and_noise(t)
    velocity = signal * noise - sigma * x0
    return F.mse_loss(model(signal * x0 + sigma * noise, t, labels), velocity)


def random_times(count: int, generator: torch.Generator | None = None) -> Tensor:
    """``count`` times in [0, 1), one in each of ``count`` equal slots: the loss spreads less than with free draws."""
    slots = torch.arange(count) + torch.rand(count, generator=generator)
    return (slots / count)[torch.randperm(count, generator=generator)]


@torch.no_grad()
def evaluate(model: Denoiser, images: Tensor, labels: Tensor, *, seed: int = 0, rounds: int = 8) -> float:
    """Denoising loss over ``images`` with fixed noise and times, so that two calls can be compared."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(rounds):
        noise = torch.randn(images.shape, generator=generator)
        total += float(denoising_loss(model, images, labels, random_times(len(images), generator), noise))
    return total / rounds


@torch.no_grad()
def sample(model: Denoiser, labels: Tensor, noise: Tensor, *, steps: int = 30) -> Tensor:
    """DDIM from ``noise`` (batch, 1, h, w) to images in [-1, 1]; the same noise and weights give the same images."""
    x = noise
    times = torch.linspace(_FIRST_TIME, 0.0, steps + 1)
    for now, then in pairwise(times):
        t = now.expand(len(x))
        signal, sigma = signal_and_noise(t)
        velocity = model(x, t, labels)
        x0 = (signal * x - sigma * velocity).clamp(-1.0, 1.0)
        direction = (x - signal * x0) / sigma
        next_signal, next_sigma = signal_and_noise(then.expand(len(x)))
        x = next_signal * x0 + next_sigma * direction
    return x.clamp(-1.0, 1.0)
