"""An algorithm registered from outside is picked up by every suite here without a change to any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deltafuse
from deltafuse.algorithms import algorithms, register_algorithm, unregister_algorithm
from deltafuse.algorithms.common import Ranked
from deltafuse.deltas import Delta, LowRank

from . import table, test_dropout, test_forms, test_gradients
from .toy import network, toy, toy_input

NAME = "toy-outer"


def define() -> type:
    """dW = scale a b^T with one vector per side, whatever the rank says."""

    @register_algorithm(detect_order=5)
    class Outer(Ranked):
        name = NAME
        summary = "one outer product"
        weight_list = ["toy_a", "toy_b", "alpha", "dora_scale"]
        weight_list_det = ["toy_a"]
        options = frozenset({"weight_decompose", "wd_on_out", "detach_norm", "rs_lora"})

        def __init__(
            self,
            lora_name: str,
            org_module: nn.Module,
            multiplier: float = 1.0,
            lora_dim: int = 4,
            alpha: Any = 1,
            weight_decompose: bool = False,
            wd_on_out: bool = True,
            detach_norm: bool = False,
            rs_lora: bool = False,
            **common: Any,
        ) -> None:
            super().__init__(lora_name, org_module, multiplier, **common)
            self.set_scale(1, alpha, rs_lora)
            self.toy_a = nn.Parameter(torch.zeros(self.dim, 1))
            self.toy_b = nn.Parameter(torch.randn(1, self.geometry.fan_in))
            self.decompose(weight_decompose, wd_on_out, detach_norm)

        def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
            return LowRank(self.toy_b, self.toy_a, self.scale, None, None, None, row_mask)

        def custom_state_dict(self) -> dict[str, Tensor]:
            own = {"toy_a": self.toy_a, "toy_b": self.toy_b, "alpha": self.alpha_tensor()}
            return {**self.magnitude_state(), **own}

        @classmethod
        def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> Outer:
            magnitude = tensors.get("dora_scale")
            return cls(
                lora_name,
                org_module,
                lora_dim=1,
                alpha=tensors["alpha"],
                weight_decompose=magnitude is not None,
                wd_on_out=magnitude is None or magnitude.shape[0] != 1,
            )

        def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
            return [(self.toy_a.data, 0.0), *self._shrink_magnitude()]

    return Outer


@pytest.fixture
def outer() -> Iterator[type]:
    yield define()
    unregister_algorithm(NAME)


@pytest.mark.usefixtures("outer")
def test_the_suites_find_it() -> None:
    assert NAME in table.weight_algorithms()
    assert {"weight_decompose": True, "wd_on_out": False} in list(table.variants(NAME))
    for kind in ("linear_odd", "conv2d", "conv3d_groups"):
        assert test_forms.check(NAME, table.LAYERS[kind]) == []
    for kind in table.MATERIAL:
        test_gradients.test_gradients_are_the_oracles_in_every_form(NAME, kind)
    for kind in test_dropout.LAYERS:
        test_dropout.test_dropout_drops_entries_of_the_deltas_output(NAME, kind)
        test_dropout.test_rank_dropout_masks_ranks_or_rows(NAME, kind)


@pytest.mark.usefixtures("outer")
def test_the_network_trains_saves_and_reads_it(tmp_path: Path) -> None:
    model, x = toy(), toy_input()
    net = network(model, NAME, 0.7)
    net.apply_to()
    net.save_weights(tmp_path / "a.safetensors")
    other = toy()
    again, _ = deltafuse.create_lycoris_from_weights(0.7, tmp_path / "a.safetensors", other)
    assert {item.name for item in again.loras} == {NAME}
    again.eval().apply_to()
    torch.testing.assert_close(other(x), model(x), rtol=1e-9, atol=1e-11)


def test_it_is_gone_afterwards() -> None:
    assert NAME not in algorithms()
