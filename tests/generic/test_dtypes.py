"""Accuracy and dtype rules: 16-bit no worse than plain 16-bit code, no overflow in rank space, 1 ulp at init."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltafuse.algorithms import get_algorithm
from helpers import oracle

from . import table
from .test_gradients import attached, forms

ALGORITHMS = table.weight_algorithms()
HALVES = (torch.bfloat16, torch.float16)
LAYERS = {
    "linear": table.Layer(lambda: nn.Linear(48, 60), (64, 48)),
    "conv2d": table.Layer(lambda: nn.Conv2d(12, 24, 3, padding=1), (4, 12, 7, 7)),
}


def exact(name: str, adapter: Any, options: dict[str, Any], x: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """(base output, oracle's change) in float64 from the very numbers the 16-bit module holds."""
    pristine = copy.deepcopy(adapter.org_module[0]).double()
    twin = copy.deepcopy(adapter).double()
    given = table.setting(name, pristine, options)
    with torch.no_grad():
        weight, bias = oracle.delta(twin, pristine.weight, given, strength)
        return pristine(x.double()), oracle.through(pristine, weight, bias, x.double())


def plain(base: nn.Module, change: Tensor, x: Tensor) -> Tensor:
    """What straightforward 16-bit code does: base output plus the product with a rounded dense delta."""
    if isinstance(base, nn.Linear):
        return base(x) + F.linear(x, change)
    return base(x) + F.conv2d(x, change, None, base.stride, base.padding, base.dilation, base.groups)


def staged(name: str, adapter: Any, options: dict[str, Any], x: Tensor, m: float) -> Tensor:
    """The same for a butterfly: its stages one after the other on 16-bit activations, then gain and bias."""
    base = adapter.org_module[0]
    dtype, axis = x.dtype, 1 if x.dim() > 2 else -1
    twin, wide = copy.deepcopy(adapter).double(), copy.deepcopy(base).double()
    t = oracle.tensors_of(twin)
    mixed = 1.0 if options.get("weight_decompose") else m
    gain = torch.ones((), dtype=torch.float64)
    if options.get("weight_decompose"):
        whole = wide.weight + oracle.boft(t, wide.weight, table.setting(name, wide, options), 1.0)
        kept = 0 if options.get("wd_on_out", True) else 1
        others = [dim for dim in range(whole.dim()) if dim != kept]
        gain = (t["dora_scale"] / whole.pow(2).sum(others, keepdim=True).sqrt()).reshape(-1)
    spread = gain.to(dtype).reshape(-1, *(1,) * (x.dim() - 2)) if gain.dim() and x.dim() > 2 else gain.to(dtype)
    on_input = not options.get("wd_on_out", True)
    plain_y = F.linear(x, base.weight) if isinstance(base, nn.Linear) else base._conv_forward(x, base.weight, None)
    scaled = x * spread if on_input else x
    y = F.linear(scaled, base.weight) if x.dim() == 2 else base._conv_forward(scaled, base.weight, None)
    blocks = t["oft_blocks"]
    bound = float(options.get("constraint", 0)) * wide.weight.shape[0]
    turns = oracle._cayley(blocks - blocks.transpose(-1, -2), bound).reshape(blocks.shape)
    for stage in range(blocks.shape[0]):
        reach, count = 2**stage * blocks.shape[-1] // 2, y.shape[axis]
        order = [(i // (2 * reach)) * 2 * reach + (i % 2) * reach + (i % (2 * reach)) // 2 for i in range(count)]
        turn = torch.block_diag(*oracle._towards(turns[stage], mixed)).to(dtype)
        turned = torch.einsum("ij,j...->i...", turn, y.movedim(axis, 0)[order])
        y = torch.empty_like(turned).index_copy(0, torch.tensor(order), turned).movedim(0, axis)
    shape = (-1, *(1,) * (x.dim() - 2)) if x.dim() > 2 else (-1,)
    if "rescale" in t:
        y = y * (1 + mixed * (t["rescale"].reshape(shape) - 1)).to(dtype)
    if options.get("weight_decompose"):
        y = plain_y * (1 - m) + y * (m if on_input else m * spread)
    return y if base.bias is None else y + base.bias.reshape(shape)


def gate_for(name: str, form: str, options: dict[str, Any]) -> float:
    """Half as much again; twice where a chain has a product or a rounding more than the dense expression has."""
    longer = (
        form == "beside" or name in ("boft", "lokr") or options.get("weight_decompose") or options.get("use_tucker")
    )
    return 2.0 if longer else 1.5


@pytest.mark.parametrize("inner", ["float32", "same"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sixteen_bit_error_is_no_worse_than_plain_code(name: str, kind: str, dtype: torch.dtype, inner: str) -> None:
    layer = LAYERS[kind]
    own = torch.float32 if inner == "float32" else dtype
    for options in table.variants(name):
        adapter = table.build(name, layer.base(dtype), options, multiplier=0.7, dtype=own)
        base = adapter.org_module[0]
        x = layer.x(dtype)
        still, change = exact(name, adapter, options, x, 0.7)
        want = still + change
        pristine = copy.deepcopy(base).double()
        twin = copy.deepcopy(adapter).double()
        weight, bias = oracle.delta(twin, pristine.weight, table.setting(name, pristine, options), 0.7)
        eager = plain(base, weight.to(dtype), x)
        if bias is not None:
            eager = eager + (bias if x.dim() == 2 else bias[:, None, None]).to(dtype)
        if name == "boft":
            eager = staged(name, adapter, options, x, 0.7)
        distance = float((eager.double() - want).norm().detach())
        for form in forms(name):
            gate = gate_for(name, form, options) * distance
            with attached(adapter, form) as hooked, torch.no_grad():
                got = hooked(x)
            assert got.dtype == dtype
            error = float((got.double() - want).norm())
            assert error <= gate, f"{form} {options}: {error:.3e} against a gate of {gate:.3e}"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n != "full"])
def test_small_deltas_keep_their_relative_accuracy(name: str, dtype: torch.dtype) -> None:
    """|dW| is a ten-thousandth of |W|: nothing is formed by subtraction."""
    layer = LAYERS["linear"]
    adapter = table.build(name, layer.base(dtype), stirred=False, dtype=torch.float32)
    shrink_to(adapter, 1e-4)
    x = layer.x(dtype)
    _, change = exact(name, adapter, {}, x, 1.0)
    share = float(change.norm() / adapter.org_module[0](x).double().norm())
    assert 1e-6 < share < 1e-2
    with torch.no_grad():
        got = adapter.bypass_forward_diff(x)
    limit = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    assert oracle.relative(got, change) < limit
    dense, _ = adapter.get_diff_weight(1.0)
    twin, base = copy.deepcopy(adapter).double(), copy.deepcopy(adapter.org_module[0]).double()
    weight, _ = oracle.delta(twin, base.weight, table.setting(name, base, {}), 1.0)
    assert dense.dtype == torch.float32
    assert oracle.relative(dense, weight) < 1e-5


def shrink_to(adapter: Any, share: float) -> None:
    """Stir, then shrink the delta to about ``share`` of the base weight's norm."""
    table.stir(adapter, 0.2)
    adapter.apply_max_norm(share * float(adapter.org_module[0].weight.float().norm()))


@pytest.mark.parametrize("kind", ["linear", "conv1x1", "conv3x3"])
@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n in ("locon", "lokr", "loha", "glora", "dylora", "tlora")])
def test_float16_rank_space_does_not_overflow(name: str, kind: str) -> None:
    """Values beyond 65504 between the factors, an output of ordinary size."""
    make = {
        "linear": (lambda: nn.Linear(32, 32), (8, 32)),
        "conv1x1": (lambda: nn.Conv2d(32, 32, 1), (2, 32, 3, 3)),
        "conv3x3": (lambda: nn.Conv2d(32, 32, 3, padding=1), (2, 32, 4, 4)),
    }[kind]
    layer = table.Layer(*make)
    options = {"decompose_both": True, "factor": 4} if name == "lokr" else {}
    for own in (torch.float32, torch.float16):
        adapter = table.build(name, layer.base(torch.float16), options, dtype=own, stirred=False)
        table.stir(adapter, 0.1)
        skew_factors(name, adapter)
        x = (100 * layer.x()).to(torch.float16)
        still, change = exact(name, adapter, options, x, 1.0)
        want = still + change
        assert float(want.abs().max()) < 30000
        for form in ("bypass", "merged", "planned", "beside"):
            with attached(adapter, form) as hooked:
                point = x.clone().requires_grad_(True)
                got = hooked(point)
                got.float().sum().backward()
            assert torch.isfinite(got).all(), f"{form} {own}"
            assert oracle.relative(got, want) < 5e-3, f"{form} {own}"
            assert torch.isfinite(point.grad).all(), f"{form} {own}"


@torch.no_grad()
def skew_factors(name: str, adapter: Any) -> None:
    """The first factor up, the last one down: the product stays, what lies between grows beyond float16."""
    up, down = {
        "locon": (["lora_down.weight"], ["lora_up.weight"]),
        "dylora": (["down_list.0", "down_list.1", "down_list.2"], ["up_list.0", "up_list.1", "up_list.2"]),
        "lokr": (["lokr_w1_b", "lokr_w2", "lokr_w2_b"], ["lokr_w1_a", "lokr_w1"]),
        "loha": (["hada_w1_b"], ["hada_w1_a"]),
        "glora": (["b2.weight"], ["b1.weight"]),
        "tlora": (["q_layer.weight"], ["p_layer.weight"]),
    }[name]
    named = {**dict(adapter.named_parameters()), **dict(adapter.named_buffers())}
    by = 1e4
    for key in up:
        if key in named:
            named[key].mul_(by)
    if name == "tlora":
        named["base_q"].mul_(by)
        named["base_p"].mul_(1 / by)
    for key in down:
        if key in named:
            named[key].mul_(1 / by)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_inf_and_nan_stay(name: str, bad: float, dtype: torch.dtype) -> None:
    """Ranks are even: for an odd inner dimension PyTorch's bfloat16 product on some CPUs reads the next row times 0."""
    rank = 2 if name in ("loha", "tlora") else None
    for options in ({}, {"weight_decompose": True}):
        adapter = table.build(name, LAYERS["linear"].base(dtype), options, rank=rank, dtype=torch.float32)
        x = LAYERS["linear"].x(dtype)
        x[3, 5] = bad
        for form in forms(name):
            with attached(adapter, form) as hooked, torch.no_grad():
                y = hooked(x)
            assert not torch.isfinite(y[3]).any(), f"{form} {options}"
            assert torch.isfinite(y[:3]).all(), f"{form} {options}"


def ulp(value: Tensor) -> Tensor:
    """The distance to the next number of ``value``'s dtype."""
    size = value.abs().double().clamp(min=torch.finfo(value.dtype).tiny)
    return 2.0 ** torch.floor(torch.log2(size)) * torch.finfo(value.dtype).eps


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [n for n in ALGORITHMS if "weight_decompose" in get_algorithm(n).module_class.options])
def test_decomposition_starts_at_the_base(name: str, dtype: torch.dtype) -> None:
    """To one unit in the last place of each layer's own scale, in every form, on both axes."""
    own = dtype if dtype == torch.float64 else torch.float32
    for layer in LAYERS.values():
        for axis in (True, False):
            options = {"weight_decompose": True, "wd_on_out": axis}
            base = layer.base(dtype)
            with torch.no_grad():
                base.weight.mul_(1e-3)
                base.weight[0] = 0
            adapter = table.build(name, base, options, stirred=False, dtype=own)
            x = layer.x(dtype)
            still = base(x)
            for form in forms(name):
                with attached(adapter, form) as hooked, torch.no_grad():
                    got = hooked(x)
                assert torch.isfinite(got).all()
                weight, _ = adapter.get_merged_weight(1.0)
                step = ulp(base.weight) if dtype != torch.float64 else 2.0**-22 * base.weight.abs()
                assert ((weight - base.weight).abs() <= step + 1e-30).all(), f"{form} {options}"
                loose = 2.0**-22 if dtype == torch.float64 else torch.finfo(dtype).eps
                gap = (got.double() - still.double()).norm() / still.double().norm()
                assert float(gap) <= loose, f"{form} {options}: {gap:.2e}"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_autocast_gives_eagers_output_dtype(name: str, dtype: torch.dtype) -> None:
    for kind in ("linear", "conv2d"):
        layer = LAYERS[kind]
        for options in ({}, {"weight_decompose": True}, {"weight_decompose": True, "wd_on_out": False}):
            adapter = table.build(name, layer.base(torch.float32), options, dtype=torch.float32)
            x = layer.x(torch.float32).requires_grad_(True)
            still, change = exact(name, adapter, options, x.detach(), 1.0)
            for form in forms(name):
                adapter.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    with attached(adapter, form) as hooked:
                        y = hooked(x)
                    plain_dtype = adapter.org_module[0](x).dtype
                y.float().square().mean().backward()
                assert y.dtype == plain_dtype == dtype, f"{form} {options}: {y.dtype}"
                assert oracle.relative(y, still + change) < 4 * torch.finfo(dtype).eps, f"{form} {options}"
                for leaf, parameter in adapter.named_parameters():
                    assert parameter.grad is not None, leaf
                    assert parameter.grad.dtype == torch.float32, f"{form} {options} {leaf}"
                    assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize(
    "pair", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_mixed_dtypes_follow_the_activation(name: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    outer, own = pair
    for kind in ("linear", "conv2d"):
        layer = LAYERS[kind]
        for options in ({}, {"weight_decompose": True}):
            adapter = table.build(name, layer.base(outer), options, dtype=own)
            x = layer.x(outer).requires_grad_(True)
            still, change = exact(name, adapter, options, x.detach(), 1.0)
            for form in forms(name):
                adapter.zero_grad()
                with attached(adapter, form) as hooked:
                    y = hooked(x)
                y.float().square().mean().backward()
                assert y.dtype == outer, f"{form} {options}"
                assert oracle.relative(y, still + change) < 0.02, f"{form} {options}"
                for leaf, parameter in adapter.named_parameters():
                    assert parameter.grad is not None, f"{form} {leaf}"
                    assert parameter.grad.dtype == own
                    assert torch.isfinite(parameter.grad).all(), f"{form} {leaf}"


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_merge_and_restore_are_bit_exact(name: str, dtype: torch.dtype) -> None:
    """One rounding from float32 or better on the way in, the very same bits on the way out."""
    for kind in ("linear", "conv2d"):
        for options in ({}, {"weight_decompose": True}):
            adapter = table.build(name, LAYERS[kind].base(dtype), options, dtype=torch.float32)
            base = adapter.org_module[0]
            before = copy.deepcopy(base.state_dict())
            twin, wide = copy.deepcopy(adapter).double(), copy.deepcopy(base).double()
            change, _ = oracle.delta(twin, wide.weight, table.setting(name, wide, options), 0.7)
            adapter.onfly_merge(0.7)
            want = wide.weight + change
            assert oracle.relative(base.weight, want) <= max(torch.finfo(dtype).eps, 2e-6)
            if dtype in HALVES:  # one rounding: half a unit in the last place beyond float32's own error
                gap = (base.weight.double() - want).abs()
                assert (gap <= 0.5 * ulp(base.weight) + 2e-6 * float(want.abs().max())).all()
            adapter.onfly_restore()
            assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())
