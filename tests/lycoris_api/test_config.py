"""Presets, the config SDK, and the names of the package's top level."""

from __future__ import annotations

import logging

import lycoris
import lycoris.config
import lycoris.config_sdk
import lycoris.logging
import pytest
from lycoris import (
    AlgoOverride,
    PresetConfig,
    PresetValidationError,
    describe_algo,
    list_algorithms,
    list_builtin_presets,
)

from .target import refused

BUILTIN = {
    "full", "full-lin", "attn-mlp", "attn-only", "unet-only", "unet-transformer-only", "unet-convblock-only", "ia3",
}  # fmt: skip
ALGORITHMS = {
    "lora", "locon", "loha", "lokr", "dylora", "glora", "full", "diag-oft", "boft", "ia3", "tlora",
}  # fmt: skip
TOP_LEVEL = [
    "kohya", "modules", "utils", "PresetConfig", "AlgoOverride", "describe_algo", "list_algorithms",
    "PresetValidationError", "list_builtin_presets", "LoConModule", "LohaModule", "LokrModule", "DyLoraModule",
    "GLoRAModule", "NormModule", "FullModule", "DiagOFTModule", "TLoraModule", "set_timestep_mask",
    "get_timestep_mask", "clear_timestep_mask", "compute_timestep_mask", "make_module", "LycorisNetwork",
    "create_lycoris", "create_lycoris_from_weights", "logger",
]  # fmt: skip


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_top_level_name(name):
    assert hasattr(lycoris, name)


@pytest.mark.parametrize(
    "name", ["ButterflyOFTModule", "IA3Module", "LoConModule", "MODULE_LIST", "get_module", "make_module"]
)
def test_modules_name(name):
    assert hasattr(lycoris.modules, name)


@pytest.mark.parametrize(
    "path",
    ["locon", "loha", "lokr", "dylora", "glora", "norms", "full", "diag_oft", "boft", "ia3", "tlora", "base"],
)
def test_module_paths(path):
    __import__(f"lycoris.modules.{path}")


@pytest.mark.parametrize("path", ["locon", "loha", "lokr", "diag_oft", "boft", "general"])
def test_functional_paths(path):
    __import__(f"lycoris.functional.{path}")


def test_builtin_presets():
    assert set(lycoris.config.PRESET) == BUILTIN
    assert set(lycoris.config.BUILTIN_PRESET_CONFIGS) == BUILTIN
    listed = list_builtin_presets()
    assert set(listed) == BUILTIN
    for name, config in listed.items():
        assert isinstance(config, PresetConfig)
        assert config.to_dict() == lycoris.config.PRESET[name]
    listed.clear()
    assert set(list_builtin_presets()) == BUILTIN


CONV = {"full", "unet-only", "unet-convblock-only"}


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_preset_contents(name):
    preset = lycoris.config.PRESET[name]
    assert preset["enable_conv"] is (name in CONV)
    if name.startswith("unet"):
        assert preset["text_encoder_target_module"] == []
    if name in ("full", "full-lin", "attn-mlp"):
        assert {"CLIPAttention", "CLIPMLP"} <= set(preset["text_encoder_target_module"])
        assert "Transformer2DModel" in preset["unet_target_module"]
    if name == "full":
        assert {"ResnetBlock2D", "Downsample2D", "Upsample2D"} <= set(preset["unet_target_module"])
        assert "conv_in" in preset["unet_target_name"]
    if name == "ia3":
        assert preset["name_algo_map"]["ff.net.2"]["train_on_input"] is True
        assert preset["unet_target_name"] == ["to_k", "to_v", "ff.net.2"]


def test_class_lists():
    assert {"Transformer2DModel", "ResnetBlock2D"} <= set(lycoris.config.FULL_UNET_MODULES)
    assert {"CLIPAttention", "MT5Block"} <= set(lycoris.config.FULL_TEXT_ENCODER_MODULES)
    assert "time_embedding.linear_1" in lycoris.config.FULL_UNET_NAMES


def test_algorithms():
    specs = list(list_algorithms())
    assert not ALGORITHMS - {spec.name for spec in specs}
    assert set(lycoris.config_sdk.ALGO_REGISTRY) >= ALGORITHMS
    for spec in specs:
        assert isinstance(spec, lycoris.config_sdk.AlgoSpec)
        assert spec.description
        assert isinstance(spec.supported_args, tuple)


def test_describe_algo():
    spec = describe_algo("LoKr")
    assert spec.name == "lokr"
    assert spec.supports("factor")
    assert not spec.supports("sig_type")
    assert describe_algo("tlora").supports("sig_type")
    assert describe_algo("dylora").supports("block_size")
    with pytest.raises(PresetValidationError, match="lokrr"):
        describe_algo("lokrr")
    assert issubclass(PresetValidationError, ValueError)


def test_override_round_trip():
    override = AlgoOverride.from_mapping({"algo": "lokr", "factor": 4, "dim": 8})
    assert (override.algo, override.options) == ("lokr", {"factor": 4, "dim": 8})
    assert override.to_dict() == {"algo": "lokr", "factor": 4, "dim": 8}
    override.validate()
    assert AlgoOverride(options={"dim": 4}).to_dict() == {"dim": 4}
    AlgoOverride(options={"dim": 1}).validate()


def test_override_without_an_algorithm_knows_its_options():
    """An option that no algorithm has is a mistake wherever it stands (rule 44)."""
    refused(lambda: AlgoOverride(options={"anything": 1}).validate(), rule=44, match="anything")


@pytest.mark.parametrize("mapping", [{"algo": "lokrr"}, {"algo": "lokr", "sig_type": "last"}])
def test_override_validation(mapping):
    with pytest.raises(PresetValidationError):
        AlgoOverride.from_mapping(mapping).validate()


PRESET = {
    "enable_conv": True,
    "target_module": ["Linear"],
    "target_name": ["head"],
    "use_fnmatch": True,
    "lora_prefix": "x",
    "exclude_name": ["tail"],
    "module_algo_map": {"Linear": {"algo": "loha", "dim": 3}},
    "name_algo_map": {"head": {"algo": "lokr", "factor": 4}},
}


def test_preset_round_trip():
    config = PresetConfig.from_dict(PRESET)
    assert config.to_dict() == PRESET
    assert sorted(config.list_algorithms()) == ["loha", "lokr"]
    assert config.module_algo_map["Linear"].options == {"dim": 3}
    assert config.unet_target_module is None
    given = dict(PRESET)
    config.target_module.append("Conv2d")
    assert given["target_module"] == ["Linear"]


def test_preset_validation():
    with pytest.raises(PresetValidationError, match="target_modul"):
        PresetConfig.from_dict({"target_modul": ["Linear"]})
    bad = {"name_algo_map": {"head": {"algo": "lokr", "sig_type": "last"}}}
    PresetConfig.from_dict(bad)
    with pytest.raises(PresetValidationError, match="sig_type"):
        PresetConfig.from_dict(bad, strict=True)


def test_empty_preset():
    assert PresetConfig().to_dict() == {}
    assert PresetConfig(enable_conv=False).to_dict() == {"enable_conv": False}


def test_preset_values_are_copies():
    first = lycoris.config.BUILTIN_PRESET_CONFIGS["full"].to_dict()
    first["unet_target_module"].clear()
    assert lycoris.config.BUILTIN_PRESET_CONFIGS["full"].to_dict()["unet_target_module"]


def test_valid_preset_keys():
    assert set(lycoris.config_sdk.VALID_PRESET_KEYS) >= {
        "enable_conv", "target_module", "target_name", "module_algo_map", "name_algo_map", "lora_prefix", "use_fnmatch",
        "unet_target_module", "unet_target_name", "text_encoder_target_module", "text_encoder_target_name",
        "exclude_name",
    }  # fmt: skip


def test_logger():
    assert isinstance(lycoris.logging.logger, logging.Logger)
    assert lycoris.logger is lycoris.logging.logger
    for name in ("info_once", "warning_once"):
        getattr(lycoris.logging, name)("a line of the test suite")


def test_network_module_table():
    assert set(lycoris.wrapper.network_module_dict) >= ALGORITHMS
    assert lycoris.wrapper.network_module_dict["boft"] is lycoris.modules.ButterflyOFTModule
