"""Presets and the config SDK: the same contents as the peer's, and errors that name the nearest legal name."""

from __future__ import annotations

import inspect

import pytest

from deltafuse import config, config_sdk
from deltafuse.algorithms.registry import algorithms, get_algorithm
from deltafuse.config_sdk import AlgoOverride, PresetConfig, PresetValidationError, describe_algo, list_algorithms
from deltafuse.core.errors import OptionError
from deltafuse.layers.options import COMMON
from deltafuse.utils.preset import read_preset

peer_config = pytest.importorskip("lycoris.config")
peer_sdk = pytest.importorskip("lycoris.config_sdk")


def test_preset_contents_are_the_peers():
    assert config.PRESET == peer_config.PRESET
    assert list(config.PRESET) == list(peer_config.PRESET)
    for name in ("FULL_UNET_MODULES", "FULL_UNET_NAMES", "FULL_TEXT_ENCODER_MODULES"):
        assert getattr(config, name) == getattr(peer_config, name)
    assert config_sdk.VALID_PRESET_KEYS == peer_sdk.VALID_PRESET_KEYS


def test_presets_share_no_state():
    assert not {id(v["unet_target_module"]) for v in config.PRESET.values()} & {id(config.FULL_UNET_MODULES)}
    copies = config.list_builtin_presets()
    copies["full"].unet_target_module.append("Mine")
    assert "Mine" not in config.BUILTIN_PRESET_CONFIGS["full"].unet_target_module
    assert "Mine" not in config.PRESET["full"]["unet_target_module"]


@pytest.mark.parametrize("name", sorted(peer_sdk.ALGO_REGISTRY))
def test_every_peer_option_is_listed(name):
    ours, theirs = describe_algo(name), peer_sdk.describe_algo(name)
    assert set(theirs.supported_args) <= set(ours.supported_args)
    assert ours.name == theirs.name
    assert ours.required_args == theirs.required_args


def test_algorithms_beyond_the_peers():
    ours = {spec.name for spec in list_algorithms()}
    assert ours - {spec.name for spec in peer_sdk.list_algorithms()} == {"oft"}


ALIASES = {"use_cp", "use_conv_cp", "disable_conv_cp", "dora_wd", "wd_on_output", "constrain"}


@pytest.mark.parametrize("name", sorted(config_sdk.ALGO_REGISTRY))
def test_the_listed_options_are_those_the_modules_act_on(name):
    module = get_algorithm(name).module_class
    acted_on = module.options | COMMON
    listed = set(describe_algo(name).supported_args) - ALIASES - {"dim", "alpha"}
    assert listed == acted_on


def test_every_registered_algorithm_is_described():
    chosen_by_name = {name: info for name, info in algorithms().items() if name != "norm"}  # norm: train_norm=True
    assert {get_algorithm(spec.name).name for spec in list_algorithms()} == set(chosen_by_name)
    for info in chosen_by_name.values():
        assert all(get_algorithm(describe_algo(alias).name) is info for alias in (info.name, *info.aliases))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (getattr(config_sdk, name), getattr(peer_sdk, name))
        for name in ("AlgoSpec", "AlgoOverride", "PresetConfig", "describe_algo", "list_algorithms")
    ]
    + [
        (PresetConfig.from_dict, peer_sdk.PresetConfig.from_dict),
        (AlgoOverride.validate, peer_sdk.AlgoOverride.validate),
    ],
)
def test_signatures(ours, theirs):
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


@pytest.mark.parametrize("name", sorted(config.PRESET))
def test_round_trip(name):
    assert PresetConfig.from_dict(config.PRESET[name], strict=True).to_dict() == config.PRESET[name]


def test_overrides_round_trip_and_list():
    data = {"module_algo_map": {"A": {"algo": "lokr", "factor": 4}}, "name_algo_map": {"b.*": {"algo": "loha"}}}
    preset = PresetConfig.from_dict(data, strict=True)
    assert preset.to_dict() == data
    assert list(preset.list_algorithms()) == ["lokr", "loha"]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: describe_algo("lorka"), "lokr"),
        (lambda: PresetConfig.from_dict({"target_modules": ["Linear"]}), "target_module"),
        (lambda: AlgoOverride("lokr", {"facto": 4}).validate(), "factor"),
        (lambda: AlgoOverride("lora", {"factor": 4}).validate(), "lora"),
        (lambda: AlgoOverride(None, {"train_on_inpt": True}).validate(), "train_on_input"),
        (lambda: PresetConfig.from_dict({"target_name": "Linear"}), "list of strings"),
        (lambda: PresetConfig.from_dict({"enable_conv": "flase"}), "enable_conv"),
        (lambda: PresetConfig.from_dict({"name_algo_map": {"a": "lokr"}}), "'a'"),
    ],
)
def test_errors_name_what_is_legal(call, word):
    with pytest.raises(PresetValidationError, match=word) as raised:
        call()
    assert isinstance(raised.value, OptionError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("spelling", ["LoKr", "DIAG_OFT", "diag-oft", "TLora"])
def test_names_in_any_case(spelling):
    assert describe_algo(spelling).name == spelling.lower().replace("_", "-")


def test_read_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('enable_conv = false\ntarget_name = ["a.*"]\n[name_algo_map."a.b"]\nalgo = "lokr"\nfactor = 8\n')
    assert read_preset(path) == {
        "enable_conv": False,
        "target_name": ["a.*"],
        "name_algo_map": {"a.b": {"algo": "lokr", "factor": 8}},
    }
    path.write_text("target_name = [")
    with pytest.raises(PresetValidationError, match=r"mine\.toml"):
        read_preset(str(path))
    path.write_text("target_nme = []")
    with pytest.raises(PresetValidationError, match="target_name"):
        read_preset(str(path))
    with pytest.raises(PresetValidationError, match="attn-mlp"):
        read_preset("attn-mpl")
