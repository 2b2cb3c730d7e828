"""What a network promises its callers: options, targets, presets, creation, max norm (rules 43 to 48)."""

from __future__ import annotations

import numbers
from typing import Any

import pytest
import torch
from torch import nn

import deltafuse
from deltafuse.algorithms import algorithms
from deltafuse.core.errors import OptionError, ShapeError, TargetError
from deltafuse.network import LycorisNetwork

from . import table
from .toy import ALGORITHMS, network, toy, toy_input


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_parameters_and_state_dict_are_there_at_creation(algo: str) -> None:
    net = network(toy(torch.float32), algo)
    names = [name for name, _ in net.named_parameters()]
    state = list(net.state_dict())
    assert names
    assert state
    net.apply_to()
    net.apply_to()
    assert [name for name, _ in net.named_parameters()] == names
    assert list(net.state_dict()) == state
    assert not any("org_module" in name for name in state)
    groups = net.prepare_optimizer_params(1e-3)
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_applying_twice_is_harmless(algo: str) -> None:
    model, x = toy(), toy_input()
    still = model(x)
    net = network(model, algo)
    net.apply_to()
    once = model(x)
    net.apply_to()
    assert torch.equal(model(x), once)
    net.restore()
    assert torch.equal(model(x), still)
    net.restore()
    assert torch.equal(model(x), still)
    net.apply_to()
    assert torch.equal(model(x), once)


def test_presets_belong_to_one_network() -> None:
    before = LycorisNetwork.default_rules()
    preset = {"enable_conv": False, "target_module": ["Linear"], "target_name": [], "lora_prefix": "mine"}
    one = deltafuse.create_lycoris(toy(), 1.0, 2, 5.0, preset=preset)
    two = deltafuse.create_lycoris(toy(), 1.0, 2, 5.0)
    assert LycorisNetwork.default_rules() == before
    assert {item.lora_name for item in one.loras} == {"mine_q", "mine_k", "mine_head"}
    assert len(two.loras) == 6
    assert all(item.lora_name.startswith("lycoris_") for item in two.loras)


def test_zero_matches_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(TargetError, match=r"Linear"):
        deltafuse.create_lycoris(toy(), 1.0, 2, 5.0, preset={"target_module": ["Linaer"], "enable_conv": False})
    with pytest.raises(TargetError, match=r"head"):
        deltafuse.create_lycoris(toy(), 1.0, 2, 5.0, preset={"target_module": [], "target_name": ["haed"]})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rank_dropuot", "rank_dropout"),
        ("weight_decompse", "weight_decompose"),
        ("use_tuker", "use_tucker"),
        ("fatcor", "factor"),
    ],
)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_misspelled_option_is_an_error_with_the_nearest_name(algo: str, wrong: str, right: str) -> None:
    with pytest.raises(OptionError, match=f"{wrong}.*{right}"):
        deltafuse.create_lycoris(toy(), 1.0, 2, 5.0, algo=algo, **{wrong: 1})
    with pytest.raises(OptionError, match=f"{wrong}.*{right}"):
        algorithms()[algo].module_class("x", nn.LayerNorm(4) if algo == "norm" else nn.Linear(4, 4), **{wrong: 1})


def test_an_unknown_algorithm_or_preset_key_names_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"lokr"):
        deltafuse.create_lycoris(toy(), 1.0, 2, 5.0, algo="lorkr")
    with pytest.raises(OptionError, match=r"target_module"):
        deltafuse.create_lycoris(toy(), 1.0, 2, 5.0, preset={"target_modul": ["Linear"]})


@pytest.mark.parametrize(
    ("algo", "option"),
    [("ia3", "use_tucker"), ("locon", "factor"), ("full", "rs_lora"), ("boft", "use_scalar"), ("locon", "rescaled")],
)
def test_an_option_no_layer_uses_is_an_error(algo: str, option: str) -> None:
    with pytest.raises(OptionError, match=option):
        deltafuse.create_lycoris(toy(), 1.0, 8, 5.0, algo=algo, **{option: 5 if option == "factor" else True})


ALIASES: list[tuple[str, dict[str, Any], str, Any]] = [
    ("locon", {"dora_wd": True}, "wd", True),
    ("locon", {"weight_decompose": "true"}, "wd", True),
    ("locon", {"dora_wd": True, "wd_on_output": False}, "wd_on_out", False),
    ("locon", {"dora_wd": True, "wd_on_out": "False"}, "wd_on_out", False),
    ("diag-oft", {"constrain": 0.25}, "stored_constraint", 0.25),
    ("diag-oft", {"constraint": "0.25"}, "stored_constraint", 0.25),
    ("locon", {"use_cp": True}, "tucker", True),
    ("locon", {"use_conv_cp": "1"}, "tucker", True),
    ("locon", {"disable_conv_cp": False}, "tucker", True),
    ("locon", {"disable_conv_cp": True}, "tucker", False),
]


@pytest.mark.parametrize(("algo", "options", "attribute", "value"), ALIASES, ids=str)
def test_documented_aliases(algo: str, options: dict[str, Any], attribute: str, value: Any) -> None:
    net = deltafuse.create_lycoris(toy(), 1.0, 2, 5.0, algo=algo, **options)
    stem = next(item for item in net.loras if item.lora_name == "lycoris_stem")
    assert getattr(stem, attribute) == value


REACHING: list[tuple[str, dict[str, Any], str]] = [
    *((algo, {"rank_dropout": 0.3, "rank_dropout_scale": True}, "rank_dropout_scale") for algo in ALGORITHMS),
    *((algo, {"module_dropout": 0.25}, "module_dropout") for algo in ALGORITHMS),
    *((algo, {"dropout": 0.25}, "dropout") for algo in ALGORITHMS if algo != "norm"),
    ("locon", {"rs_lora": True}, "rs_lora"),
    ("locon", {"use_scalar": True}, "use_scalar"),
    ("ia3", {"train_on_input": True}, "train_input"),
    ("tlora", {"sig_type": "last"}, "sig_type"),
    ("tlora", {"mask_group_id": 3}, "mask_group_id"),
    ("tlora", {"use_data_init": False}, "use_data_init"),
    ("dylora", {"block_size": 1}, "block_size"),
    ("lokr", {"full_matrix": True}, "full_matrix"),
    ("boft", {"rescaled": True}, "rescaled"),
    ("locon", {"bypass_mode": True}, "bypass_mode"),
    ("locon", {"dora_wd": True, "detach_norm": True}, "detach_norm"),
]


@pytest.mark.parametrize(("algo", "options", "attribute"), REACHING, ids=str)
def test_options_reach_the_modules(algo: str, options: dict[str, Any], attribute: str) -> None:
    net = network(toy(torch.float32), algo, **options)
    wanted = list(options.values())[-1]
    assert all(getattr(item, attribute) == wanted for item in net.loras)


@pytest.mark.parametrize("algo", ["oft", "boft"])
def test_a_dimension_without_a_block_stops_before_any_layer_changes(algo: str) -> None:
    model = nn.ModuleDict({"good": nn.Linear(8, 8), "bad": nn.Linear(7, 7)})
    with pytest.raises(ShapeError, match=r"lycoris_bad.*7"):
        deltafuse.create_lycoris(model, 1.0, 4, 5.0, algo=algo)
    assert all("forward" not in layer.__dict__ for layer in model.modules())


@pytest.mark.parametrize("options", [{}, {"weight_decompose": True}], ids=str)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_max_norm_limits_every_layer(algo: str, options: dict[str, Any]) -> None:
    if algo == "norm" and options:
        pytest.skip("norm takes no options")
    model, x = toy(), toy_input()
    net = network(model, algo, **options)
    norms = [item.apply_max_norm(1e9) for item in net.loras]
    assert not any(scaled for scaled, _ in norms)
    limit = 0.5 * min(norm for _, norm in norms)
    result = net.apply_max_norm_regularization(limit, "cpu")
    assert len(result) == 3
    assert all(isinstance(value, numbers.Number) for value in result)
    count, mean, largest = result
    assert count == len(net.loras)
    assert largest <= limit * (1 + 1e-6)
    assert mean <= largest
    for item in net.loras:
        parts = [part for part in item.get_diff_weight(1.0) if part is not None]
        norm = float(sum(part.square().sum() for part in parts) ** 0.5)
        assert 0.9 * limit <= norm <= limit * (1 + 1e-6), f"{item.lora_name}: {norm} for a limit of {limit}"
    assert net.apply_max_norm_regularization(limit * 1.01, None)[0] == 0
    net.apply_to()
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_report_counts(algo: str) -> None:
    net = network(toy(torch.float32), algo)
    report = deltafuse.explain(net)
    assert len(report) == len(net.loras)
    total = sum(parameter.numel() for parameter in net.parameters())
    assert report.totals["trainable_parameters"] == total
    size = sum(value.numel() * value.element_size() for value in net.state_dict().values())
    assert report.totals["file_bytes"] == size
    for row, item in zip(report, net.loras, strict=True):
        assert row.layer == item.lora_name
        assert row.scale == float(getattr(item, "scale", 1.0))
        assert row.reason
    assert all(item.lora_name in str(report) for item in net.loras)


def test_freezing_the_base_leaves_the_adapters() -> None:
    model = toy().requires_grad_(True)
    net = network(model, "locon")
    net.apply_to()
    frozen = net.freeze_base()
    assert frozen == sum(parameter.numel() for parameter in toy().parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_reentrant_checkpointing_of_a_frozen_model_trains(algo: str) -> None:
    model = toy()
    net = network(model, algo).train()
    net.apply_to()
    net.enable_gradient_checkpointing()
    grads = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        net.zero_grad()
        x = toy_input()
        body = nn.Sequential(model.stem, model.mix)
        if reentrant is None:
            y = model(x)
        else:
            torch.manual_seed(0)
            x = toy_input()
            y = Checkpointed(model, reentrant)(x)
        y.square().sum().backward()
        assert len(body) == 2
        grads.append({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
    if algo == "dylora":
        return
    for other in grads[1:]:
        for leaf, grad in grads[0].items():
            assert grad is not None, leaf
            assert other[leaf] is not None, leaf
            torch.testing.assert_close(other[leaf], grad, rtol=1e-9, atol=1e-11)


class Checkpointed(nn.Module):
    """The toy with everything after its input under one checkpoint."""

    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = [model], reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for hook in self.model[0]._forward_pre_hooks.values():
            hook(self.model[0], (x,), {})
        return torch.utils.checkpoint.checkpoint(self.model[0].forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_strength_is_any_float(algo: str) -> None:
    model, x = toy(), toy_input()
    net = network(model, algo)
    net.apply_to()
    seen = []
    for strength in (0.0, 0.25, 1, -0.5, 3.0, torch.tensor(0.25).item()):
        net.set_multiplier(strength)
        seen.append(model(x))
    assert torch.equal(seen[1], seen[5])
    assert all(not torch.equal(seen[0], other) for other in seen[1:])
    assert {item.multiplier for item in net.loras} == {0.25}


def test_the_table_knows_every_algorithm() -> None:
    """A registered algorithm without a table entry still gets variants from its declared options."""
    for name in table.weight_algorithms():
        assert next(iter(table.variants(name))) == {}
