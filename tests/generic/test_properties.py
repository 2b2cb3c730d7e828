"""Properties that hold for any dimension, rank and strength, found by search."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from deltafuse.core.errors import OptionError, ShapeError
from helpers import oracle
from helpers.oracle import Setting

from . import table
from .test_gradients import attached, forms

ALGORITHMS = table.weight_algorithms()
DIMS = st.sampled_from([1, 2, 3, 7, 15, 17, 31, 33])
STRENGTH = st.sampled_from([-1.5, -1.0, 0.1, 0.5, 1.0, 3.0])
FEW = settings(max_examples=12)


def adapted(name: str, inp: int, out: int, rank: int, strength: float, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    base = nn.Linear(inp, out).double().requires_grad_(False)
    always = {"block_size": 1} if name == "dylora" else {}
    if name in ("oft", "boft"):
        rank = table.legal_rank(name, base)
    assume(rank > 0)
    return table.build(name, base, {**options, **always}, multiplier=strength, rank=rank)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_dimension_equals_the_oracle_and_is_affine_in_x(name: str) -> None:
    @FEW
    @given(
        inp=DIMS, out=DIMS, rank=st.integers(1, 40), strength=STRENGTH, decompose=st.booleans(), seed=st.integers(0, 99)
    )
    def check(inp: int, out: int, rank: int, strength: float, decompose: bool, seed: int) -> None:
        if name == "boft":
            out *= 2
        adapter = adapted(name, inp, out, rank, strength, seed, weight_decompose=decompose)
        base = copy.deepcopy(adapter.org_module[0])
        ranked = Setting(
            adapter.lora_dim if hasattr(adapter, "lora_dim") else rank, table.ALPHA, {"weight_decompose": decompose}
        )
        change, bias = oracle.delta(adapter, base.weight, ranked, strength)
        a, b = torch.randn(2, 5, inp, dtype=table.DOUBLE)
        order = torch.randperm(5)
        want = oracle.through(base, change, bias, a)
        for form in forms(name):
            with attached(adapter, form) as hooked, torch.no_grad():
                ya, yb = hooked(a), hooked(b)
                size = float(ya.norm() + yb.norm())
                assert float((ya - base(a) - want).norm()) <= 1e-9 * float(want.norm()) + 1e-13 * size, form
                zero = hooked(torch.zeros_like(a))
                mixed = hooked(2 * a - 3 * b)
                assert float((mixed - (2 * ya - 3 * yb + 2 * zero)).norm()) <= 1e-10 * size + 1e-12, form
                assert torch.allclose(hooked(a[order]), ya[order], rtol=1e-11, atol=1e-12), form

    check()


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n in ("diag-oft", "oft", "boft")])
def test_rotations_are_rotations(name: str) -> None:
    @FEW
    @given(side=st.sampled_from([2, 4, 6, 12, 24]), size=st.sampled_from([0.01, 0.3, 3.0]), seed=st.integers(0, 99))
    def check(side: int, size: float, seed: int) -> None:
        torch.manual_seed(seed)
        for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            base = nn.Linear(side, side, bias=False).to(dtype).requires_grad_(False)
            nn.init.orthogonal_(base.weight)
            adapter = table.build(name, base, dtype=dtype, stirred=False)
            table.stir(adapter, size)
            r = adapter.get_r()
            eye = torch.eye(r.shape[-1], dtype=r.dtype)
            assert float((r @ r.transpose(-1, -2) - eye).abs().max()) < limit
            x = torch.randn(5, side, dtype=dtype)
            for form in forms(name):
                with attached(adapter, form) as hooked, torch.no_grad():
                    y = hooked(x)
                assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=20 * limit), form

    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n in ("diag-oft", "oft", "boft")])
def test_rotations_are_solved_in_float32_for_any_dtype(name: str, dtype: torch.dtype) -> None:
    base = nn.Linear(24, 24).to(dtype)
    adapter = table.build(name, base, dtype=dtype)
    r = adapter.get_r()
    assert r.dtype == torch.float32
    assert float((r @ r.transpose(-1, -2) - torch.eye(r.shape[-1])).abs().max()) < 1e-5


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n in ("diag-oft", "oft", "boft")])
def test_the_constraint_bounds_the_generator_and_passes_gradients(name: str) -> None:
    base = nn.Linear(24, 24).double()
    free = table.build(name, base)
    bound = 0.01 * 24
    held = table.build(name, base, {"constraint": 0.01})
    held.load_state_dict({**free.state_dict(), "alpha": torch.tensor(0.01, dtype=table.DOUBLE)})
    for adapter, limit in ((free, None), (held, bound)):
        r = adapter.get_r()
        eye = torch.eye(r.shape[-1], dtype=r.dtype)
        q = (r - eye) @ torch.linalg.inv(r + eye)
        norm = float(q.norm())
        assert norm > bound if limit is None else abs(norm - limit) < 1e-9
    held.get_r().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in held.parameters())


SCALED = [n for n in ALGORITHMS if n in ("locon", "loha", "lokr", "glora", "dylora", "tlora")]


@pytest.mark.parametrize("name", SCALED)
def test_the_delta_is_homogeneous_in_alpha_and_strength(name: str) -> None:
    @FEW
    @given(
        inp=DIMS, out=DIMS, rank=st.integers(1, 3), factor=st.sampled_from([0.25, 2.0, 3.0]), seed=st.integers(0, 99)
    )
    def check(inp: int, out: int, rank: int, factor: float, seed: int) -> None:
        adapter = adapted(name, inp, out, rank, 1.0, seed)
        one, _ = adapter.get_diff_weight(1.0)
        torch.testing.assert_close(adapter.get_diff_weight(factor)[0], one * factor, rtol=1e-12, atol=1e-14)
        if getattr(adapter, "_fixed_scale", False):
            return
        state = adapter.state_dict()
        state["alpha"] = state["alpha"] * factor
        adapter.load_state_dict(state)
        torch.testing.assert_close(adapter.get_diff_weight(1.0)[0], one * factor, rtol=1e-12, atol=1e-14)

    check()


@pytest.mark.parametrize("name", ["oft", "boft"])
@pytest.mark.parametrize("side", [7, 17, 31])
def test_a_dimension_without_a_block_names_layer_dimension_and_legal_sizes(name: str, side: int) -> None:
    with pytest.raises(ShapeError, match=rf"'layer'.*{side}.*[Ll]egal"):
        table.build(name, nn.Linear(side, side), rank=4)


@pytest.mark.parametrize("rank", [0, -1, 1.5])
@pytest.mark.parametrize("name", SCALED)
def test_a_rank_that_is_none_is_refused(name: str, rank: float) -> None:
    with pytest.raises(OptionError, match="lora_dim"):
        table.build(name, nn.Linear(8, 8), rank=rank)  # type: ignore[arg-type]
