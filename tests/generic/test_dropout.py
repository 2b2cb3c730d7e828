"""Every dropout acts in every form, with its exact probability, and eval() knows nothing of it (rules 22 and 23)."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltafuse.algorithms import algorithms, get_algorithm
from deltafuse.core.errors import OptionError
from deltafuse.modules import NormModule

from . import table
from .test_gradients import attached, forms

ALGORITHMS = table.weight_algorithms()
P = 0.3
LAYERS = {
    "linear": table.Layer(lambda: nn.Linear(12, 24, bias=False), (40, 12)),
    "conv2d": table.Layer(lambda: nn.Conv2d(6, 12, 3, padding=1, bias=False), (6, 6, 5, 5)),
    "conv1d_groups": table.Layer(lambda: nn.Conv1d(6, 12, 3, groups=3, bias=False), (8, 6, 9)),
}


def pair(name: str, layer: table.Layer, options: dict[str, Any], **dropouts: Any) -> tuple[Any, Any]:
    """(module with dropouts, the same module without) on copies of one layer."""
    base = layer.base()
    one = table.build(name, base, options, **dropouts)
    two = table.build(name, copy.deepcopy(base), options)
    two.load_state_dict({key: value.clone() for key, value in one.state_dict().items()})
    for target, source in zip(two.parameters(), one.parameters(), strict=True):
        target.data.copy_(source.data)
    return one.train(), two.eval()


def skip_untrainable(name: str, layer: table.Layer) -> None:
    if not table.legal_rank(name, layer.base()):
        pytest.skip("no legal block")


def near(share: float, p: float, count: int) -> bool:
    """Whether a share of ``count`` draws fits probability p within five standard deviations."""
    return abs(share - p) <= 5 * math.sqrt(p * (1 - p) / count)


@torch.no_grad()
def change(adapter: Any, form: str, x: Tensor) -> Tensor:
    with attached(adapter, form) as hooked:
        got = hooked(x)
    return got - adapter.org_module[0](x)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_dropout_drops_entries_of_the_deltas_output(name: str, kind: str) -> None:
    layer = LAYERS[kind]
    skip_untrainable(name, layer)
    if name == "dylora":
        pytest.skip("training draws a block: covered in its own suite")
    one, two = pair(name, layer, {}, dropout=P)
    x = layer.x()
    want = change(two, "planned", x)
    for form in forms(name):
        got = change(one, form, x)
        dropped = got.abs() < 1e-12 * want.abs().max()
        kept = (got - want / (1 - P)).abs() < 1e-9 * want.abs().max()
        assert (dropped | kept).all(), f"{form}: entries that are neither dropped nor scaled"
        assert near(float(dropped.double().mean()), P, dropped.numel()), f"{form}: {dropped.double().mean():.3f}"


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_rank_dropout_masks_ranks_or_rows(name: str, kind: str) -> None:
    """Rows of the delta are whole or gone where there is no rank axis; with one, a sum over kept ranks remains."""
    layer = LAYERS[kind]
    skip_untrainable(name, layer)
    if name == "dylora":
        pytest.skip("training draws a block: covered in its own suite")
    cls = get_algorithm(name).module_class
    one, two = pair(name, layer, {}, rank_dropout=P)
    x = layer.x()
    want = change(two, "planned", x)
    axis = 1 if x.dim() > 2 else -1
    for form in forms(name):
        draws = 60
        gone = 0
        for _ in range(draws):
            got = change(one, form, x)
            if cls.rank_axis:
                gone += int(not torch.allclose(got, want, rtol=1e-9, atol=1e-12))
                continue
            rows, whole = got.movedim(axis, 0).flatten(1), want.movedim(axis, 0).flatten(1)
            dropped = rows.abs().amax(1) < 1e-12
            assert torch.allclose(rows[~dropped], whole[~dropped], rtol=1e-8, atol=1e-10), form
            gone += int(dropped.sum())
        if cls.rank_axis:
            assert 0 < gone <= draws, f"{form}: rank dropout does nothing"
        else:
            count = draws * want.shape[axis]
            assert near(gone / count, P, count), f"{form}: {gone / count:.3f}"


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if algorithms()[name].module_class.rank_axis])
def test_rank_dropout_on_the_rank_axis_has_its_exact_probability(name: str) -> None:
    """With one rank the delta is whole or gone. GLoRA has two rank axes with masks of their own."""
    if name == "dylora":
        pytest.skip("training draws a block: covered in its own suite")
    layer = LAYERS["linear"]
    for form in forms(name):
        base = layer.base()
        adapter = table.build(name, base, rank=1, rank_dropout=P)
        x = layer.x()[:1]
        whole = change(adapter, form, x)
        adapter.train()
        draws = [change(adapter, form, x) for _ in range(300)]
        gone = sum(float(draw.abs().max()) < 1e-12 for draw in draws) / 300
        kept = sum(bool(torch.allclose(draw, whole, rtol=1e-9)) for draw in draws) / 300
        both = P * P if name == "glora" else P
        assert near(gone, both, 300), f"{form}: {gone}"
        assert near(kept, (1 - P) ** 2 if name == "glora" else 1 - P, 300), f"{form}: {kept}"


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_rank_dropout_mean(name: str, rescale: bool) -> None:
    """Over many draws the delta's mean is (1 - p) of it, or all of it with rank_dropout_scale."""
    if name == "dylora":
        pytest.skip("training draws a block: covered in its own suite")
    layer = LAYERS["linear"]
    rank = 12 if name in ("locon", "glora", "tlora") else None
    base = layer.base()
    adapter = table.build(name, base, rank=rank, rank_dropout=P, rank_dropout_scale=rescale)
    x = layer.x()[:4]
    whole = change(adapter, "planned", x)
    adapter.train()
    total = sum(change(adapter, "planned", x) for _ in range(400)) / 400
    share = float((total * whole).sum() / whole.square().sum())
    assert abs(share - (1.0 if rescale else 1 - P)) < 0.06, share


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_module_dropout_runs_the_base(name: str, kind: str) -> None:
    layer = LAYERS[kind]
    for options in ({}, {"weight_decompose": True}):
        adapter = table.build(name, layer.base(torch.float32), options, module_dropout=P, dtype=torch.float32).train()
        base = adapter.org_module[0]
        x = layer.x(torch.float32)
        plain = base(x)
        for form in forms(name):
            with attached(adapter, form) as hooked, torch.no_grad():
                same = sum(torch.equal(hooked(x), plain) for _ in range(120)) / 120
            assert near(same, P, 120), f"{form} {options}: {same}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_certain_dropout_is_finite_and_zero(name: str) -> None:
    for kind, layer in LAYERS.items():
        if not table.legal_rank(name, layer.base()):
            continue
        for options in ({}, {"weight_decompose": True}, {"weight_decompose": True, "wd_on_out": False}):
            for dropouts in (
                {"dropout": 1.0},
                {"rank_dropout": 1.0, "rank_dropout_scale": True},
                {"module_dropout": 1.0},
            ):
                adapter = table.build(name, layer.base(), options, **dropouts).train()
                x = layer.x().requires_grad_(True)
                for form in forms(name):
                    adapter.zero_grad()
                    with attached(adapter, form) as hooked:
                        y = hooked(x)
                        y.square().sum().backward()
                    assert torch.isfinite(y).all(), f"{kind} {form} {options} {dropouts}"
                    for leaf, parameter in adapter.named_parameters():
                        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), f"{form} {leaf}"
                    if not options or "module_dropout" in dropouts:
                        gap = (y - adapter.org_module[0](x)).abs().max()
                        assert gap < 1e-12, f"{kind} {form} {options} {dropouts}: {gap:.1e}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_eval_is_bit_equal_to_no_dropout(name: str) -> None:
    drops = {"dropout": 0.5, "rank_dropout": 0.5, "module_dropout": 0.5, "rank_dropout_scale": True}
    for layer in LAYERS.values():
        if not table.legal_rank(name, layer.base()):
            continue
        for options in ({}, {"weight_decompose": True}):
            one, two = pair(name, layer, options, **drops)
            one.eval()
            x = layer.x()
            for form in forms(name):
                with attached(one, form) as first, attached(two, form) as second:
                    assert torch.equal(first(x), second(x)), f"{form} {options}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_dropouts_act_under_decomposition(name: str) -> None:
    layer = LAYERS["linear"]
    x = layer.x()
    for axis in (True, False):
        for dropouts in ({"dropout": 0.5}, {"rank_dropout": 0.5}, {"rank_dropout": 0.5, "rank_dropout_scale": True}):
            options = {"weight_decompose": True, "wd_on_out": axis}
            if name == "ia3" and axis and "rank_dropout" in dropouts:
                continue  # a factor on a whole row is divided out by the row's norm, masked or not
            adapter = table.build(name, layer.base(), options, **dropouts).train()
            for form in forms(name):
                draws = [change(adapter, form, x) for _ in range(6)]
                moved = any(not torch.allclose(draws[0], draw) for draw in draws[1:])
                assert moved, f"{form} {options} {dropouts}: two draws are the same"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_dropouts_on_inputs_of_any_rank(name: str) -> None:
    drops = {"dropout": 0.3, "rank_dropout": 0.3, "module_dropout": 0.1}
    for options in ({}, {"weight_decompose": True}):
        adapter = table.build(name, nn.Linear(12, 24).double(), options, **drops).train()
        for form in forms(name):
            for lead in ((5,), (2, 3), (2, 3, 2), (1, 2, 3, 2)):
                x = torch.randn(*lead, 12, dtype=table.DOUBLE, requires_grad=True)
                with attached(adapter, form) as hooked:
                    y = hooked(x)
                    y.sum().backward()
                assert y.shape == (*lead, 24)
                assert torch.isfinite(y).all()
                assert x.grad is not None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_checkpointing_draws_the_same_masks_again(name: str) -> None:
    drops = {"dropout": 0.3, "rank_dropout": 0.3, "module_dropout": 0.3}
    adapter = table.build(name, nn.Linear(12, 24).double(), {}, **drops).train()
    x = torch.randn(5, 12, dtype=table.DOUBLE, requires_grad=True)
    for form in forms(name):
        with attached(adapter, form) as hooked:
            for seed in range(4):
                grads = []
                for how in (None, False, True):
                    torch.manual_seed(seed)
                    adapter.zero_grad()
                    if how is None:
                        y = hooked(x)
                    else:
                        y = torch.utils.checkpoint.checkpoint(hooked, x, use_reentrant=how)
                    y.square().sum().backward()
                    grads.append([p.grad.clone() if p.grad is not None else None for p in adapter.parameters()])
                for other in grads[1:]:
                    for a, b in zip(grads[0], other, strict=True):
                        assert (a is None) == (b is None)
                        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_norm_dropouts() -> None:
    for base in (nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.RMSNorm(16)):
        base = base.double()
        x = torch.randn(6, 16, dtype=table.DOUBLE)
        adapter = NormModule("n", base, 1.0, rank_dropout=P).double()
        table.stir(adapter)
        plain = base(x)
        whole = adapter.eval()(x) - plain
        adapter.train()
        gone = 0.0
        for _ in range(200):
            got = adapter(x) - plain
            dropped = got.abs().amax(0) < 1e-12
            assert torch.allclose(got[:, ~dropped], whole[:, ~dropped], rtol=1e-8, atol=1e-10)
            gone += float(dropped.double().mean()) / 200
        assert near(gone, P, 200 * 16)
        module = NormModule("n", base, 1.0, module_dropout=P).double().train()
        table.stir(module)
        same = sum(torch.equal(module(x), plain) for _ in range(200)) / 200
        assert near(same, P, 200)
        with pytest.raises(OptionError, match="dropout"):
            NormModule("n", base, 1.0, dropout=0.1)


@pytest.mark.parametrize("value", [-0.1, 1.1])
@pytest.mark.parametrize("key", ["dropout", "rank_dropout", "module_dropout"])
def test_a_dropout_that_is_no_probability_is_refused(key: str, value: float) -> None:
    with pytest.raises(OptionError, match=key):
        table.build("locon", nn.Linear(4, 4), **{key: value})
