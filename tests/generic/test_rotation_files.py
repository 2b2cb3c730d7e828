"""Every way a file may hold output-side rotations (rule 20)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deltafuse
from deltafuse.core.errors import CheckpointError


def made(algo: str) -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    """A model, the tensors of a rotation on it, and the delta of the only layer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 24))
    net = deltafuse.create_lycoris(model, 1.0, 6, 2.0, algo=algo, constraint=0.5)
    with torch.no_grad():
        net.loras[0].oft_blocks.add_(torch.randn_like(net.loras[0].oft_blocks))
    return model, dict(net.state_dict()), net.loras[0].get_diff_weight(0.7)[0]


def renamed(tensors: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """The same tensors as another tool would name them."""
    name, blocks = "lycoris_0", tensors.pop("lycoris_0.oft_blocks")
    if form == "oft_diag":
        return {**tensors, f"{name}.oft_diag": blocks}
    return {**tensors, **{f"{name}.oft_blocks.{index}": block for index, block in enumerate(blocks)}}


@pytest.mark.parametrize("form", ["oft_diag", "split list"])
@pytest.mark.parametrize("algo", ["diag-oft", "boft"])
def test_other_names_of_the_blocks(algo: str, form: str) -> None:
    model, tensors, delta = made(algo)
    tensors = renamed(tensors, form)
    read, _ = deltafuse.create_lycoris_from_weights(1.0, None, model, tensors)
    torch.testing.assert_close(read.loras[0].get_diff_weight(0.7)[0], delta)
    fresh = deltafuse.create_lycoris(model, 1.0, 6, 2.0, algo=algo)
    report = fresh.load_tensors(tensors, {}, "tensors")
    torch.testing.assert_close(fresh.loras[0].get_diff_weight(0.7)[0], delta)
    assert "missing keys" not in report
    assert "unexpected keys" not in report


def test_a_split_list_with_a_gap_is_refused() -> None:
    model, tensors, _ = made("diag-oft")
    tensors = renamed(tensors, "split list")
    del tensors["lycoris_0.oft_blocks.1"]
    with pytest.raises(CheckpointError, match=r"lycoris_0.*oft_blocks\.0"):
        deltafuse.create_lycoris_from_weights(1.0, None, model, tensors)
