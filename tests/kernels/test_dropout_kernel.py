"""Dropout inside the low-rank kernels: one mask in PyTorch and in every kernel, forward and backward, drawn as PyTorch
draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import deltafuse
from deltafuse.algorithms import get_algorithm
from deltafuse.backends.triton import binding
from deltafuse.core.errors import OptionError
from deltafuse.primitives import get_primitive
from deltafuse.primitives.dropout import draw_seed, keep_mask, keep_scale

from .support import DEVICE, implementation, needs_kernels, split_early

pytestmark = needs_kernels
SEEDS = (0, 1, 1 << 32, (1 << 63) - 2, 0x123456789ABCDEF)
PROBABILITIES = (0.05, 0.3, 0.5, 0.9)


def seed_of(number: int) -> Tensor:
    return torch.tensor([number], dtype=torch.int64, device=DEVICE)


def call(x: Tensor, out: int, rank: int = 1, **changed: Any) -> Tensor:
    """The primitive on a layer whose base gives zero and whose factors are all ones."""
    inner, ones = x.shape[-1], {"device": DEVICE, "dtype": torch.float32}
    options = {"alpha": 1.0, "bias": None, "gain": None, "up_gain": None, "mask": None, "dropout": 0.0, "seed": None}
    options |= {"down": torch.ones(rank, inner, **ones), "up": torch.ones(out, rank, **ones), **changed}
    weight = torch.zeros(out, inner, device=DEVICE, dtype=x.dtype)
    return implementation("lowrank_linear")(x, weight, **options)


# -- the generator


@pytest.mark.parametrize("p", PROBABILITIES)
def test_masks_have_their_probability(p: float) -> None:
    """In all, by rows and by columns; each within four standard deviations or, of many, close to a normal's spread."""
    rows, cols = 700, 600
    for number in SEEDS:
        kept = keep_mask(seed_of(number), rows, cols, p).double()
        error = (kept - (1 - p)) / math.sqrt(p * (1 - p))
        assert abs(float(error.mean())) * math.sqrt(rows * cols) < 4, number
        for axis, length in ((0, rows), (1, cols)):
            spread = error.mean(axis) * math.sqrt(length)
            assert float(spread.abs().max()) < 5.5, (number, axis)
            assert abs(float(spread.square().mean()) - 1) < 6 * math.sqrt(2 / len(spread)), (number, axis)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_columns_and_seeds_are_independent(p: float) -> None:
    size = 512
    masks = [keep_mask(seed_of(number), size, size, p).double() - (1 - p) for number in (*SEEDS, 2, 3)]
    masks = [mask / math.sqrt(p * (1 - p)) for mask in masks]
    for mask in masks:
        for table in (mask, mask.t()):
            pairs = (table @ table.t() / math.sqrt(size))[tuple(torch.triu_indices(size, size, 1))]
            assert float(pairs.abs().max()) < 7.5
            assert abs(float(pairs.square().mean()) - 1) < 0.05
            for step in (1, 2, 16, 128):  # neighbours and corners of rectangles
                beside = table[:, step:] * table[:, :-step]
                assert abs(float(beside.mean())) * math.sqrt(beside.numel()) < 4.5
                corners = beside[step:] * beside[:-step]
                assert abs(float(corners.mean())) * math.sqrt(corners.numel()) < 4.5
    for index, one in enumerate(masks):
        for other in masks[:index]:
            assert abs(float((one * other).mean())) * size < 4.5
            assert abs(float((one[1:] * other[:-1]).mean())) * size < 4.5


def test_certain_and_no_dropout() -> None:
    assert keep_mask(seed_of(7), 64, 64, 0.0).all()
    assert keep_scale(1.0) == 0.0
    assert keep_scale(0.0) == 1.0


def test_a_seed_is_drawn_from_the_devices_generator() -> None:
    torch.manual_seed(5)
    first = draw_seed(DEVICE)
    second = draw_seed(DEVICE)
    torch.manual_seed(5)
    assert torch.equal(first, draw_seed(DEVICE))
    assert not torch.equal(first, second)


# -- kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("p", [*PROBABILITIES, 1.0])
@pytest.mark.parametrize("number", SEEDS)
def test_the_kernels_mask_is_pytorchs(number: int, p: float, dtype: torch.dtype) -> None:
    rows, out = 69, 131
    x = torch.ones(rows, 1, device=DEVICE, dtype=dtype)
    y = call(x, out, dropout=p, seed=seed_of(number))
    wanted = keep_mask(seed_of(number), rows, out, p) * keep_scale(p)
    assert torch.equal(y, wanted.to(dtype))


@pytest.mark.parametrize("rank", [1, 40, 130])
def test_backward_has_the_mask_of_forward(rank: int) -> None:
    """Linear in each of x, down and up: <f(v), dY> = <v, f^T(dY)>, the base left out; any other mask breaks it."""
    generator = torch.Generator().manual_seed(2)
    rows, inner, out = 45, 20, 150
    x, dy = torch.randn(rows, inner, generator=generator), torch.randn(rows, out, generator=generator)
    leaves = x, torch.randn(rank, inner, generator=generator), torch.randn(out, rank, generator=generator)
    x, down, up = (leaf.to(DEVICE).requires_grad_() for leaf in leaves)
    y = call(x, out, rank, down=down, up=up, dropout=0.4, seed=seed_of(11))
    grads = torch.autograd.grad(y, (x, down, up), dy.to(DEVICE))
    wanted = (y.double() * dy.to(DEVICE)).sum()
    for leaf, grad in zip((x, down, up), grads, strict=True):
        assert torch.allclose((leaf.double() * grad).sum(), wanted, rtol=1e-4), tuple(leaf.shape)


def test_split_reductions_have_the_same_mask() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 24, generator=generator).to(DEVICE).requires_grad_()
    dy = torch.randn(40, 700, generator=generator).to(DEVICE)

    def grads() -> tuple[Tensor, ...]:
        down, up = torch.full((3, 24), 0.1, device=DEVICE), torch.full((700, 3), 0.1, device=DEVICE)
        wanted = x, down.requires_grad_(), up.requires_grad_()
        y = call(x, 700, 3, down=down, up=up, dropout=0.5, seed=seed_of(9))
        return torch.autograd.grad(y, wanted, dy)

    plain = grads()
    with split_early():
        for one, other in zip(grads(), plain, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_no_dropout_is_bit_equal_to_none() -> None:
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(call(x, 9, 4, dropout=0.0, seed=seed_of(3)), call(x, 9, 4))


def test_dropout_without_a_seed_is_refused() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    with pytest.raises(OptionError, match="seed"):
        call(x, 4, dropout=0.5)
    with pytest.raises(OptionError, match="seed"):
        get_primitive("lowrank_linear").reference(x, x, None, x, x[:, :2], dropout=0.5)


# -- adapters


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with deltafuse.use_backend("triton"):
        yield


def adapted(p: float = 0.5, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A linear layer with a LoRA in training."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 32, device=DEVICE).requires_grad_(False)
    options = {"lora_dim": 4, "alpha": 4.0, "bypass_mode": True, "dropout": p, **options}
    adapter = get_algorithm(options.pop("algorithm", "locon")).module_class("layer", layer, 1.0, **options)
    adapter.to(DEVICE)
    with torch.no_grad():
        for name, item in adapter.named_parameters():
            if "dora" not in name:
                item.normal_(std=0.3)
    adapter.apply_to()
    return nn.Sequential(layer), adapter.train()


def inputs(rows: int = 48) -> Tensor:
    return torch.randn(rows, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)


OPTIONS: list[dict[str, Any]] = [{}, {"weight_decompose": True}, {"algorithm": "loha", "lora_dim": 2}]
OPTIONS_IDS = ["lora", "dora", "loha"]


@pytest.mark.parametrize("options", OPTIONS, ids=OPTIONS_IDS)
def test_an_adapter_drops_inside_the_primitive(options: dict[str, Any]) -> None:
    p = 0.4
    model, adapter = adapted(p, **options)
    x = inputs()
    with binding.recorded() as calls:
        found = model(x)
    dropped = [args for name, args in calls if name == "lowrank_linear"]
    assert len(dropped) == 1
    assert dropped[0][-2] == p
    whole = adapter.eval()(x)  # what is kept is the delta over 1 - p, what is not the base (under DoRA, with its gain)
    kept = keep_mask(dropped[0][-1], *found.shape, p)
    adapter.dropout = 1.0
    none = adapter.train()(x)
    wanted = none + (whole - none) * kept / (1 - p)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    adapter.dropout = p
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("options", OPTIONS, ids=OPTIONS_IDS)
def test_eval_knows_no_dropout(options: dict[str, Any]) -> None:
    (one, first), (two, second) = adapted(0.5, **options), adapted(0.0, **options)
    first.eval()
    second.eval()
    assert torch.equal(one(inputs()), two(inputs()))


@pytest.mark.parametrize("options", OPTIONS, ids=OPTIONS_IDS)
def test_the_mean_over_draws_is_the_layer_without_dropout(options: dict[str, Any]) -> None:
    """Four standard deviations of the mean, as the draws themselves show them."""
    model, adapter = adapted(0.3, **options)
    x = inputs(16)
    with torch.no_grad():
        whole = adapter.eval()(x)
        adapter.train()
        draws = torch.stack([(model(x) - whole).double() for _ in range(60)])
    spread = draws.std(0) / math.sqrt(len(draws))
    away = draws.mean(0)[spread > 0] / spread[spread > 0]
    assert abs(float(away.mean())) * math.sqrt(away.numel()) < 4
    assert abs(float(away.square().mean()) - 1) < 0.2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("options", OPTIONS, ids=OPTIONS_IDS)
def test_a_checkpoint_draws_the_same_mask_again(options: dict[str, Any], reentrant: bool) -> None:
    model, adapter = adapted(0.5, **options)
    found: list[list[Tensor]] = []
    for wrapped in (model, lambda item: checkpoint(model, item, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x = inputs().requires_grad_()
        y = wrapped(x)
        found.append([y.detach(), *_backward(y, x, adapter)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def _backward(y: Tensor, x: Tensor, adapter: nn.Module) -> list[Tensor]:
    """Through .grad: a reentrant checkpoint allows nothing else."""
    adapter.zero_grad()
    y.square().sum().backward()
    return [leaf.grad for leaf in (x, *adapter.parameters()) if leaf.grad is not None]


@pytest.mark.parametrize("options", OPTIONS, ids=OPTIONS_IDS)
def test_a_compiled_adapter_draws_a_mask_each_call(options: dict[str, Any]) -> None:
    """One graph; new masks from call to call, of the same probability as eager's, and the same in backward."""
    p = 0.3
    model, adapter = adapted(p, **options)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = inputs(40)
    adapter.dropout = 1.0
    none = model(x).detach()
    adapter.dropout = p
    seen = []
    for number in (1, 2):
        torch.manual_seed(number)
        y = compiled(x)
        grads = torch.autograd.grad(y.sum(), list(adapter.parameters()))
        torch.manual_seed(number)
        eager = model(x)
        assert torch.allclose(y, eager, rtol=1e-5, atol=1e-5)
        for one, other in zip(grads, torch.autograd.grad(eager.sum(), list(adapter.parameters())), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
        seen.append((y.detach() - none).abs() > 1e-6)
        share = float(seen[-1].double().mean())
        assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / y.numel()), share
    assert not torch.equal(*seen)
    torch._dynamo.reset()


@pytest.mark.parametrize("options", OPTIONS, ids=OPTIONS_IDS)
def test_certain_dropout_is_finite(options: dict[str, Any]) -> None:
    model, adapter = adapted(1.0, **options)
    x = inputs().requires_grad_()
    y = model(x)
    grads = torch.autograd.grad(y.square().sum(), (x, *adapter.parameters()))
    assert all(torch.isfinite(item).all() for item in (y, *grads))
    if not options.get("weight_decompose"):
        assert all(float(grad.abs().max()) == 0 for grad in grads[1:])
