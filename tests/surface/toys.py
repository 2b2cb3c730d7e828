"""A UNet and text encoders whose classes carry the names that presets look for."""

from __future__ import annotations

import torch
from torch import nn


class CLIPAttention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size, bias=False)

    def forward(self, x):
        return x + self.v_proj(torch.tanh(self.q_proj(x)))


class CLIPMLP(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.fc1 = nn.Linear(size, 2 * size)
        self.fc2 = nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class T5Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q = nn.Linear(size, size, bias=False)

    def forward(self, x):
        return x + self.q(x)


class TextEncoder(nn.Module):
    def __init__(self, size=12, attention=CLIPAttention):
        super().__init__()
        self.embed = nn.Embedding(20, size)
        self.self_attn = attention(size)
        self.mlp = CLIPMLP(size)
        self.head = nn.Linear(size, size)

    def forward(self, ids):
        return self.head(self.mlp(self.self_attn(self.embed(ids))))


class Transformer2DModel(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.to_q = nn.Linear(size, size)
        self.to_out = nn.Linear(size, size)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.to_out(torch.tanh(self.to_q(self.norm(tokens))))
        return tokens.transpose(1, 2).reshape(x.shape)


class ResnetBlock2D(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, size)
        self.conv1 = nn.Conv2d(size, size, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(size, size, 1)

    def forward(self, x):
        return self.conv_shortcut(x) + self.conv1(torch.relu(self.norm1(x)))


class TimeEmbedding(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear_1 = nn.Linear(size, size)

    def forward(self, t):
        return self.linear_1(t)


class UNet(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.conv_in = nn.Conv2d(4, size, 3, padding=1)
        self.time_embedding = TimeEmbedding(size)
        self.down = ResnetBlock2D(size)
        self.mid = Transformer2DModel(size)
        self.other = nn.Linear(size, size)
        self.conv_out = nn.Conv2d(size, 4, 3, padding=1)

    def forward(self, x, t):
        h = self.conv_in(x) + self.time_embedding(t)[:, :, None, None]
        h = self.mid(self.down(h))
        return self.conv_out(h + self.other(t)[:, :, None, None])


UNET_LAYERS = {
    "conv_in",
    "conv_out",
    "time_embedding_linear_1",
    "down_conv1",
    "down_conv_shortcut",
    "mid_to_q",
    "mid_to_out",
}
TEXT_LAYERS = {"self_attn_q_proj", "self_attn_v_proj", "mlp_fc1", "mlp_fc2"}
