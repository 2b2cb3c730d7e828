"""Merging, stacking, tied and hidden weights (rules 6 to 12)."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest
import torch
from torch import nn

import deltafuse
from deltafuse.core.errors import MergeError

from . import table
from .toy import ALGORITHMS, network, toy, toy_input


def states_equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("options", [{}, {"weight_decompose": True}, {"train_norm": True}], ids=str)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_hooked_equals_merged_equals_reloaded(algo: str, options: dict[str, bool], tmp_path) -> None:
    if algo == "norm" and options:
        pytest.skip("norm takes no options")
    model, x = toy(), toy_input()
    still = model(x)
    net = network(model, algo, 0.7, **options)
    net.apply_to()
    hooked = model(x)
    assert float((hooked - still).norm() / still.norm()) > 1e-4
    net.set_multiplier(0.0)
    assert torch.equal(model(x), still)
    net.set_multiplier(0.7)
    net.restore()
    assert torch.equal(model(x), still)
    file = tmp_path / "net.safetensors"
    net.save_weights(file, None, {"who": "me"})
    other = toy()
    again, _ = deltafuse.create_lycoris_from_weights(0.7, file, other)
    again.eval().apply_to()
    torch.testing.assert_close(other(x), hooked, rtol=1e-9, atol=1e-11)
    merged = toy()
    third, _ = deltafuse.create_lycoris_from_weights(0.7, file, merged)
    third.merge_to(0.7)
    torch.testing.assert_close(merged(x), hooked, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_onfly_merge_and_restore(algo: str, dtype: torch.dtype) -> None:
    model = toy(dtype)
    before = copy.deepcopy(model)
    net = network(model, algo)
    for _ in range(3):
        net.onfly_merge(0.7)
        assert not states_equal(model, before)
        net.onfly_restore()
        assert states_equal(model, before)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_second_merge_never_doubles(algo: str) -> None:
    model, x = toy(), toy_input()
    net = network(model, algo)
    net.apply_to()
    hooked = model(x)
    net.merge_to(0.7)
    merged = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(model(x), hooked, rtol=1e-9, atol=1e-11)  # merged while hooked: once, not twice
    net.merge_to(0.7)
    assert all(torch.equal(value, merged[key]) for key, value in model.state_dict().items())
    with pytest.raises(MergeError, match="merged at strength"):
        net.merge_to(0.4)
    net.restore()
    torch.testing.assert_close(model(x), hooked, rtol=1e-9, atol=1e-11)
    assert all(torch.equal(value, merged[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_bad_number_in_the_last_layer_stops_the_merge_before_the_first(algo: str, bad: float) -> None:
    model = toy()
    before = copy.deepcopy(model)
    net = network(model, algo)
    last = net.loras[-1]
    with torch.no_grad():
        next(p for p in last.parameters() if p.dim() > 0).view(-1)[0] = bad
        for parameter in last.parameters():
            parameter.view(-1)[0] = bad
    with pytest.raises(MergeError, match=last.lora_name):
        net.merge_to(1.0)
    assert states_equal(model, before)
    with pytest.raises(MergeError, match=last.lora_name):
        net.onfly_merge(1.0)
    assert states_equal(model, before)


def test_a_value_the_base_dtype_cannot_hold_stops_the_merge() -> None:
    model = toy(torch.float16)
    before = copy.deepcopy(model)
    net = network(model, "full")
    with torch.no_grad():
        net.loras[-1].weight[0, 0] = 1e6
    with pytest.raises(MergeError, match=net.loras[-1].lora_name):
        net.merge_to(1.0)
    assert states_equal(model, before)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name != "norm"])
def test_tied_weights_are_untied_by_name(algo: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Tied().double()
    embedding = model.embed.weight.detach().clone()
    options = table.spec(algo).always
    rank = {"boft": 10, "oft": 2}.get(algo, 4)
    net = deltafuse.create_lycoris(model, 1.0, rank, 5.0, algo=algo, **options).double()
    for adapter in net.loras:
        table.stir(adapter)
    net.eval().apply_to()
    tokens = torch.arange(10)
    hooked = model(tokens)
    with caplog.at_level(logging.WARNING, logger="deltafuse"):
        net.merge_to(1.0)
    assert torch.equal(model.embed.weight, embedding), "the other owner changed"
    torch.testing.assert_close(model(tokens), hooked, rtol=1e-9, atol=1e-11)
    assert "embed" in caplog.text
    assert "head" in caplog.text


def test_a_layer_under_two_names_is_merged_once() -> None:
    shared = nn.Linear(8, 8).double()
    model = nn.ModuleDict({"a": shared, "b": shared})
    net = deltafuse.create_lycoris(model, 1.0, 2, 5.0).double()
    assert len(net.loras) == 1
    table.stir(net.loras[0])
    net.eval().apply_to()
    x = torch.randn(3, 8, dtype=table.DOUBLE)
    hooked = model["a"](x)
    net.merge_to(1.0)
    torch.testing.assert_close(model["b"](x), hooked, rtol=1e-10, atol=1e-12)


TRIOS = [("locon", "lokr", "loha"), ("diag-oft", "locon", "ia3"), ("boft", "full", "glora"), ("oft", "tlora", "dylora")]


@pytest.mark.parametrize("trio", TRIOS, ids="+".join)
def test_three_stacked_networks_come_off_in_any_order(trio: tuple[str, str, str]) -> None:
    x = toy_input()
    plain = toy()(x)
    for order in itertools.permutations(range(3)):
        model = toy()
        nets = [network(model, algo) for algo in trio]
        for net in nets:
            net.apply_to()
        on = set(range(3))
        for index in order:
            nets[index].restore()
            on.discard(index)
            want = additive(trio, sorted(on))
            torch.testing.assert_close(model(x), want(x), rtol=1e-8, atol=1e-9)
        assert torch.equal(model(x), plain)
        assert all("forward" not in layer.__dict__ for layer in model.modules())


def additive(trio: tuple[str, ...], which: list[int]) -> nn.Module:
    """The toy with the sum of the deltas of some of the networks in its weights, each taken on the raw weight."""
    model = toy()
    changes: dict[str, list[torch.Tensor]] = {}
    source = toy()
    nets = [network(source, algo) for algo in trio]
    for index in which:
        for adapter in nets[index].loras:
            weight, bias = adapter.get_diff_weight(0.7)
            changes.setdefault(adapter.lora_name, []).append((weight, bias))
    for path, layer in model.named_modules():
        for weight, bias in changes.get(f"lycoris_{path}", []):
            with torch.no_grad():
                layer.weight += weight
                if bias is not None and layer.bias is not None:
                    layer.bias += bias
    return model


@pytest.mark.parametrize("trio", TRIOS, ids="+".join)
def test_merging_one_of_a_stack_keeps_the_others_acting(trio: tuple[str, str, str]) -> None:
    x = toy_input()
    for index in range(3):
        model = toy()
        nets = [network(model, algo) for algo in trio]
        for net in nets:
            net.apply_to()
        others = [net for place, net in enumerate(nets) if place != index]
        nets[index].merge_to(0.7)
        both = model(x)
        for net in others:
            net.set_multiplier(0.0)
        only = model(x)
        for net in others:
            net.set_multiplier(0.7)
        want = additive(trio, [index])
        torch.testing.assert_close(only, want(x), rtol=1e-8, atol=1e-9)
        assert float((both - only).norm()) > 1e-6, "the others act no more"
        for net in others:
            net.restore()
        nets[index].restore()
        torch.testing.assert_close(model(x), want(x), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name != "norm"])
def test_the_next_forward_uses_a_base_that_was_swapped_cast_or_reloaded(algo: str) -> None:
    x = toy_input()
    model = toy()
    net = network(model, algo)
    net.apply_to()
    model(x)
    donor = toy(seed=9)
    for path, layer in donor.named_modules():
        if isinstance(layer, nn.Linear):
            model.get_submodule(path).weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
        elif isinstance(layer, nn.Conv2d):
            model.get_submodule(path).weight.data = layer.weight.clone()
    model.load_state_dict(donor.state_dict())
    got = model(x)
    fresh = toy(seed=9)
    other = network(fresh, algo)
    other.load_state_dict(net.state_dict())
    for target, source in zip(other.parameters(), net.parameters(), strict=True):
        target.data.copy_(source.data)
    other.apply_to()
    torch.testing.assert_close(got, fresh(x), rtol=1e-10, atol=1e-12)
    model.to(torch.bfloat16)
    y = model(x.to(torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert float((y.double() - got).norm() / got.norm()) < 0.1
    net.restore()


def test_the_projection_multihead_attention_reads_itself_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    with caplog.at_level(logging.WARNING, logger="deltafuse"):
        net = deltafuse.create_lycoris(model, 1.0, 2, 5.0)
    assert [item.lora_name for item in net.loras] == ["lycoris_fc"]
    assert "attn.out_proj" in caplog.text
    assert any("attn.out_proj" in line for line in net.skipped)
    assert any("attn.out_proj" in line for line in deltafuse.explain(net).skipped)


@pytest.mark.parametrize("algo", ["locon", "lokr", "diag-oft"])
def test_the_fused_encoder_path_does_not_go_around_the_adapters(algo: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        still = model(x)
        net = deltafuse.create_lycoris(model, 1.0, 4, 5.0, algo=algo)
        for adapter in net.loras:
            table.stir(adapter, 0.1)
        net.eval().apply_to()
        hooked = model(x)
        assert float((hooked - still).norm()) > 1e-3, "the fused path reads the base weights"
        net.restore()
        assert torch.equal(model(x), still)
        net.merge_to(1.0)
        torch.testing.assert_close(model(x), hooked, rtol=1e-4, atol=1e-5)


def test_deepcopy_and_pickle_of_an_adapted_model_stay_independent() -> None:
    model, x = toy(), toy_input()
    net = network(model, "locon")
    want = model(x)
    net.apply_to()
    net.restore()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), want)
