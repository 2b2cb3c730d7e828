"""A small UNet and text encoder whose classes carry the names that the presets target."""

from __future__ import annotations

import torch
from torch import nn


class Transformer2DModel(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, width)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.to_k = nn.Linear(width, width + 2)
        self.to_v = nn.Linear(width, width + 2)
        self.to_out = nn.Linear(width + 2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        h = self.to_out(torch.tanh(self.to_k(h)) * self.to_v(h))
        return x + h.transpose(1, 2).reshape(x.shape)


class ResnetBlock2D(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.time_emb_proj = nn.Linear(6, width)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv1(x) + self.time_emb_proj(emb)[:, :, None, None])


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 12, 3, padding=1)
        self.time_embedding = nn.ModuleDict({"linear_1": nn.Linear(5, 6), "linear_2": nn.Linear(6, 6)})
        self.down_blocks = nn.ModuleList([nn.ModuleDict({"attn": Transformer2DModel(), "res": ResnetBlock2D()})])
        self.conv_out = nn.Conv2d(12, 4, 3, padding=1)
        self.untouched = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        emb = self.time_embedding["linear_2"](torch.tanh(self.time_embedding["linear_1"](t)))
        h = self.conv_in(x)
        for block in self.down_blocks:
            h = block["attn"](block["res"](h, emb))
        return self.conv_out(h)


class CLIPAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(10, 10)
        self.k_proj = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.q_proj(x) * torch.tanh(self.k_proj(x))


class CLIPMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 15)
        self.fc2 = nn.Linear(15, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.tanh(self.fc1(x)))


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"self_attn": CLIPAttention(), "mlp": CLIPMLP()})])
        self.final = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["mlp"](layer["self_attn"](x))
        return self.final(x)


def models(encoders: int = 1) -> tuple[Unet, TextEncoder | list[TextEncoder]]:
    """(UNet, text encoder or list of several), frozen, from a fixed seed."""
    torch.manual_seed(12)
    unet = Unet().eval().requires_grad_(False)
    tes = [TextEncoder().eval().requires_grad_(False) for _ in range(encoders)]
    return unet, tes[0] if encoders == 1 else tes


def unet_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 4, 6, 5, generator=generator), torch.randn(2, 5, generator=generator)


def te_input() -> torch.Tensor:
    return torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(4))
