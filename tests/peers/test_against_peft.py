"""PEFT's LoRA and DoRA give our numbers after the factors are copied; its DoRA is our ``detach_norm=True``."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from deltafuse.modules import LoConModule
from lycoris_api.target import relative_error

RANK, ALPHA = 3, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(15, 24)
        self.conv = nn.Conv2d(10, 13, 3, padding=1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) if x.shape[-1] == 15 else self.conv(x)


INPUTS = {"proj": (3, 4, 15), "conv": (2, 10, 7, 6)}


def pair(target: str, dora: bool = False, rslora: bool = False, **options):
    """(PEFT model, our adapter on an equal layer), with the same random factors and magnitude."""
    torch.manual_seed(3)
    model = Model()
    layer = getattr(model, target)
    twin = type(layer)(15, 24) if target == "proj" else nn.Conv2d(10, 13, 3, padding=1, stride=2)
    twin.load_state_dict(layer.state_dict())
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[target], use_dora=dora, use_rslora=rslora)
    peft = get_peft_model(model, config)
    tuned = getattr(peft.base_model.model, target)
    mine = LoConModule("x", twin, 1.0, RANK, ALPHA, weight_decompose=dora, rs_lora=rslora, **options)
    with torch.no_grad():
        for source, own in ((tuned.lora_A["default"], mine.lora_down), (tuned.lora_B["default"], mine.lora_up)):
            source.weight.normal_(std=0.3)
            own.weight.copy_(source.weight)
        if dora:
            magnitude = tuned.lora_magnitude_vector["default"].weight
            magnitude.mul_(1 + 0.2 * torch.rand_like(magnitude))
            mine.dora_scale.copy_(magnitude.reshape(mine.dora_scale.shape))
    return tuned, mine, twin


@pytest.mark.parametrize("target", ["proj", "conv"])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
def test_lora(target, rslora, bypass):
    tuned, mine, twin = pair(target, rslora=rslora, bypass_mode=bypass)
    x = torch.randn(INPUTS[target])
    assert relative_error(mine(x) - twin(x), tuned(x) - twin(x)) < 2e-5


@pytest.mark.parametrize("target", ["proj", "conv"])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
def test_dora_output(target, detach, bypass):
    tuned, mine, twin = pair(target, dora=True, detach_norm=detach, bypass_mode=bypass)
    x = torch.randn(INPUTS[target])
    assert relative_error(mine(x) - twin(x), tuned(x) - twin(x)) < 2e-5


def gradients(module: nn.Module, leaves: dict[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = module(x)
    (y * torch.sin(torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape))).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()} | {"x": x.grad}


def leaves_of(tuned: nn.Module, mine: nn.Module) -> tuple[dict, dict]:
    peer = {"down": tuned.lora_A["default"].weight, "up": tuned.lora_B["default"].weight}
    own = {"down": mine.lora_down.weight, "up": mine.lora_up.weight}
    if tuned.lora_magnitude_vector:
        peer["magnitude"] = tuned.lora_magnitude_vector["default"].weight
        own["magnitude"] = mine.dora_scale
    return peer, own


@pytest.mark.parametrize("target", ["proj", "conv"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bypass", [False, True])
def test_gradients(target, dora, bypass):
    """PEFT holds the DoRA norm constant in the backward; so does detach_norm=True (rule 15)."""
    options = {"detach_norm": True} if dora else {}
    tuned, mine, _ = pair(target, dora=dora, bypass_mode=bypass, **options)
    peer_leaves, own_leaves = leaves_of(tuned, mine)
    peer, own = gradients(tuned, peer_leaves, INPUTS[target]), gradients(mine, own_leaves, INPUTS[target])
    for name, value in peer.items():
        assert relative_error(own[name].reshape(value.shape), value) < 1e-4, name


@pytest.mark.parametrize("target", ["proj", "conv"])
def test_the_norm_s_gradient_is_the_difference(target):
    """With the norm in the graph, as lycoris-lora has it, only the factors' gradients change."""
    tuned, mine, _ = pair(target, dora=True, detach_norm=False)
    peer_leaves, own_leaves = leaves_of(tuned, mine)
    peer, own = gradients(tuned, peer_leaves, INPUTS[target]), gradients(mine, own_leaves, INPUTS[target])
    for name in ("x", "magnitude"):
        assert relative_error(own[name].reshape(peer[name].shape), peer[name]) < 1e-4, name
    for name in ("down", "up"):
        assert relative_error(own[name], peer[name]) > 1e-3, name
