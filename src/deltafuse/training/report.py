"""What is about to be trained, in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def describe(model: nn.Module, network: Any, save_dtype: str) -> str:
    """Layers by algorithm, trainable and base parameters, size of the file, effective scale; with explain's table."""
    import deltafuse

    trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    own = {id(p) for p in network.parameters()}
    base = sum(p.numel() for p in model.parameters() if id(p) not in own)
    size = trainable * _BYTES[save_dtype]
    rows = [
        f"adapter     {_algorithms(network)}",
        f"parameters  {trainable:,} trainable, {base:,} in the base ({100 * trainable / max(1, base):.2f} %)",
        f"file        about {_megabytes(size)} in {save_dtype}",
        f"scale       {_scales(network)}",
    ]
    return "\n".join([*rows, str(deltafuse.explain(network))])


def _algorithms(network: Any) -> str:
    counts = Counter(str(getattr(module, "algo", type(module).__name__)) for module in network.loras)
    return ", ".join(f"{name} on {count} layers" for name, count in counts.most_common())


def _scales(network: Any) -> str:
    """The distinct values of alpha / rank times strength."""
    values = Counter(
        round(float(module.scale) * float(module.multiplier), 6)
        for module in network.loras
        if getattr(module, "scale", None) is not None
    )
    shown = ", ".join(f"{value:g} ({count} layers)" for value, count in values.most_common(6))
    return f"alpha / rank x strength = {shown}" if shown else "none: this algorithm has no scale"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e4 else f"{size} bytes"
