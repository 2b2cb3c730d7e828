"""The suites themselves: each fault known from other tools, put in on purpose, is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from deltafuse.deltas import Butterfly, ChannelScale, Decomposed, InputRotation, Kron, LowRank, Rotation
from deltafuse.layers.adapter import Adapter

from . import table, test_dropout, test_forms, test_gradients

Patch = Callable[[pytest.MonkeyPatch], None]


def scale_twice_in_dense(patch: pytest.MonkeyPatch) -> None:
    true = LowRank.dense
    patch.setattr(LowRank, "dense", lambda self, w, op, m: true(self, w, op, m) * self.scale)


def decomposition_ignored_in_bypass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decomposed, "bypass", lambda self, call, m: self.inner.bypass(call, m))


def bias_rotated(patch: pytest.MonkeyPatch) -> None:
    def bypass(self: Any, call: Any, m: Any) -> torch.Tensor:
        y = call.with_bias(call.base())
        return y + self.contribution(call, m, y)

    patch.setattr(Rotation, "bypass", bypass)


def strength_ignored(patch: pytest.MonkeyPatch) -> None:
    true = ChannelScale.bypass
    patch.setattr(ChannelScale, "bypass", lambda self, call, m: true(self, call, 1.0))


def strength_extrapolates_the_last_stage_only(patch: pytest.MonkeyPatch) -> None:
    true = Butterfly.turn
    patch.setattr(Butterfly, "turn", lambda self, r, f, y, dim, m: true(self, r, f, y, dim, 1.0) * m)


def rotation_transposed(patch: pytest.MonkeyPatch) -> None:
    true = InputRotation._turned
    patch.setattr(
        InputRotation,
        "_turned",
        lambda self, call, m: true(replace(self, blocks=self.blocks.transpose(1, 2)), call, m),
    )


def kron_scale_lost(patch: pytest.MonkeyPatch) -> None:
    true = Kron.branch
    patch.setattr(Kron, "branch", lambda self, call, m, base=None: true(replace(self, scale=1.0), call, m, base))


def merge_doubled(patch: pytest.MonkeyPatch) -> None:
    real = Adapter.get_merged_weight
    patch.setattr(Adapter, "get_merged_weight", lambda self, m=1.0, *a, **k: real(self, 2 * m, *a, **k))


def norm_axis_swapped(patch: pytest.MonkeyPatch) -> None:
    true = Decomposed.gain
    patch.setattr(Decomposed, "gain", lambda self, kernels, w, op: true(self, kernels, w, op).flip(0))


FORM_FAULTS: list[tuple[str, str, Patch]] = [
    ("locon", "linear", scale_twice_in_dense),
    ("glora", "conv2d", scale_twice_in_dense),
    ("lokr", "linear", decomposition_ignored_in_bypass),
    ("locon", "conv2d", decomposition_ignored_in_bypass),
    ("diag-oft", "linear", bias_rotated),
    ("ia3", "linear", strength_ignored),
    ("boft", "linear", strength_extrapolates_the_last_stage_only),
    ("oft", "linear", rotation_transposed),
    ("lokr", "conv2d", kron_scale_lost),
    ("loha", "linear", merge_doubled),
    ("loha", "conv2d", norm_axis_swapped),
]


@pytest.mark.parametrize(("name", "kind", "fault"), FORM_FAULTS, ids=lambda item: getattr(item, "__name__", str(item)))
def test_the_form_suite_catches(name: str, kind: str, fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert test_forms.check(name, table.LAYERS[kind])


def detached_factor(patch: pytest.MonkeyPatch) -> None:
    true = LowRank.factor
    patch.setattr(LowRank, "factor", lambda self, m: true(replace(self, up=self.up.detach()), m))


def norm_always_detached(patch: pytest.MonkeyPatch) -> None:
    true = Decomposed.gain
    patch.setattr(Decomposed, "gain", lambda self, kernels, w, op: true(replace(self, detach=True), kernels, w, op))


def grad_assumed_one(patch: pytest.MonkeyPatch) -> None:
    true = LowRank.branch
    patch.setattr(LowRank, "branch", lambda self, call, m, base=None: Once.apply(true(self, call, m, base)))


class Once(torch.autograd.Function):
    """A backward that assumes an incoming gradient of one."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(grads[0])


@pytest.mark.parametrize("fault", [detached_factor, norm_always_detached, grad_assumed_one], ids=lambda f: f.__name__)
def test_the_gradient_suite_catches(fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        test_gradients.test_gradients_are_the_oracles_in_every_form("locon", "conv2d")


def dropout_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("deltafuse.deltas.base.Call.drop", lambda self, branch: branch)


def row_mask_ignored(patch: pytest.MonkeyPatch) -> None:
    true = Adapter._draw_masks
    patch.setattr(Adapter, "_draw_masks", lambda self: (true(self)[0], None))


def probability_turned_round(patch: pytest.MonkeyPatch) -> None:
    from deltafuse.layers import adapter, masks

    patch.setattr(adapter, "keep_mask", lambda n, p, scale, like: masks.keep_mask(n, 1 - p, scale, like))


@pytest.mark.parametrize(
    ("name", "check", "fault"),
    [
        ("locon", test_dropout.test_dropout_drops_entries_of_the_deltas_output, dropout_ignored),
        ("lokr", test_dropout.test_rank_dropout_masks_ranks_or_rows, row_mask_ignored),
        ("loha", test_dropout.test_rank_dropout_masks_ranks_or_rows, probability_turned_round),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_the_dropout_suite_catches(
    name: str, check: Callable[[str, str], None], fault: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(name, "linear")
