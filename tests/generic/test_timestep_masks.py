"""T-LoRA's timestep masks: shared and per sample, in every form, on linear layers and convolutions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltafuse import clear_timestep_mask, compute_timestep_mask, get_timestep_mask, set_timestep_mask
from helpers import oracle

from . import table
from .test_gradients import attached, forms

RANK = 4
LAYERS = {
    "linear": table.Layer(lambda: nn.Linear(12, 24), (3, 5, 12)),
    "linear_2d": table.Layer(lambda: nn.Linear(12, 24), (3, 12)),
    "conv2d": table.LAYERS["conv2d"],
    "conv2d_groups": table.Layer(lambda: nn.Conv2d(6, 12, 3, padding=1, groups=2), (3, 6, 4, 5)),
}


@pytest.fixture(autouse=True)
def _no_mask() -> Iterator[None]:
    yield
    for group in (0, 5):
        clear_timestep_mask(group)


def change(adapter: Any, pristine: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Sample by sample: the delta of the masked singular values through the plain layer."""
    outs = []
    for index in range(x.shape[0]):
        row = mask[index if mask.shape[0] > 1 else 0].double()
        t = oracle.tensors_of(adapter)
        t = {**t, "lambda_layer": t["lambda_layer"] * row, "base_lambda": t["base_lambda"] * row}
        dense = oracle.tlora(t, pristine.weight, oracle.Setting(RANK, table.ALPHA), 0.7)
        outs.append(oracle.through(pristine, dense, None, x[index : index + 1]))
    return torch.cat(outs)


@pytest.mark.parametrize("kind", LAYERS)
def test_masks_act_per_sample_in_every_form(kind: str) -> None:
    layer = LAYERS[kind]
    base = layer.base()
    pristine = copy.deepcopy(base)
    adapter = table.build("tlora", base, multiplier=0.7, rank=RANK, mask_group_id=5)
    x = layer.x().requires_grad_(True)
    shared = compute_timestep_mask(300, 1000, RANK)
    single = torch.stack([compute_timestep_mask(t, 1000, RANK)[0] for t in (0, 500, 990)])
    assert len({int(row.sum()) for row in single}) == 3
    for mask in (shared, single, shared):
        set_timestep_mask(mask, 5)
        want = change(adapter, pristine, x, mask)
        dy = torch.randn_like(want)
        leaves = [x, *adapter.parameters()]
        wants = torch.autograd.grad(pristine(x) + want, leaves, dy)
        for form in forms("tlora"):
            with attached(adapter, form) as hooked:
                got = hooked(x)
                grads = torch.autograd.grad(got, leaves, dy)
            assert oracle.relative(got - pristine(x), want) < 1e-9, form
            for one, other in zip(grads, wants, strict=True):
                assert oracle.relative(one, other) < 1e-9, form
    clear_timestep_mask(5)
    assert get_timestep_mask(5) is None


def test_groups_have_masks_of_their_own() -> None:
    adapter = table.build("tlora", nn.Linear(12, 24).double(), rank=RANK, mask_group_id=5)
    whole = adapter.get_diff_weight()[0]
    set_timestep_mask(compute_timestep_mask(900, 1000, RANK), 0)
    assert torch.equal(adapter.get_diff_weight()[0], whole)


@pytest.mark.parametrize(("timestep", "ranks"), [(0, 8), (1000, 2), (500, 5)])
def test_few_ranks_at_high_noise(timestep: int, ranks: int) -> None:
    mask = compute_timestep_mask(timestep, 1000, 8, 2)
    assert mask.shape == (1, 8)
    assert mask[0].tolist() == [1.0] * ranks + [0.0] * (8 - ranks)
