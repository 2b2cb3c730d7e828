"""Any leading shape, any rank, any memory layout (rules 26 and 27)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltafuse.algorithms import get_algorithm
from helpers import oracle
from helpers.oracle import Setting

from . import table
from .test_gradients import attached, forms

ALGORITHMS = table.weight_algorithms()
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"weight_decompose": True}, {"weight_decompose": True, "wd_on_out": False})
LEADS = ((), (0,), (1,), (2, 0), (6,), (2, 3), (2, 1, 3), (1, 2, 1, 3))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_linear_layers_take_any_leading_shape(name: str) -> None:
    for options in OPTIONS:
        adapter = table.build(name, nn.Linear(12, 24).double(), options, multiplier=0.7)
        rows = torch.randn(6, 12, dtype=table.DOUBLE)
        for form in forms(name):
            with attached(adapter, form) as hooked:
                want = hooked(rows)
                for lead in LEADS:
                    count = torch.Size(lead).numel()
                    x = rows[:count].reshape(*lead, 12).clone().requires_grad_(True)
                    adapter.zero_grad()
                    y = hooked(x)
                    assert y.shape == (*lead, 24), f"{form} {lead}"
                    torch.testing.assert_close(y.reshape(-1, 24), want[:count], rtol=1e-10, atol=1e-12)
                    y.square().sum().backward()
                    assert x.grad is not None
                    assert x.grad.shape == x.shape
                    for leaf, parameter in adapter.named_parameters():
                        assert parameter.grad is not None, f"{form} {lead} {leaf}"
                        assert torch.isfinite(parameter.grad).all(), f"{form} {lead} {leaf}"
                        if not count and leaf not in ("dora_scale",):
                            assert not parameter.grad.any(), f"{form} {lead} {leaf}"


@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "conv2d_groups", "conv2d_reflect_same", "conv3d"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_convolutions_take_unbatched_and_empty_inputs(name: str, kind: str) -> None:
    layer = table.LAYERS[kind]
    for options in (*OPTIONS, {"use_tucker": True}):
        if not set(options) <= get_algorithm(name).module_class.options:
            continue
        adapter = table.build(name, layer.base(), options, multiplier=0.7)
        x = layer.x()
        for form in forms(name):
            with attached(adapter, form) as hooked:
                whole = hooked(x)
                torch.testing.assert_close(hooked(x[0]), whole[0], rtol=1e-9, atol=1e-11)
                if adapter.geometry.pad and not runs(layer, x[:0]):
                    continue
                assert hooked(x[:0]).shape == whole[:0].shape, f"{form} {options}"


def runs(layer: table.Layer, x: Tensor) -> bool:
    """Whether the plain layer takes this input at all."""
    try:
        layer.base()(x)
    except RuntimeError:
        return False
    return True


RANKED = [name for name in ALGORITHMS if "rs_lora" in get_algorithm(name).module_class.options]


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 7, 11, 13, 30])
@pytest.mark.parametrize("name", RANKED)
def test_any_rank_from_one_to_beyond_the_dimension(name: str, rank: int) -> None:
    layers = {
        "linear": table.Layer(lambda: nn.Linear(7, 13), (3, 7)),
        "conv": table.Layer(lambda: nn.Conv2d(6, 9, (3, 2), padding=1), (2, 6, 4, 5)),
    }
    always = {"block_size": 1} if name == "dylora" else {}
    for layer in layers.values():
        for options in (
            {},
            {"rs_lora": True},
            {"weight_decompose": True},
            {"use_tucker": True},
            {"decompose_both": True},
        ):
            if not set(options) <= get_algorithm(name).module_class.options:
                continue
            base = layer.base()
            pristine = copy.deepcopy(base)
            adapter = table.build(name, base, {**options, **always}, multiplier=0.3, rank=rank)
            x = layer.x()
            weight, bias = oracle.delta(adapter, pristine.weight, Setting(rank, table.ALPHA, options), 0.3)
            want = oracle.through(pristine, weight, bias, x)
            for form in forms(name):
                with attached(adapter, form) as hooked, torch.no_grad():
                    got = hooked(x) - pristine(x)
                assert oracle.relative(got, want) < 1e-9, f"{form} {options}"


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers in other memory layouts."""
    spaced = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    spaced[..., ::2] = x
    padded = torch.zeros(x.shape[0] + 2, *x.shape[1:], dtype=x.dtype)
    padded[1:-1] = x
    out = {
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
        "every second": spaced[..., ::2],
        "slice": padded[1:-1],
    }
    if x.dim() == 4:
        out["channels last"] = x.contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        out["channels last 3d"] = x.contiguous(memory_format=torch.channels_last_3d)
    return out


@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv2d_groups", "conv2d_1x1", "conv3d"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_memory_layout_changes_nothing(name: str, kind: str) -> None:
    layer = table.LAYERS[kind]
    for options in OPTIONS:
        adapter = table.build(name, layer.base(), options, multiplier=0.7)
        x = layer.x()
        for form in forms(name):
            with attached(adapter, form) as hooked:
                dy = torch.randn_like(hooked(x))
                want = run(hooked, adapter, x, dy)
                for what, other in layouts(x).items():
                    assert torch.equal(other, x)
                    same(want, run(hooked, adapter, other, dy), f"{form} {options} x {what}")
                for what, other in layouts(dy).items():
                    same(want, run(hooked, adapter, x, other), f"{form} {options} dy {what}")


def run(hooked: nn.Module, adapter: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Output and all gradients; x keeps its layout."""
    point = x.detach().requires_grad_(True)
    y = hooked(point)
    return [y.detach(), *torch.autograd.grad(y, [point, *adapter.parameters()], dy)]


def same(want: list[Tensor], got: list[Tensor], what: str) -> None:
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_expanded_inputs_and_gradients(name: str) -> None:
    for options in OPTIONS:
        adapter = table.build(name, nn.Linear(12, 24).double(), options)
        conv = table.build(name, nn.Conv2d(6, 12, 3, padding=1).double(), options)
        cases: list[tuple[Any, Tensor, Callable[[Tensor], Tensor]]] = [
            (
                adapter,
                torch.randn(12, dtype=table.DOUBLE).expand(4, 3, 12),
                lambda y: torch.ones(()).double().expand_as(y),
            ),
            (
                conv,
                torch.randn(6, 1, 1, dtype=table.DOUBLE).expand(2, 6, 4, 5),
                lambda y: torch.ones(()).double().expand_as(y),
            ),
        ]
        for module, x, gradient in cases:
            for form in forms(name):
                with attached(module, form) as hooked:
                    dy = gradient(hooked(x))
                    want = run(hooked, module, x.contiguous(), dy.contiguous())
                    same(want, run(hooked, module, x, dy), f"{form} {options} expanded")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_saved_tensors_are_whole_contiguous_and_unshared(name: str) -> None:
    for layer in (table.LAYERS["linear_odd"], table.LAYERS["conv2d"]):
        base = layer.base()
        if not table.legal_rank(name, base):
            continue
        for options in table.variants(name):
            adapter = table.build(name, base, options)
            state = adapter.state_dict()
            places = [value.untyped_storage().data_ptr() for value in state.values()]
            assert len(set(places)) == len(places), f"{options}: shared memory"
            for key, value in state.items():
                assert value.is_contiguous(), f"{options} {key}"
                assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), f"{options} {key}"
