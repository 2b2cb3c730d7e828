"""Autocast gives the base layer's dtype, gradients come back in each leaf's dtype, fp16 does not overflow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deltafuse.algorithms import algorithms

from .support import KINDS, Adapted, assert_trains, build, cases, kinds_of, step, takes

FORMS = {"planned": None, "bypass": True, "merged": False}
VARIANTS = [
    (name, kind, form)
    for name, kind in cases()
    for form, forced in FORMS.items()
    if not (forced and name == "full") and (forced is None or kind == "linear")
]


def base_dtype(case: Adapted, x: torch.Tensor) -> torch.dtype:
    """What the layer gives with its adapters off."""
    layer = case.model.layer
    return type(layer).forward(layer, x).dtype


@pytest.mark.parametrize(("name", "kind", "form"), VARIANTS)
def test_autocast_keeps_the_base_dtype(name: str, kind: str, form: str) -> None:
    case = build(name, kind, bypass_mode=FORMS[form])
    x = case.kind.inputs(4)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = base_dtype(case, x)
        result = step(case, x)
    assert result.output.dtype == wanted
    assert result.x_grad is not None
    assert result.x_grad.dtype == x.dtype
    assert_trains(result)
    for leaf, grad in zip(case.leaves, result.grads, strict=True):
        assert grad is not None
        assert grad.dtype == leaf.dtype
    exact = step(case, x).output
    torch.testing.assert_close(result.output.float(), exact, rtol=0.05, atol=0.08)


@pytest.mark.parametrize("axis", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("name", [name for name in algorithms() if takes(name, "weight_decompose")])
def test_autocast_under_decomposition(name: str, axis: bool) -> None:
    case = build(name, "linear", weight_decompose=True, wd_on_out=axis)
    x = case.kind.inputs(4)
    with torch.autocast("cpu", torch.bfloat16):
        result = step(case, x)
    assert result.output.dtype == torch.bfloat16
    assert_trains(result)
    assert all(grad is not None and grad.dtype == torch.float32 for grad in result.grads)


@pytest.mark.parametrize(("name", "kind"), cases())
def test_half_base_under_wide_adapters(name: str, kind: str) -> None:
    case = build(name, kind, dtype=torch.bfloat16)
    assert all(leaf.dtype == torch.float32 for leaf in case.leaves)
    x = case.kind.inputs(4).bfloat16()
    result = step(case, x)
    assert result.output.dtype == torch.bfloat16
    assert result.x_grad is not None
    assert result.x_grad.dtype == torch.bfloat16
    assert_trains(result)
    assert all(grad is not None and grad.dtype == torch.float32 for grad in result.grads)


@pytest.mark.parametrize(("name", "kind"), cases())
def test_adapters_in_the_base_dtype(name: str, kind: str) -> None:
    case = build(name, kind, dtype=torch.bfloat16)
    for adapter in case.adapters:
        adapter.to(torch.bfloat16)
    result = step(case, case.kind.inputs(4).bfloat16())
    assert result.output.dtype == torch.bfloat16
    assert all(grad is not None and grad.dtype == torch.bfloat16 for grad in result.grads)


@pytest.mark.parametrize("name", [name for name in algorithms() if "linear" in kinds_of(name)])
def test_nested_regions(name: str) -> None:
    case = build(name, "linear")
    x = case.kind.inputs(4)
    with torch.no_grad():
        torch.manual_seed(0)
        outside = case.model(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert case.model(x).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                torch.manual_seed(0)
                inside = case.model(x)
            assert case.model(x).dtype == torch.bfloat16
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in algorithms() if "linear" in kinds_of(name)])
def test_bfloat16_input_under_float16_autocast(name: str) -> None:
    case = build(name, "linear")
    x = case.kind.inputs(4).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert case.model.layer(x).dtype == base_dtype(case, x) == torch.float16


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", ["locon", "dylora", "lokr", "glora", "tlora"])
def test_rank_space_beyond_float16(name: str, autocast: bool) -> None:
    """A value of 1e6 between the factors, a result of order 1."""
    case = build(name, "linear", bypass_mode=True)
    adapter = case.adapters[0].eval()
    first, second = {
        "locon": ("lora_down.weight", "lora_up.weight"),
        "dylora": ("down_list.0", "up_list.0"),
        "glora": ("b2.weight", "b1.weight"),
        "tlora": ("q_layer.weight", "p_layer.weight"),
        "lokr": ("lokr_w2", "lokr_w1"),
    }[name]
    named = dict(adapter.named_parameters())
    with torch.no_grad():
        named[first].fill_(2.0e5)
        named[second].fill_(1.0e-6)
    x = torch.ones(3, 12)
    if not autocast:
        case.model.layer.half()
        x = x.half()
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=autocast):
        out = case.model.layer(x)
    assert out.dtype == torch.float16
    assert torch.isfinite(out).all()
    merged = adapter.get_merged_weight(adapter.multiplier)[0]
    want = nn.functional.linear(x.float(), merged.float(), case.model.layer.bias.float())
    # T-LoRA subtracts its frozen start: of terms near 6e5 float32 itself leaves 0.1
    torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.2 if name == "tlora" else 0.02)


@pytest.mark.parametrize("name", ["locon", "lokr", "diag-oft", "ia3"])
def test_inf_stays_inf(name: str) -> None:
    case = build(name, "linear")
    x = case.kind.inputs(2)
    x[0, 3] = float("inf")
    out = case.model.layer(x)
    assert not torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1]).all()


def test_kinds_cover_what_the_registry_supports() -> None:
    """An algorithm without a layer kind here would go untested."""
    assert all(kinds_of(name) for name in algorithms())
    assert set(KINDS) >= {"linear", "conv2d"}
