"""The smaller methods and attributes that callers of modules and networks lean on."""

from __future__ import annotations

import lycoris
import lycoris.modules as modules
import pytest
import torch
from lycoris import LycorisNetwork, create_lycoris, kohya
from torch import nn

from .oracle import merged_weight
from .support import randomise, saved, toy_input, toy_model
from .target import ON_PEER, agrees, differs, relative_error
from .toy_unet import models

ALGO = {"LoConModule": "locon", "LohaModule": "loha", "LokrModule": "lokr", "GLoRAModule": "glora"}


@pytest.fixture(autouse=True)
def _default_targets():
    LycorisNetwork.apply_preset(
        {
            "enable_conv": True,
            "target_module": ["Linear", "Conv1d", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm"],
            "target_name": [],
            "exclude_name": [],
            "module_algo_map": {},
            "name_algo_map": {},
        }
    )


def conv() -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(10, 24, 3, padding=1).requires_grad_(False)


def build(name: str, layer: nn.Module, **options) -> nn.Module:
    torch.manual_seed(3)
    return randomise(getattr(modules, name)("x", layer, 1.0, 2, 3.0, **options)).eval()


@pytest.mark.parametrize("name", list(ALGO))
def test_merged_weight_without_arguments(name):
    """No shape, no device: the weight's own shape comes back (rule 28)."""
    layer = conv()
    module = build(name, layer)
    expected = merged_weight(ALGO[name], saved(module), layer.weight, 1.0) - layer.weight.double()
    fault = 28 if name in ("LohaModule",) else 1 if name == "LokrModule" else None
    agrees(lambda: module.get_merged_weight()[0] - layer.weight, expected, fault=fault)
    agrees(lambda: module.get_diff_weight()[0], expected, fault=fault)
    assert module.get_diff_weight()[1] is None


@pytest.mark.parametrize("name", list(ALGO))
def test_shape_argument(name):
    layer = conv()
    module = build(name, layer)
    flat = module.get_diff_weight(1.0, (24, 90), None)[0]
    assert flat.shape == (24, 90)
    torch.testing.assert_close(flat.reshape(24, 10, 3, 3), module.get_diff_weight(1.0, (24, 10, 3, 3))[0])


@pytest.mark.parametrize("name", list(ALGO))
def test_make_module_from_state_dict_by_place(name):
    layer = conv()
    module = build(name, layer)
    kind, tensors = type(module), saved(module)
    with torch.no_grad():
        again = kind.make_module_from_state_dict("y", layer, *[tensors.get(key) for key in kind.weight_list])
    assert again.lora_name == "y"
    for key, value in saved(again).items():
        assert torch.equal(value, tensors[key]), key


@pytest.mark.parametrize("name", list(ALGO))
def test_custom_state_dict(name):
    module = build(name, conv())
    custom = module.custom_state_dict()
    assert set(custom) == set(module.state_dict())
    prefixed = module.state_dict(prefix="deep.")
    assert set(prefixed) == {f"deep.{key}" for key in custom}
    gathered: dict = {}
    module.state_dict(destination=gathered, prefix="a.")
    assert set(gathered) == {f"a.{key}" for key in custom}


def test_load_state_dict_report():
    module = build("LoConModule", conv())
    tensors = saved(module)
    report = module.load_state_dict(tensors, strict=True)
    assert list(report.missing_keys) == list(report.unexpected_keys) == []
    del tensors["lora_up.weight"]
    report = module.load_state_dict({**tensors, "other": torch.zeros(1)}, strict=False)
    assert list(report.missing_keys) == ["lora_up.weight"]
    assert list(report.unexpected_keys) == ["other"]


@pytest.mark.parametrize("limit", ["below", "above"])
def test_module_max_norm(limit):
    module = build("LoConModule", conv())
    norm = float(module.get_diff_weight(1.0)[0].detach().norm())
    scaled, after = module.apply_max_norm(norm * (0.4 if limit == "below" else 3.0), torch.device("cpu"))
    assert bool(scaled) is (limit == "below")
    wanted = norm * (0.4 if limit == "below" else 1.0)
    assert float(module.get_diff_weight(1.0)[0].detach().norm()) == pytest.approx(wanted, rel=1e-4)

    def ours() -> None:
        assert float(after) == pytest.approx(wanted, rel=1e-4)

    differs(47, peer=lambda: None, ours=ours)


def test_org_weight_can_be_written():
    layer = conv()
    module = build("LoConModule", layer)
    value = torch.randn_like(layer.weight)
    module.org_weight = value
    assert torch.equal(layer.weight, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_to_dtype(dtype):
    module = build("LoConModule", conv()).to(dtype)
    assert module.dtype == dtype
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", ["LoConModule", "LohaModule", "LokrModule"])
def test_16_bit_base_with_fp32_adapter(name, bypass, dtype):
    """Works without autocast, gives the base's dtype, and the delta keeps its digits (rules 29 and 7)."""
    torch.manual_seed(1)
    layer, x = nn.Linear(40, 24).to(dtype).requires_grad_(False), torch.randn(3, 5, 40).to(dtype)
    module = build(name, layer, bypass_mode=bypass)
    expected = x.double() @ merged_weight(ALGO[name], saved(module), layer.weight, 1.0).T + layer.bias.double()

    def peer() -> None:
        assert relative_error(module(x), expected) < 3e-2

    def ours() -> None:
        output = module(x)
        assert output.dtype == dtype
        assert relative_error(output, expected) < torch.finfo(dtype).eps

    differs(29, peer=peer, ours=ours)


def test_parameters_start_in_fp32_on_the_cpu():
    layer = nn.Linear(40, 24).to(torch.bfloat16)
    module = modules.LoConModule("x", layer, 1.0, 3, 2.0)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("shape", [(40,), (0, 40), (1, 40), (2, 0, 40), (2, 3, 4, 40), (2, 1, 3, 2, 40)], ids=str)
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("name", list(ALGO))
def test_any_leading_shape(name, bypass, shape):
    """Rule 26."""
    torch.manual_seed(1)
    layer, x = nn.Linear(40, 24).requires_grad_(False), torch.randn(shape)
    module = build(name, layer, bypass_mode=bypass)
    if ON_PEER and name == "LokrModule" and bypass and not x.numel():
        with pytest.raises(RuntimeError):
            module(x)
        return
    output = module(x)
    assert output.shape == (*shape[:-1], 24)
    if x.numel():
        expected = x.double() @ (
            merged_weight(ALGO[name], saved(module), layer.weight, 1.0).T - layer.weight.double().T
        )
        assert relative_error(output - layer(x), expected) < 2e-5


# ------------------------------------------------------------------------------------------------------------ networks
def test_network_attributes():
    net = create_lycoris(toy_model(), 0.7, linear_dim=3, linear_alpha=2.0)
    assert net.multiplier == 0.7
    assert net.lora_dim == 3
    assert net.alpha == 2.0
    assert {adapter.multiplier for adapter in net.loras} == {0.7}


@pytest.mark.parametrize("value", ["3", 3])
def test_dims_may_be_text(value):
    net = create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, conv_dim=value, conv_alpha="4")
    adapter = next(adapter for adapter in net.loras if adapter.lora_name == "lycoris_conv_in")
    assert adapter.lora_dim == 3
    assert float(adapter.scale) == pytest.approx(4 / 3)


def test_missing_dim_is_the_default():
    net = create_lycoris(toy_model(), 1.0, linear_dim=None, linear_alpha=2.0)
    assert {adapter.lora_dim for adapter in net.loras} == {4}


@pytest.mark.parametrize("alpha", [None, 0])
def test_network_alpha_none_or_zero_is_the_rank(alpha):
    """Rule 1; lycoris-lora cannot read None as the convolution's alpha."""

    def scales() -> set[float]:
        net = create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=alpha)
        return {float(adapter.scale) for adapter in net.loras}

    def peer() -> None:
        if alpha == 0:
            assert scales() == {1.0}

    def ours() -> None:
        assert scales() == {1.0}

    differs(1, peer=peer, ours=ours)


def test_network_moves_as_a_module():
    net = create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0)
    net.apply_to()
    net.to(torch.bfloat16)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    net.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_network_state_dict_round_trip():
    model, x = toy_model(), toy_input()
    net = create_lycoris(model, 1.0, linear_dim=3, linear_alpha=2.0)
    for adapter in net.loras:
        randomise(adapter)
    net.apply_to()
    output, state = model(x), saved(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert relative_error(model(x), output) > 1e-3
    report = net.load_state_dict(state)
    assert not report.missing_keys
    assert not report.unexpected_keys
    torch.testing.assert_close(model(x), output)


def test_gradient_checkpointing_of_a_block():
    """Both kinds of activation checkpointing give the gradients of the plain run."""
    from torch.utils.checkpoint import checkpoint

    grads = []
    for kind in (None, False, True):
        model, x = toy_model(), toy_input().requires_grad_()
        torch.manual_seed(3)
        net = create_lycoris(model, 1.0, linear_dim=3, linear_alpha=2.0)
        for adapter in net.loras:
            randomise(adapter)
        net.apply_to()
        output = model(x) if kind is None else checkpoint(model, x, use_reentrant=kind)
        output.square().mean().backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    for other in grads[1:]:
        for name, value in grads[0].items():
            torch.testing.assert_close(other[name], value, msg=name)


def test_kohya_without_text_encoder():
    unet, _ = models()
    net = kohya.create_network(1.0, 3, 2.0, None, None, unet)
    assert net.text_encoder_loras == []
    net.apply_to(None, unet, False, True)
    assert len(net.loras) == len(net.unet_loras) > 0


def test_kohya_default_dim():
    unet, te = models()
    net = kohya.create_network(1.0, None, 2.0, None, te, unet)
    assert {adapter.lora_dim for adapter in net.loras} == {4}


def test_kohya_targets_are_class_attributes():
    assert "Transformer2DModel" in kohya.LycorisNetworkKohya.UNET_TARGET_REPLACE_MODULE
    assert "conv_in" in kohya.LycorisNetworkKohya.UNET_TARGET_REPLACE_NAME
    assert "CLIPAttention" in kohya.LycorisNetworkKohya.TEXT_ENCODER_TARGET_REPLACE_MODULE
    assert kohya.LycorisNetworkKohya.LORA_PREFIX_UNET == "lora_unet"
    assert kohya.LycorisNetworkKohya.LORA_PREFIX_TEXT_ENCODER == "lora_te"


def test_wrapper_targets_are_class_attributes():
    assert LycorisNetwork.LORA_PREFIX == "lycoris"
    assert LycorisNetwork.ENABLE_CONV is True
    assert "Linear" in LycorisNetwork.TARGET_REPLACE_MODULE
    assert LycorisNetwork.TARGET_REPLACE_NAME == []
    assert LycorisNetwork.TARGET_EXCLUDE_NAME == []
    assert LycorisNetwork.MODULE_ALGO_MAP == {}
    assert LycorisNetwork.NAME_ALGO_MAP == {}
    assert LycorisNetwork.USE_FNMATCH is False


def test_apply_preset_returns_the_class():
    assert LycorisNetwork.apply_preset({"lora_prefix": "lycoris"}) is LycorisNetwork


def test_make_module_is_exported():
    assert lycoris.make_module is modules.make_module


@pytest.mark.parametrize(
    "path", ["utils.general", "utils.preset", "utils.quant", "config_sdk", "wrapper", "kohya", "logging"]
)
def test_submodule_paths(path):
    assert __import__(f"lycoris.{path}", fromlist=["x"]).__name__


def test_state_dict_holds_plain_tensors():
    """What is saved is detached, contiguous and unshared (rule 41)."""
    net = create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, use_scalar=True, use_tucker=True)
    net.apply_to()
    state = net.state_dict()

    def peer() -> None:
        assert any(value.requires_grad for value in state.values())

    def ours() -> None:
        assert not any(value.requires_grad for value in state.values())
        assert all(value.is_contiguous() for value in state.values())

    differs(41, peer=peer, ours=ours)
