"""Positional constructor orders: callers that pass every option by place must land on the right one."""

from __future__ import annotations

import inspect

import lycoris.modules as modules
import pytest
import torch
from torch import nn

HEAD = ["lora_name", "org_module", "multiplier", "lora_dim", "alpha", "dropout", "rank_dropout", "module_dropout"]
ORDERS = {
    "LoConModule": [*HEAD, "use_tucker", "use_scalar", "rank_dropout_scale", "weight_decompose", "wd_on_out"]
    + ["bypass_mode", "rs_lora"],
    "LohaModule": [*HEAD, "use_tucker", "use_scalar", "rank_dropout_scale", "weight_decompose", "wd_on_out"]
    + ["bypass_mode", "rs_lora"],
    "LokrModule": [*HEAD, "use_tucker", "use_scalar", "decompose_both", "factor", "rank_dropout_scale"]
    + ["weight_decompose", "wd_on_out", "full_matrix", "bypass_mode", "rs_lora", "unbalanced_factorization"],
    "DiagOFTModule": [*HEAD, "use_tucker", "use_scalar", "rank_dropout_scale", "constraint", "rescaled", "bypass_mode"],
    "ButterflyOFTModule": [*HEAD, "use_tucker", "use_scalar", "rank_dropout_scale", "constraint", "rescaled"]
    + ["bypass_mode"],
    "DyLoraModule": [*HEAD, "use_tucker", "block_size", "use_scalar", "rank_dropout_scale", "weight_decompose"]
    + ["bypass_mode", "rs_lora", "train_on_input"],
    "GLoRAModule": [
        *HEAD,
        "use_tucker",
        "use_scalar",
        "rank_dropout_scale",
        "weight_decompose",
        "bypass_mode",
        "rs_lora",
    ],
    "IA3Module": [*HEAD, "use_tucker", "use_scalar", "rank_dropout_scale", "weight_decompose", "bypass_mode", "rs_lora"]
    + ["train_on_input"],
    "FullModule": [*HEAD, "use_tucker", "use_scalar", "rank_dropout_scale", "bypass_mode"],
    "NormModule": ["lora_name", "org_module", "multiplier", "rank_dropout", "module_dropout", "rank_dropout_scale"],
    "TLoraModule": [*HEAD, "rank_dropout_scale", "bypass_mode", "sig_type", "use_data_init", "mask_group_id"],
}


@pytest.mark.parametrize("name", list(ORDERS))
def test_parameter_order(name):
    """The names a positional caller counts on, in their order."""
    parameters = list(inspect.signature(getattr(modules, name).__init__).parameters)[1:]
    assert parameters[: len(ORDERS[name])] == ORDERS[name]


def conv() -> nn.Conv2d:
    return nn.Conv2d(10, 24, 3, padding=1)


@pytest.mark.parametrize("name", ["LoConModule", "LohaModule"])
def test_low_rank_by_place(name):
    module = getattr(modules, name)("a", conv(), 0.5, 3, 2.0, 0.1, 0.2, 0.3, True, True, True, True, False, False, True)
    assert (module.lora_name, module.multiplier, module.lora_dim) == ("a", 0.5, 3)
    assert float(module.scale) == pytest.approx(2.0 / 3**0.5)
    assert (module.rank_dropout, module.module_dropout, module.rank_dropout_scale) == (0.2, 0.3, True)
    assert module.tucker
    assert module.wd
    assert module.wd_on_out is False
    assert module.dora_scale.shape == (1, 10, 1, 1)
    assert isinstance(module.scalar, nn.Parameter)


def test_lokr_by_place():
    module = modules.LokrModule(
        "a", conv(), 0.5, 1, 2.0, 0.0, 0.2, 0.3, False, True, True, 2, True, True, False, False, True, True, True
    )
    assert {key for key in module.state_dict() if key.startswith("lokr")} == {
        "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b",
    }  # fmt: skip
    assert module.lokr_w1_a.shape == (12, 1)  # unbalanced: the larger output factor comes first
    assert module.dora_scale.shape == (1, 10, 1, 1)
    assert module.bypass_mode
    assert float(module.scale) == pytest.approx(2.0)
    assert isinstance(module.scalar, nn.Parameter)


def test_lokr_full_matrix_by_place():
    module = modules.LokrModule(
        "a", conv(), 1.0, 1, 2.0, 0.0, 0.0, 0.0, False, False, False, 2, False, False, True, True
    )
    assert module.lokr_w2.shape == (12, 5, 3, 3)
    assert module.full_matrix


@pytest.mark.parametrize("name", ["DiagOFTModule", "ButterflyOFTModule"])
def test_rotations_by_place(name):
    module = getattr(modules, name)("a", conv(), 0.5, 6, 2.0, 0.1, 0.2, 0.3, False, False, True, 0.5, True, True)
    assert float(module.constraint) == pytest.approx(12.0)
    assert module.rescale.shape == (24, 1, 1, 1)
    assert module.bypass_mode
    assert (module.rank_dropout, module.module_dropout, module.rank_dropout_scale) == (0.2, 0.3, True)
    assert module.block_size * module.block_num == 24


def test_dylora_by_place():
    module = modules.DyLoraModule("a", nn.Linear(15, 24), 0.5, 6, 2.0, 0.0, 0.2, 0.3, False, 3)
    assert (module.block_size, module.block_count, module.lora_dim) == (3, 2, 6)
    assert len(module.up_list) == len(module.down_list) == 2
    assert module.up_list[0].shape == (24, 3)
    assert module.down_list[0].shape == (3, 15)


def test_glora_by_place():
    module = modules.GLoRAModule(
        "a", nn.Linear(15, 24), 0.5, 3, 2.0, 0.1, 0.2, 0.3, False, True, True, False, True, True
    )
    assert module.bypass_mode
    assert float(module.scale) == pytest.approx(2.0 / 3**0.5)
    assert isinstance(module.scalar, nn.Parameter)


def test_ia3_by_place():
    module = modules.IA3Module("a", conv(), 0.5, 3, 2.0, 0.0, 0.0, 0.3, False, False, False, False, False, False, True)
    assert module.weight.shape == (1, 10, 1, 1)
    assert int(module.on_input) == 1


def test_full_by_place():
    module = modules.FullModule("a", conv(), 0.5, 3, 2.0, 0.0, 0.2, 0.3, False, False, True, False)
    assert (module.rank_dropout, module.module_dropout, module.rank_dropout_scale) == (0.2, 0.3, True)
    assert not module.bypass_mode


def test_norm_by_place():
    module = modules.NormModule("a", nn.GroupNorm(3, 12), 0.5, 0.2, 0.3, True)
    assert (module.multiplier, module.rank_dropout, module.module_dropout) == (0.5, 0.2, 0.3)
    assert module.rank_dropout_scale
    assert module.w_norm.shape == module.b_norm.shape == (12,)


def test_tlora_by_place():
    torch.manual_seed(0)
    layer = nn.Linear(15, 24)
    module = modules.TLoraModule("a", layer, 0.5, 3, 2.0, 0.1, 0.2, 0.3, True, True, "last", True, 4)
    assert module.bypass_mode
    assert module.mask_group_id == 4
    assert module.sig_type == "last"
    smallest = torch.linalg.svdvals(layer.weight.detach())[-3:]
    torch.testing.assert_close(module.lambda_layer.detach().flatten(), smallest)


ATTRIBUTES = {
    "linear": (nn.Linear(15, 24), (24, 15), {}),
    "conv1d": (nn.Conv1d(10, 24, 3, stride=2), (24, 10, 3), {"stride": (2,)}),
    "conv2d": (nn.Conv2d(10, 24, (3, 2), dilation=2), (24, 10, 3, 2), {"dilation": (2, 2)}),
    "conv3d": (nn.Conv3d(6, 24, 2, groups=3, padding=1), (24, 2, 2, 2, 2), {"groups": 3, "padding": (1, 1, 1)}),
}


@pytest.mark.parametrize("kind", list(ATTRIBUTES))
def test_base_attributes(kind):
    layer, shape, settings = ATTRIBUTES[kind]
    module = modules.LoConModule("a", layer, 1.0, 3, 2.0)
    assert module.module_type == kind
    assert tuple(module.shape) == shape
    assert module.dim == 24
    assert module.org_module == [layer]
    assert module.module is type(layer)
    assert not module.is_quant
    assert module.dtype == torch.float32
    assert module.device.type == "cpu"
    assert module.org_weight is layer.weight
    assert {key: module.kw_dict[key] for key in settings} == settings
    assert set(module.kw_dict) == (set() if kind == "linear" else {"stride", "padding", "dilation", "groups"})


@pytest.mark.parametrize(
    "name", ["LoConModule", "LohaModule", "LokrModule", "DiagOFTModule", "GLoRAModule", "IA3Module"]
)
def test_unsupported_layers_are_refused(name):
    with pytest.raises(Exception, match=r"(?i)layernorm|not supported"):
        getattr(modules, name)("a", nn.LayerNorm(12), 1.0, 3, 2.0)


def test_class_facts():
    assert modules.LoConModule.name == "locon"
    assert modules.DiagOFTModule.name == "diag-oft"
    assert modules.NormModule.support_module == {"layernorm", "groupnorm"} or {"layernorm", "groupnorm"} <= set(
        modules.NormModule.support_module
    )
    for kind in (modules.LoConModule, modules.LohaModule, modules.LokrModule, modules.ButterflyOFTModule):
        assert {"linear", "conv1d", "conv2d", "conv3d"} <= set(kind.support_module)


def test_full_refuses_bypass():
    with pytest.raises(Exception, match=r"(?i)bypass"):
        modules.FullModule("a", nn.Linear(15, 24), bypass_mode=True)


def test_dylora_rank_must_be_whole_blocks():
    with pytest.raises(Exception, match=r"(?i)block_size|multiple"):
        modules.DyLoraModule("a", nn.Linear(15, 24), 1.0, 5, 2.0, block_size=2)


def test_boft_names_an_impossible_dimension():
    with pytest.raises(Exception, match="320"):
        modules.ButterflyOFTModule("a", nn.Linear(15, 320), 1.0, 8, 2.0)
