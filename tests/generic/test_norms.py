"""Norm layers: train what exists, skip the rest by name, equal in every path (rule 31)."""

from __future__ import annotations

import copy
import logging

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import deltafuse
from deltafuse.modules import NormModule
from helpers import oracle

from . import table

DOUBLE = table.DOUBLE
NORMS = {
    "layernorm": (lambda: nn.LayerNorm(15), (4, 3, 15)),
    "layernorm_2d": (lambda: nn.LayerNorm((3, 5)), (4, 3, 5)),
    "layernorm_no_bias": (lambda: nn.LayerNorm(15, bias=False), (4, 15)),
    "groupnorm": (lambda: nn.GroupNorm(3, 12), (2, 12, 4, 3)),
    "groupnorm_1d": (lambda: nn.GroupNorm(1, 6), (3, 6, 7)),
    "rmsnorm": (lambda: nn.RMSNorm(15), (4, 2, 15)),
}


def stirred_base(kind: str) -> nn.Module:
    base = NORMS[kind][0]().double().requires_grad_(False)
    for value in base.parameters():
        value.add_(torch.randn_like(value) * 0.3)
    return base


def want(base: nn.Module, adapter: NormModule, x: Tensor, m: float) -> Tensor:
    """The same class with w + m w_norm and b + m b_norm."""
    changed = copy.deepcopy(base)
    changed.__dict__.pop("forward", None)
    state = {}
    for key, change in (("weight", adapter.w_norm), ("bias", adapter.b_norm)):
        stored = getattr(base, key, None)
        if stored is not None:
            state[key] = stored + m * change.view_as(stored)
    return torch.func.functional_call(changed, state, (x,))


@pytest.mark.parametrize("kind", NORMS)
def test_norms_in_every_path(kind: str) -> None:
    base = stirred_base(kind)
    pristine = copy.deepcopy(base)
    adapter = NormModule("lycoris_layer", base, 1.0).double()
    table.stir(adapter)
    adapter.eval()
    x = torch.randn(NORMS[kind][1], dtype=DOUBLE, requires_grad=True)
    still = pristine(x)
    below = NormModule("below", base, 1.0).double().eval()
    for stacked in (False, True):
        if stacked:
            below.apply_to()
        adapter.apply_to()
        for m in table.STRENGTHS:
            adapter.multiplier = m
            y = base(x)
            wanted = want(pristine, adapter, x, m)
            assert float((y - wanted).norm()) <= 1e-9 * float((wanted - still).norm()) + 1e-12
            grads = torch.autograd.grad(y.square().sum(), [x, *adapter.parameters()], allow_unused=True)
            wants = torch.autograd.grad(wanted.square().sum(), [x, *adapter.parameters()], allow_unused=True)
            if m:
                for got, expected in zip(grads, wants, strict=True):
                    assert oracle.relative(got, expected) < 1e-9
            else:
                with torch.no_grad():
                    assert torch.equal(base(x), still)
        adapter.restore()
        below.restore()
    adapter.multiplier = 0.3
    wanted = want(pristine, adapter, x, 0.3)
    adapter.onfly_merge(0.3)
    torch.testing.assert_close(base(x), wanted, rtol=1e-11, atol=1e-13)
    adapter.onfly_restore()
    assert all(
        torch.equal(a, b) for a, b in zip(base.state_dict().values(), pristine.state_dict().values(), strict=True)
    )
    state = {f"lycoris_layer.{key}": value for key, value in adapter.state_dict().items()}
    tensors = safetensors.torch.load(safetensors.torch.save(state))
    model = nn.ModuleDict({"layer": copy.deepcopy(pristine)})
    net, _ = deltafuse.create_lycoris_from_weights(0.3, None, model, tensors)
    net.eval().apply_to()
    torch.testing.assert_close(model["layer"](x), wanted, rtol=1e-11, atol=1e-13)
    leaves = (x, *adapter.parameters())
    adapter.apply_to()
    assert torch.autograd.gradcheck(lambda x, *_: base(x), leaves, fast_mode=True)
    adapter.restore()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_keep_dtype_and_merge_exactly(kind: str, dtype: torch.dtype) -> None:
    base = stirred_base(kind).to(dtype)
    before = copy.deepcopy(base.state_dict())
    adapter = NormModule("n", base, 1.0)
    table.stir(adapter)
    x = torch.randn(NORMS[kind][1]).to(dtype).requires_grad_(True)
    adapter.apply_to()
    y = base(x)
    y.float().square().mean().backward()
    assert y.dtype == dtype
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in adapter.parameters())
    adapter.onfly_merge(1.0)
    adapter.onfly_restore()
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())
    adapter.restore()
    assert "forward" not in base.__dict__


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(8, elementwise_affine=False),
        nn.GroupNorm(2, 8, affine=False),
        nn.RMSNorm(8, elementwise_affine=False),
    ],
)
def test_a_norm_without_affine_part_is_skipped_by_name(layer: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"plain": layer, "fc": nn.Linear(8, 8)})
    with caplog.at_level(logging.WARNING):
        net = deltafuse.create_lycoris(model, 1.0, 2, 3.0, train_norm=True)
    assert [item.lora_name for item in net.loras] == ["lycoris_fc"]


def test_train_norm_finds_every_kind() -> None:
    model = nn.ModuleDict({"a": nn.LayerNorm(8), "b": nn.GroupNorm(2, 8), "c": nn.RMSNorm(8), "d": nn.Linear(8, 8)})
    net = deltafuse.create_lycoris(model, 1.0, 2, 3.0, train_norm=True)
    assert [item.lora_name for item in net.loras] == [f"lycoris_{key}" for key in "abcd"]
    assert [type(item).__name__ for item in net.loras][:3] == ["NormModule"] * 3
