"""Which modules a network takes: class, exact name, regex, glob, exclusion, per-class and per-name overrides."""

from __future__ import annotations

import lycoris
import pytest
from lycoris import LycorisNetwork, create_lycoris
from lycoris.config import PRESET
from torch import nn

from .support import toy_model
from .target import differs, refused

DEFAULTS = {
    "enable_conv": True,
    "target_module": ["Linear", "Conv1d", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm"],
    "target_name": [],
    "exclude_name": [],
    "module_algo_map": {},
    "name_algo_map": {},
    "lora_prefix": "lycoris",
    "use_fnmatch": False,
}


@pytest.fixture(autouse=True)
def _restore_targets():
    LycorisNetwork.apply_preset(DEFAULTS)
    yield
    LycorisNetwork.apply_preset(DEFAULTS)


def select(preset: dict, **options) -> LycorisNetwork:
    """A network of the class-level targets, the way callers without create_lycoris build one."""
    LycorisNetwork.apply_preset({**DEFAULTS, **preset})
    settings = {"multiplier": 1.0, "lora_dim": 3, "conv_lora_dim": 5, "alpha": 2.0, "conv_alpha": 4.0} | options
    return LycorisNetwork(toy_model(), **settings)


def names(net: LycorisNetwork) -> set[str]:
    return {adapter.lora_name.removeprefix("lycoris_") for adapter in net.loras}


BLOCKS = {"blocks_0_to_q", "blocks_0_to_out", "blocks_1_to_q", "blocks_1_to_out"}


def test_by_layer_class():
    assert names(select({"target_module": ["Linear"]})) == BLOCKS | {"head"}
    assert names(select({"target_module": ["Conv2d"]})) == {"conv_in"}


def test_by_block_class_takes_every_child():
    assert names(select({"target_module": ["ToyBlock"]})) == BLOCKS


def test_by_exact_name():
    assert names(select({"target_module": [], "target_name": ["blocks.1.to_q"]})) == {"blocks_1_to_q"}
    assert names(select({"target_module": [], "target_name": ["head", "conv_in"]})) == {"head", "conv_in"}


def test_by_regex_from_the_start_of_the_name():
    assert names(select({"target_module": [], "target_name": [r"blocks\.\d+\.to_q"]})) == {
        "blocks_0_to_q",
        "blocks_1_to_q",
    }
    assert names(select({"target_module": [], "target_name": [r".*to_out$"]})) == {"blocks_0_to_out", "blocks_1_to_out"}
    refused(lambda: select({"target_module": [], "target_name": ["to_q"]}), rule=44)


def test_by_glob():
    preset = {"target_module": [], "target_name": ["blocks.*.to_q"], "use_fnmatch": True}
    assert names(select(preset)) == {"blocks_0_to_q", "blocks_1_to_q"}
    preset["target_name"] = ["*.0.*"]
    assert names(select(preset)) == {"blocks_0_to_q", "blocks_0_to_out"}


@pytest.mark.parametrize(
    ("exclude", "fnmatch", "gone"),
    [
        (["head"], False, {"head"}),
        ([r"blocks\.0.*"], False, {"blocks_0_to_q", "blocks_0_to_out"}),
        ([r".*to_q"], False, {"blocks_0_to_q", "blocks_1_to_q"}),
        (["*to_out", "head"], True, {"blocks_0_to_out", "blocks_1_to_out", "head"}),
    ],
)
@pytest.mark.parametrize("targets", [["Linear"], ["ToyBlock", "Linear"]])
def test_exclude_name(exclude, fnmatch, gone, targets):
    net = select({"target_module": targets, "exclude_name": exclude, "use_fnmatch": fnmatch})
    assert names(net) == (BLOCKS | {"head"}) - gone


def test_exclude_name_inside_a_block():
    net = select({"target_module": ["ToyBlock"], "exclude_name": [r"blocks\.1\.to_q"]})
    assert names(net) == BLOCKS - {"blocks_1_to_q"}


def test_no_conv():
    assert names(select({"enable_conv": False})) == BLOCKS | {"head"}


def test_conv_dims():
    net = select({})
    by_name = {adapter.lora_name: adapter for adapter in net.loras}
    assert (by_name["lycoris_conv_in"].lora_dim, by_name["lycoris_head"].lora_dim) == (5, 3)
    assert float(by_name["lycoris_conv_in"].scale) == pytest.approx(4 / 5)
    assert float(by_name["lycoris_head"].scale) == pytest.approx(2 / 3)


def test_pointwise_conv_uses_the_linear_dims():
    model = nn.Sequential(nn.Conv2d(5, 8, 1), nn.Conv2d(8, 7, (3, 1)))
    net = LycorisNetwork(model, lora_dim=3, conv_lora_dim=2, alpha=2.0, conv_alpha=3.0)
    assert [(adapter.lora_dim, float(adapter.scale)) for adapter in net.loras] == [
        (3, pytest.approx(2 / 3)),
        (2, pytest.approx(1.5)),
    ]
    LycorisNetwork.apply_preset({"enable_conv": False})
    assert len(LycorisNetwork(model, lora_dim=3, conv_lora_dim=2, alpha=2.0, conv_alpha=3.0).loras) == 1


def test_module_algo_map():
    net = select({
        "target_module": ["ToyBlock", "Linear"],
        "module_algo_map": {"ToyBlock": {"algo": "lokr", "factor": 3, "dim": 2, "alpha": 3.0}},
    })  # fmt: skip
    kinds = {adapter.lora_name.removeprefix("lycoris_"): type(adapter) for adapter in net.loras}
    assert {name for name, kind in kinds.items() if kind is lycoris.LokrModule} == BLOCKS
    assert kinds["head"] is lycoris.LoConModule
    lokr = next(adapter for adapter in net.loras if isinstance(adapter, lycoris.LokrModule))
    assert lokr.lora_dim == 2
    assert lokr.lokr_w1.shape[1] in (3, 6)
    assert float(lokr.scale) == pytest.approx(1.5)


def test_module_algo_map_of_a_layer_class():
    net = select({"target_module": ["Linear", "Conv2d"], "module_algo_map": {"Conv2d": {"algo": "loha", "dim": 4}}})
    kinds = {adapter.lora_name.removeprefix("lycoris_"): type(adapter) for adapter in net.loras}
    assert kinds.pop("conv_in") is lycoris.LohaModule
    assert set(kinds.values()) == {lycoris.LoConModule}


def test_name_algo_map():
    net = select({
        "target_module": ["Linear"],
        "name_algo_map": {r"blocks\.0\..*": {"algo": "loha", "dim": 2, "alpha": 5.0}},
    })  # fmt: skip
    by_name = {adapter.lora_name.removeprefix("lycoris_"): adapter for adapter in net.loras}
    assert set(by_name) == BLOCKS | {"head"}
    for name in ("blocks_0_to_q", "blocks_0_to_out"):
        assert type(by_name[name]) is lycoris.LohaModule
        assert by_name[name].lora_dim == 2
        assert float(by_name[name].scale) == pytest.approx(2.5)
    assert type(by_name["blocks_1_to_q"]) is lycoris.LoConModule


def test_name_algo_map_wins_over_module_algo_map():
    net = select({
        "target_module": [],
        "module_algo_map": {"Linear": {"algo": "lokr", "dim": 2}},
        "name_algo_map": {"head": {"algo": "loha", "dim": 2}},
    })  # fmt: skip
    kinds = {adapter.lora_name.removeprefix("lycoris_"): type(adapter) for adapter in net.loras}
    assert kinds["head"] is lycoris.LohaModule
    assert {kinds[name] for name in BLOCKS} == {lycoris.LokrModule}


def test_name_algo_map_by_glob():
    net = select({
        "target_module": [], "use_fnmatch": True, "name_algo_map": {"blocks.*.to_q": {"algo": "loha"}}
    })  # fmt: skip
    assert names(net) == {"blocks_0_to_q", "blocks_1_to_q"}
    assert {type(adapter) for adapter in net.loras} == {lycoris.LohaModule}


def test_options_of_an_override_reach_its_module_only():
    net = select({
        "target_module": ["Linear"],
        "name_algo_map": {"head": {"algo": "lora", "weight_decompose": True, "use_scalar": True}},
    })  # fmt: skip
    by_name = {adapter.lora_name.removeprefix("lycoris_"): adapter for adapter in net.loras}
    assert by_name["head"].wd
    assert isinstance(by_name["head"].scalar, nn.Parameter)
    assert not by_name["blocks_0_to_q"].wd


def test_lora_prefix():
    net = select({"lora_prefix": "adapter"})
    assert {adapter.lora_name.split("_")[0] for adapter in net.loras} == {"adapter"}


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "glora", "full", "dylora", "diag-oft", "ia3"])
def test_network_module_by_name(algo):
    net = select({"target_module": ["Linear"]}, network_module=algo, lora_dim=4)
    assert len(net.loras) == 5
    assert len({type(adapter) for adapter in net.loras}) == 1


def test_match_fn_and_helpers():
    net = select({"exclude_name": ["head"], "name_algo_map": {"conv_in": {"algo": "loha"}, r"blocks\.0": {"dim": 2}}})
    assert net.match_fn(r"blocks\.\d", "blocks.1.to_q")
    assert not net.match_fn("to_q", "blocks.1.to_q")
    assert net.is_excluded("head")
    assert not net.is_excluded("conv_in")
    assert net.find_conf_for_name("conv_in") == {"algo": "loha"}
    assert net.find_conf_for_name("blocks.0.to_q") == {"dim": 2}
    assert net.find_conf_for_name("head") is None


def test_unknown_preset_key():
    with pytest.raises(Exception, match="target_modul"):
        LycorisNetwork.apply_preset({"target_modul": ["Linear"]})


def test_toml_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'enable_conv = false\ntarget_module = ["Linear"]\nexclude_name = ["head"]\n\n'
        '[name_algo_map."blocks.0.to_q"]\nalgo = "lokr"\nfactor = 3\ndim = 2\n'
    )
    net = create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, preset=str(path))
    kinds = {adapter.lora_name.removeprefix("lycoris_"): type(adapter) for adapter in net.loras}
    assert set(kinds) == BLOCKS
    assert kinds["blocks_0_to_q"] is lycoris.LokrModule
    assert {kinds[name] for name in BLOCKS - {"blocks_0_to_q"}} == {lycoris.LoConModule}


def test_missing_preset_is_an_error():
    with pytest.raises(Exception):  # noqa: B017
        create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, preset="no-such-preset")
    refused(
        lambda: create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, preset="attn-onyl"),
        rule=44,
        match="attn-only",
    )


@pytest.mark.parametrize("preset", sorted(PRESET))
def test_builtin_presets_on_a_model_without_their_blocks(preset):
    """The wrapper's own targets stay where a preset only speaks of UNets and text encoders."""
    net = create_lycoris(toy_model(), 1.0, linear_dim=3, linear_alpha=2.0, preset=preset)
    conv = {"conv_in"} if PRESET[preset]["enable_conv"] else set()
    assert names(net) == BLOCKS | {"head"} | conv


def test_two_networks_hold_their_own_targets():
    """Class-level targets set for one network do not change what another, existing one says (rule 43)."""
    first = select({"target_module": ["Linear"], "exclude_name": ["head"]})
    select({"target_module": ["Conv2d"]})
    assert names(first) == BLOCKS

    def peer() -> None:
        assert not first.is_excluded("head")

    def ours() -> None:
        assert first.is_excluded("head")

    differs(43, peer=peer, ours=ours)


class LLMAdapterTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 9)


@pytest.mark.parametrize("train", [False, True])
def test_llm_adapter_blocks_are_opt_in(train):
    LycorisNetwork.apply_preset({**DEFAULTS, "target_module": ["LLMAdapterTransformerBlock", "Conv2d"]})
    model = nn.ModuleDict({"adapter": LLMAdapterTransformerBlock(), "conv": nn.Conv2d(3, 5, 1)})
    net = LycorisNetwork(model, lora_dim=3, alpha=2.0, train_llm_adapter=train)
    assert names(net) == ({"adapter_proj", "conv"} if train else {"conv"})


def test_names_are_unique_under_overlapping_targets():
    net = select({"target_module": ["ToyBlock", "Linear", "ToyModel"], "target_name": ["head", r"blocks\.0\.to_q"]})
    listed = [adapter.lora_name for adapter in net.loras]
    assert len(listed) == len(set(listed))


def test_subclass_is_named_by_its_own_class():
    class MyLinear(nn.Linear):
        pass

    model = nn.Sequential(MyLinear(6, 9), nn.Linear(9, 5))
    LycorisNetwork.apply_preset({**DEFAULTS, "target_module": ["MyLinear"]})
    net = LycorisNetwork(model, lora_dim=3, alpha=2.0)
    assert names(net) == {"0"}
