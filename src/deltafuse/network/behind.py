"""Layers whose weight is read behind their forward's back.

nn.MultiheadAttention reads out_proj.weight itself, so a hooked forward never runs: such a layer is skipped and named.
nn.TransformerEncoderLayer reads its linears in a fused fast path of eval mode: the path is switched off while adapters
are attached.
"""

from __future__ import annotations

from torch import nn

from ..core.messages import say_once

_SWITCH = "activation_relu_or_gelu"


def read_directly(root: nn.Module) -> dict[int, str]:
    """id of each layer whose forward is never called -> why."""
    return {
        id(module.out_proj): f"{path or type(root).__name__} (nn.MultiheadAttention) reads its weight directly"
        for path, module in root.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    }


def skip_note(path: str, why: str) -> None:
    """Say once that a layer was left out."""
    say_once(f"layer '{path}' was left out: {why}, so an adapter on it would never act")


def close_fast_paths(root: nn.Module, wrapped: set[int]) -> list[tuple[nn.Module, int]]:
    """Switch the fused eval path off in encoder layers that hold a wrapped layer; (module, old value) pairs."""
    closed: list[tuple[nn.Module, int]] = []
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(id(child) in wrapped for child in module.modules()):
            closed.append((module, int(getattr(module, _SWITCH))))
            setattr(module, _SWITCH, 0)
    return closed


def open_fast_paths(closed: list[tuple[nn.Module, int]]) -> None:
    """Undo :func:`close_fast_paths`."""
    for module, value in closed:
        setattr(module, _SWITCH, value)
