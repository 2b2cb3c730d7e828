"""DyLoRA: every prefix of ranks is a LoRA, one block trains per call, eval and files see the full rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deltafuse.core.errors import OptionError
from deltafuse.modules import DyLoraModule, LoConModule, get_module, make_module

from . import table
from .test_gradients import attached, forms

RANK, BLOCK, ALPHA = 6, 2, 5.0
LAYERS = {
    "linear": table.Layer(lambda: nn.Linear(12, 24), (5, 12)),
    "conv2d": table.Layer(lambda: nn.Conv2d(6, 12, 3, padding=1), (2, 6, 5, 5)),
}


def make(layer: table.Layer, **extra: object) -> DyLoraModule:
    adapter = DyLoraModule("layer", layer.base(), 1.0, RANK, ALPHA, block_size=BLOCK, **extra).double()
    table.stir(adapter)
    return adapter


def prefix_lora(adapter: DyLoraModule, rank: int) -> LoConModule:
    """A LoRA of the first ``rank`` ranks with the same alpha."""
    base = copy.deepcopy(adapter.org_module[0])
    lora = LoConModule("layer", base, 1.0, rank, ALPHA, rs_lora=adapter.rs_lora).double()
    up, down = torch.cat(list(adapter.up_list), 1), torch.cat(list(adapter.down_list))
    lora.lora_up.weight.data.copy_(up[:, :rank].reshape(lora.lora_up.weight.shape))
    lora.lora_down.weight.data.copy_(down[:rank].reshape(lora.lora_down.weight.shape))
    return lora.eval()


@pytest.mark.parametrize("rs_lora", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_prefix_is_a_lora(kind: str, rs_lora: bool) -> None:
    adapter = make(LAYERS[kind], rs_lora=rs_lora)
    for rank in range(1, RANK + 1):
        got, _ = adapter.get_diff_weight(0.7, rank=rank)
        want, _ = prefix_lora(adapter, rank).get_diff_weight(0.7)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rs_lora", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_training_call_is_the_prefix_up_to_its_block(kind: str, rs_lora: bool) -> None:
    layer = LAYERS[kind]
    adapter = make(layer, rs_lora=rs_lora).train()
    x = layer.x()
    ends = [BLOCK * (block + 1) for block in range(RANK // BLOCK)]
    loras = {rank: prefix_lora(adapter, rank) for rank in ends}
    wants = {rank: lora.org_module[0](x) + lora.bypass_forward_diff(x) for rank, lora in loras.items()}
    for form in forms("dylora"):
        seen: dict[int, int] = {}
        with attached(adapter, form) as hooked:
            for _ in range(60):
                adapter.zero_grad()
                y = hooked(x)
                hits = [rank for rank, want in wants.items() if torch.allclose(y, want, rtol=1e-9, atol=1e-10)]
                assert len(hits) == 1, form
                seen[hits[0]] = seen.get(hits[0], 0) + 1
                y.square().sum().backward()
                block = hits[0] // BLOCK - 1
                for index, pair in enumerate(zip(adapter.up_list, adapter.down_list, strict=True)):
                    for parameter in pair:
                        moved = parameter.grad is not None and bool(parameter.grad.any())
                        assert moved == (index == block), f"{form}: block {index} while {block} trains"
        assert set(seen) == set(ends)
        assert min(seen.values()) >= 6, f"{form}: blocks are drawn unevenly: {seen}"


@pytest.mark.parametrize("kind", LAYERS)
def test_eval_is_the_full_rank_and_the_file_is_a_lora(kind: str) -> None:
    layer = LAYERS[kind]
    adapter = make(layer).eval()
    x = layer.x()
    whole = prefix_lora(adapter, RANK)
    with attached(adapter, "planned") as hooked:
        y = hooked(x)
    want = whole.org_module[0](x) + whole.bypass_forward_diff(x)
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-12)
    state = {f"layer.{key}": value for key, value in adapter.state_dict().items()}
    assert set(state) == {"layer.lora_up.weight", "layer.lora_down.weight", "layer.alpha"}
    cls, tensors = get_module(state, "layer")
    assert cls is LoConModule
    again = make_module(cls, tensors, "layer", copy.deepcopy(adapter.org_module[0])).eval()
    torch.testing.assert_close(again.get_diff_weight(1.0)[0], adapter.get_diff_weight(1.0)[0], rtol=1e-12, atol=1e-14)
    back = make(layer)
    back.load_state_dict(adapter.state_dict())
    torch.testing.assert_close(back.get_diff_weight(1.0)[0], adapter.get_diff_weight(1.0)[0], rtol=1e-12, atol=1e-14)


def test_dropouts_act_beside_the_drawn_block() -> None:
    layer = LAYERS["linear"]
    x = layer.x()
    adapter = make(layer, dropout=0.5).train()
    for form in forms("dylora"):
        with attached(adapter, form) as hooked, torch.no_grad():
            got = hooked(x)
        got = got - adapter.org_module[0](x)
        zeros = float((got.abs() < 1e-12).double().mean())
        assert 0.3 < zeros < 0.7, f"{form}: {zeros}"
    one = make(layer, rank_dropout=1.0, rank_dropout_scale=True).train()
    for form in forms("dylora"):
        with attached(one, form) as hooked, torch.no_grad():
            got = hooked(x)
        torch.testing.assert_close(got, one.org_module[0](x))


def test_a_block_that_does_not_divide_the_rank_is_refused() -> None:
    with pytest.raises(OptionError, match=r"block_size=4 .*lora_dim=6.*1, 2, 3, 6"):
        DyLoraModule("layer", nn.Linear(4, 4), lora_dim=6, block_size=4)
