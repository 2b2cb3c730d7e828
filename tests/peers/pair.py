"""The same adapter in both packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lycoris_api.support import LAYERS, Case, randomise

NAME = "lycoris_block_0_proj"
SEED = 7


def build(modules: Any, class_name: str, case: Case, **more: Any) -> tuple[nn.Module, nn.Module]:
    """(adapter, its layer), from a fixed seed."""
    layer = LAYERS[case.layer].build()
    torch.manual_seed(SEED)
    return getattr(modules, class_name)(NAME, layer, 1.0, **case.options, **more), layer


def tensors(module: nn.Module, algo: str) -> dict[str, torch.Tensor]:
    """The module's file tensors; lycoris-lora's full module has no valid ones before apply_to (rule 43)."""
    state = module.state_dict()
    if algo == "full" and type(module).__module__.startswith("lycoris."):
        state = {"diff": module.weight, "diff_b": module.bias}
    return {key: value.detach().clone() for key, value in state.items() if value is not None}


def randomised(modules: Any, class_name: str, case: Case, **more: Any) -> tuple[nn.Module, nn.Module, dict]:
    module, layer = build(modules, class_name, case, **more)
    randomise(module).eval()
    return module, layer, tensors(module, case.algo)


def filled(modules: Any, class_name: str, case: Case, state: dict, **more: Any) -> tuple[nn.Module, nn.Module]:
    """A fresh adapter whose parameters come from a file's tensors."""
    module, layer = build(modules, class_name, case, **more)
    if case.algo == "full":
        with torch.no_grad():
            kept = dict(module.named_parameters())
            weight = kept.get("weight", kept.get("diff"))
            weight.copy_(state["diff"])
            if "diff_b" in state:
                kept.get("bias", kept.get("diff_b")).copy_(state["diff_b"])
        return module.eval(), layer
    module.load_state_dict(dict(state), strict=False)
    return module.eval(), layer


def delta(module: nn.Module, layer: nn.Module, x: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
    module.multiplier = strength
    with torch.no_grad():
        return module(x) - layer(x)
