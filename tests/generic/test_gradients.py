"""Gradients: gradcheck, equal to the oracle's in every form, complete, additive, in the right dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from helpers import oracle

from . import table

ALGORITHMS = table.weight_algorithms()
SMALL = {
    "linear": table.Layer(lambda: nn.Linear(6, 8), (3, 6)),
    "conv2d": table.Layer(lambda: nn.Conv2d(4, 8, (2, 3), padding=1, stride=(1, 2)), (2, 4, 3, 4)),
    "conv1d_groups": table.Layer(lambda: nn.Conv1d(4, 8, 3, padding=1, groups=2, padding_mode="circular"), (2, 4, 5)),
}


@contextmanager
def attached(adapter: Any, form: str) -> Iterator[nn.Module]:
    """The adapted layer with the adapter in one form: planned, bypass, merged, or beside another adapter."""
    base = adapter.org_module[0]
    below = table.build("locon", base, stirred=False, dtype=adapter.dtype) if form == "beside" else None
    if below is not None:
        below.requires_grad_(False).apply_to()
    adapter.bypass_mode = {"bypass": True, "merged": False}.get(form)
    adapter.apply_to()
    try:
        yield base
    finally:
        adapter.restore()
        if below is not None:
            below.restore()


def forms(name: str) -> list[str]:
    given = {None: "planned", True: "bypass", False: "merged"}
    return [given[forced] for forced in table.spec(name).can_force] + ["beside"]


def grads_of(out: Tensor, grad: Tensor, x: Tensor, adapter: nn.Module) -> dict[str, Tensor | None]:
    names = ["x", *(name for name, _ in adapter.named_parameters())]
    leaves = [x, *adapter.parameters()]
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("kind", table.MATERIAL)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_the_oracles_in_every_form(name: str, kind: str) -> None:
    layer = table.LAYERS[kind]
    bad = []
    for options in table.variants(name):
        base = layer.base()
        pristine = copy.deepcopy(base)
        adapter = table.build(name, base, options, multiplier=0.3)
        x = layer.x().requires_grad_(True)
        weight, bias = oracle.delta(adapter, pristine.weight, table.setting(name, base, options), 0.3)
        y = pristine(x) + oracle.through(pristine, weight, bias, x)
        dy = torch.randn_like(y)
        want = grads_of(y, dy, x, adapter)
        floor = 1e-5 * max(float(item.norm()) for item in want.values() if item is not None)
        for form in forms(name):
            with attached(adapter, form) as hooked:
                got = grads_of(hooked(x), dy, x, adapter)
            for leaf, expected in want.items():
                assert expected is not None
                own = got[leaf]
                error = float("inf") if own is None else oracle.relative(own, expected, floor)
                if not error <= 1e-9:
                    bad.append(f"{form} {options} d{leaf}: {error:.1e}")
    assert not bad, f"{len(bad)} differ:\n" + "\n".join(bad[:20])


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradcheck(name: str, kind: str) -> None:
    """Slow mode on the plain variant, fast mode on every other option set."""
    layer = SMALL[kind]
    for index, options in enumerate(table.variants(name)):
        if options.get("detach_norm"):
            continue  # the detached norm is not the function's derivative; the oracle test covers it
        base = layer.base()
        if not table.legal_rank(name, base):
            pytest.skip("no legal block")
        adapter = table.build(name, base, options, multiplier=0.6)
        x = layer.x().requires_grad_(True)
        leaves = (x, *adapter.parameters())
        for form in forms(name):
            with attached(adapter, form) as hooked:

                def run(x: Tensor, *_: Tensor, hooked: nn.Module = hooked) -> Tensor:
                    return hooked(x)

                fast = index > 0 or kind != "linear"
                assert gradcheck(run, leaves, fast_mode=fast, atol=1e-6, rtol=1e-5), f"{form} {options}"


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_parameter_learns_after_a_warm_up_step(name: str, kind: str) -> None:
    layer = table.LAYERS[kind]
    for options in table.variants(name):
        for form in forms(name):
            base = layer.base(torch.float32)
            adapter = table.build(name, base, options, stirred=False, dtype=torch.float32)
            if name != "dylora":
                adapter.train()  # dylora trains one block a call; its own suite covers that
            optimizer = torch.optim.SGD(adapter.parameters(), lr=0.05)
            with attached(adapter, form) as hooked:
                for _ in range(3):
                    optimizer.zero_grad()
                    x = layer.x(torch.float32)
                    (hooked(x) - torch.randn_like(hooked(x))).square().mean().backward()
                    grads = {leaf: parameter.grad for leaf, parameter in adapter.named_parameters()}
                    optimizer.step()
            for leaf, grad in grads.items():
                assert grad is not None, f"{leaf} has no gradient ({form} {options})"
                assert torch.isfinite(grad).all(), f"{leaf} ({form} {options})"
                assert float(grad.norm()) > 0, f"{leaf} gets a zero gradient ({form} {options})"
            assert all(parameter.grad is None for parameter in base.parameters())
            assert all(buffer.grad is None for buffer in adapter.buffers())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_subsets_of_needed_gradients(name: str) -> None:
    """Freezing one leaf leaves the others' gradients as they were and gives the frozen one no buffer."""
    for kind in ("linear", "conv2d"):
        layer = SMALL[kind]
        for options in ({}, {"weight_decompose": True}):
            base = layer.base()
            adapter = table.build(name, base, options)
            for form in forms(name):
                check_subsets(adapter, layer, form)


def check_subsets(adapter: Any, layer: table.Layer, form: str) -> None:
    named = dict(adapter.named_parameters())
    x = layer.x()
    with attached(adapter, form) as hooked:

        def run(frozen: str | None) -> dict[str, Tensor | None]:
            point = x.clone().requires_grad_(frozen != "x")
            for leaf, parameter in named.items():
                parameter.requires_grad_(leaf != frozen)
                parameter.grad = None
            hooked(point).square().sum().backward()
            return {"x": point.grad, **{leaf: parameter.grad for leaf, parameter in named.items()}}

        whole = run(None)
        for frozen in whole:
            if len(whole) == 2 and frozen != "x":
                continue
            got = run(frozen)
            assert got[frozen] is None, f"{form}: {frozen} is frozen but got a gradient"
            for leaf, want in whole.items():
                if leaf != frozen:
                    torch.testing.assert_close(got[leaf], want, rtol=1e-12, atol=1e-12)
    adapter.requires_grad_(True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_add_over_micro_batches_and_scale_with_the_loss(name: str) -> None:
    for kind in ("linear", "conv2d"):
        layer = table.LAYERS[kind]
        for options in ({}, {"weight_decompose": True}):
            base = layer.base()
            adapter = table.build(name, base, options)
            x = layer.x().requires_grad_(True)
            for form in forms(name):
                with attached(adapter, form) as hooked:
                    dy = torch.randn_like(hooked(x))
                    whole = grads_of(hooked(x), dy, x, adapter)
                    tripled = grads_of(hooked(x), 3 * dy, x, adapter)
                    parts = [grads_of(hooked(x[i : i + 1]), dy[i : i + 1], x, adapter) for i in range(x.shape[0])]
                floor = 1e-5 * max(float(item.norm()) for item in whole.values() if item is not None)
                for leaf, want in whole.items():
                    assert want is not None
                    assert oracle.relative(tripled[leaf], 3 * want, floor) < 1e-9  # type: ignore[arg-type]
                    total = sum(part[leaf] for part in parts)  # type: ignore[misc]
                    assert oracle.relative(total, want, floor) < 1e-9, f"{form} {options} {leaf}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_float32_adapters_on_a_16_bit_base_get_float32_gradients(name: str, dtype: torch.dtype) -> None:
    for kind in ("linear", "conv2d"):
        layer = table.LAYERS[kind]
        for options in table.variants(name):
            base = layer.base(dtype)
            adapter = table.build(name, base, options, dtype=torch.float32)
            for form in forms(name):
                x = layer.x(dtype).requires_grad_(True)
                adapter.zero_grad()
                with attached(adapter, form) as hooked:
                    y = hooked(x)
                    y.float().square().mean().backward()
                assert y.dtype == dtype, f"{form} {options}: {y.dtype}"
                assert x.grad is not None
                assert x.grad.dtype == dtype
                for leaf, parameter in adapter.named_parameters():
                    grad = parameter.grad
                    assert grad is not None, f"{form} {options}: {leaf}"
                    assert grad.dtype == torch.float32
                    assert torch.isfinite(grad).all()
                    assert float(grad.norm()) > 0, f"{form} {options}: {leaf}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_second_backward_over_the_same_graph_gives_the_same(name: str) -> None:
    for kind in ("linear", "conv2d"):
        layer = table.LAYERS[kind]
        adapter = table.build(name, layer.base())
        x = layer.x().requires_grad_(True)
        for form in forms(name):
            with attached(adapter, form) as hooked:
                dy = torch.randn_like(hooked(x))
                leaves, out = [x, *adapter.parameters()], hooked(x)
                first = torch.autograd.grad(out, leaves, dy, retain_graph=True)
                second = torch.autograd.grad(out, leaves, dy)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), form
