"""The sd-scripts entry points (``network_module = lycoris.kohya``) on toy models with the class names of presets."""

from __future__ import annotations

import lycoris
import pytest
import torch
from lycoris import kohya
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from .support import randomise
from .target import differs, relative_error
from .toy_unet import models, te_input, unet_inputs

TRANSFORMER = {"proj_in", "to_k", "to_v", "to_out"}
UNET_LINEAR = {f"lora_unet_down_blocks_0_attn_{name}" for name in TRANSFORMER - {"proj_in"}}
UNET = (
    UNET_LINEAR
    | {"lora_unet_down_blocks_0_attn_proj_in", "lora_unet_down_blocks_0_res_conv1"}
    | {"lora_unet_down_blocks_0_res_time_emb_proj", "lora_unet_conv_in", "lora_unet_conv_out"}
    | {"lora_unet_time_embedding_linear_1", "lora_unet_time_embedding_linear_2"}
)
TE_LEAVES = {"self_attn_q_proj", "self_attn_k_proj", "mlp_fc1", "mlp_fc2"}


def te_names(prefix: str = "lora_te") -> set[str]:
    return {f"{prefix}_layers_0_{leaf}" for leaf in TE_LEAVES}


@pytest.fixture(autouse=True)
def _full_preset():
    """lycoris-lora's classes remember the last preset (rule 43)."""
    reset = {"module_algo_map": {}, "name_algo_map": {}, "use_fnmatch": False, "exclude_name": []}
    kohya.LycorisNetworkKohya.apply_preset({**lycoris.config.PRESET["full"], **reset})
    yield
    kohya.LycorisNetworkKohya.apply_preset({**lycoris.config.PRESET["full"], **reset})


def build(unet, te, seed: int = 5, strength: float = 1.0, **options):
    torch.manual_seed(seed)
    net = kohya.create_network(strength, 3, 2.0, None, te, unet, **options)
    for index, adapter in enumerate(net.loras):
        randomise(adapter, seed + index)
    return net.eval()


def by_name(net) -> dict[str, nn.Module]:
    return {adapter.lora_name: adapter for adapter in net.loras}


def test_names_and_prefixes():
    unet, te = models()
    net = build(unet, te)
    assert isinstance(net, kohya.LycorisNetworkKohya)
    assert {adapter.lora_name for adapter in net.unet_loras} == UNET
    assert {adapter.lora_name for adapter in net.text_encoder_loras} == te_names()
    assert len(net.loras) == len(net.unet_loras) + len(net.text_encoder_loras)


@pytest.mark.parametrize("count", [2, 3])
def test_several_text_encoders(count):
    unet, tes = models(count)
    net = build(unet, tes)
    expected = set().union(*(te_names(f"lora_te{index + 1}") for index in range(count)))
    assert {adapter.lora_name for adapter in net.text_encoder_loras} == expected


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "diag-oft", "full", "glora"])
def test_apply_and_restore(algo):
    unet, te = models()
    x, t = unet_inputs()
    base, text = unet(x, t), te(te_input())
    net = build(unet, te, algo=algo)
    net.apply_to(te, unet, True, True)
    assert relative_error(unet(x, t), base) > 1e-3
    assert relative_error(te(te_input()), text) > 1e-3
    assert {key.split(".")[0] for key in net.state_dict()} >= te_names()
    net.restore()
    assert torch.equal(unet(x, t), base)
    assert torch.equal(te(te_input()), text)


@pytest.mark.parametrize(("with_te", "with_unet"), [(True, False), (False, True)])
def test_apply_one_side(with_te, with_unet):
    unet, te = models()
    x, t = unet_inputs()
    base, text = unet(x, t), te(te_input())
    net = build(unet, te)
    net.apply_to(te, unet, with_te, with_unet)
    assert torch.equal(unet(x, t), base) is not with_unet
    assert torch.equal(te(te_input()), text) is not with_te
    assert {adapter.lora_name for adapter in net.loras} == (te_names() if with_te else UNET)
    assert {key.split(".")[0] for key in net.state_dict()} == (te_names() if with_te else UNET)


def test_options_reach_the_modules():
    unet, te = models()
    net = build(unet, te, conv_dim=5, conv_alpha=4.0, rs_lora=True, dora_wd=True, use_tucker="True", dropout=0.1)
    named = by_name(net)
    conv, linear = named["lora_unet_conv_in"], named["lora_unet_down_blocks_0_attn_to_k"]
    assert (conv.lora_dim, linear.lora_dim) == (5, 3)
    assert float(linear.scale) == pytest.approx(2 / 3**0.5)
    assert float(conv.scale) == pytest.approx(4 / 5**0.5)
    assert conv.tucker
    assert conv.wd
    assert linear.wd


def test_options_may_be_text():
    """sd-scripts passes network_args as text."""
    unet, te = models()
    net = build(
        unet, te, algo="lokr", factor="4", conv_dim="2", conv_alpha="3", full_matrix="False", rank_dropout="0.1"
    )
    assert {type(adapter) for adapter in net.loras} == {lycoris.LokrModule}
    conv = by_name(net)["lora_unet_conv_in"]
    assert conv.rank_dropout == pytest.approx(0.1)
    assert conv.lora_dim == 2


@pytest.mark.parametrize(
    ("preset", "names"),
    [
        ("full-lin", UNET_LINEAR | {"lora_unet_down_blocks_0_res_time_emb_proj", "lora_unet_time_embedding_linear_1"}
         | {"lora_unet_time_embedding_linear_2", "lora_unet_down_blocks_0_attn_proj_in"} | te_names()),
        ("attn-mlp", UNET_LINEAR | {"lora_unet_down_blocks_0_attn_proj_in"} | te_names()),
        ("attn-only", {name for name in te_names() if "attn" in name}),
        ("unet-only", UNET),
        ("unet-transformer-only", UNET_LINEAR | {"lora_unet_down_blocks_0_attn_proj_in"}),
        ("unet-convblock-only", {"lora_unet_down_blocks_0_res_conv1", "lora_unet_down_blocks_0_res_time_emb_proj"}
         | {"lora_unet_conv_in", "lora_unet_conv_out"}),
    ],
)  # fmt: skip
def test_presets(preset, names):
    unet, te = models()
    assert set(by_name(build(unet, te, preset=preset))) == names


def test_ia3_preset():
    """Names are matched from their start, so a preset of bare leaf names takes top-level modules."""
    unet = nn.ModuleDict({"to_k": nn.Linear(6, 9), "to_v": nn.Linear(6, 9), "other": nn.Linear(6, 9)})
    te = nn.ModuleDict({"k_proj": nn.Linear(6, 9), "mlp": nn.ModuleDict({"fc2": nn.Linear(6, 9)})})
    named = by_name(kohya.create_network(1.0, 3, 2.0, None, te, unet, algo="ia3", preset="ia3"))
    assert set(named) == {"lora_unet_to_k", "lora_unet_to_v", "lora_te_k_proj", "lora_te_mlp_fc2"}
    assert int(named["lora_te_mlp_fc2"].on_input) == 1
    assert int(named["lora_te_k_proj"].on_input) == 0


def test_preset_file_with_maps(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        'enable_conv = true\nunet_target_module = ["Transformer2DModel"]\nunet_target_name = ["conv_in"]\n'
        'text_encoder_target_module = ["CLIPMLP"]\nexclude_name = [".*to_v"]\n'
        '[module_algo_map.Transformer2DModel]\nalgo = "lokr"\nfactor = 4\n[name_algo_map.conv_in]\nalgo = "loha"\n'
    )
    unet, te = models()
    named = by_name(build(unet, te, preset=str(path)))
    prefix = "lora_unet_down_blocks_0_attn_"
    kept = {prefix + "proj_in", prefix + "to_k", prefix + "to_out"}
    assert set(named) == kept | {"lora_unet_conv_in", "lora_te_layers_0_mlp_fc1", "lora_te_layers_0_mlp_fc2"}
    assert {type(named[name]) for name in kept} == {lycoris.LokrModule}
    assert type(named["lora_unet_conv_in"]) is lycoris.LohaModule
    assert type(named["lora_te_layers_0_mlp_fc1"]) is lycoris.LoConModule


def test_train_norm():
    unet, te = models()
    named = by_name(build(unet, te, train_norm=True))
    assert isinstance(named["lora_unet_down_blocks_0_attn_norm"], lycoris.NormModule)


# ---------------------------------------------------------------------------------------------------------- optimizer
def numbers(groups) -> list[int]:
    return [sum(parameter.numel() for parameter in group["params"]) for group in groups]


def test_optimizer_groups():
    unet, te = models()
    net = build(unet, te)
    net.apply_to(te, unet, True, True)
    groups, descriptions = net.prepare_optimizer_params(1e-4, 2e-4, 3e-4)
    assert descriptions == ["textencoder", "unet"]
    assert [group["lr"] for group in groups] == [1e-4, 2e-4]
    counted = [
        sum(p.numel() for a in loras for p in a.parameters()) for loras in (net.text_encoder_loras, net.unet_loras)
    ]
    assert numbers(groups) == counted
    torch.optim.AdamW([{**group, "params": list(group["params"])} for group in groups])


def test_learning_rate_fills_in():
    unet, te = models()
    net = build(unet, te)
    net.apply_to(te, unet, True, True)
    groups, descriptions = net.prepare_optimizer_params(None, None, 5e-4)
    assert [group["lr"] for group in groups] == [5e-4, 5e-4]
    groups, descriptions = net.prepare_optimizer_params(0, 1e-4, 5e-4)
    assert descriptions == ["unet"]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({"loraplus_lr_ratio": 4}, {"textencoder plus": 4e-4, "unet plus": 8e-4}),
        ({"loraplus_unet_lr_ratio": 3}, {"unet plus": 6e-4}),
        ({"loraplus_text_encoder_lr_ratio": "2"}, {"textencoder plus": 2e-4}),
        ({"loraplus_lr_ratio": 4, "loraplus_unet_lr_ratio": 5}, {"textencoder plus": 4e-4, "unet plus": 10e-4}),
    ],
)
def test_lora_plus(ratios, expected):
    unet, te = models()
    net = build(unet, te, **ratios)
    net.apply_to(te, unet, True, True)
    groups, descriptions = net.prepare_optimizer_params(1e-4, 2e-4, None)
    seen = {name: group["lr"] for name, group in zip(descriptions, groups, strict=True)}
    for name, rate in expected.items():
        assert seen[name] == pytest.approx(rate)
    assert {name for name in seen if "plus" in name} == set(expected)
    assert seen["textencoder"] == 1e-4
    assert seen["unet"] == 2e-4
    ups = {id(p) for a in net.loras for n, p in a.named_parameters() if "lora_up" in n}
    for name, group in zip(descriptions, groups, strict=True):
        is_up = [id(parameter) in ups for parameter in group["params"]]
        assert all(is_up) if "plus" in name else not any(is_up) or name + " plus" not in seen


def test_set_loraplus_lr_ratio():
    unet, te = models()
    net = build(unet, te)
    net.set_loraplus_lr_ratio(2.0, None, 3.0)
    net.apply_to(te, unet, True, True)
    groups, descriptions = net.prepare_optimizer_params(1e-4, 1e-4, None)
    seen = {name: group["lr"] for name, group in zip(descriptions, groups, strict=True)}
    assert seen["unet plus"] == pytest.approx(2e-4)
    assert seen["textencoder plus"] == pytest.approx(3e-4)


# --------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "diag-oft"])
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_save_and_create_from_weights(algo, strength, tmp_path):
    unet, te = models()
    x, t = unet_inputs()
    net = build(unet, te, strength=strength, algo=algo)
    net.apply_to(te, unet, True, True)
    output, text = unet(x, t), te(te_input())
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, torch.float32, {"ss_note": "mine"})
    net.restore()
    again, tensors = kohya.create_network_from_weights(strength, path, None, te, unet, for_inference=True)
    assert set(tensors) == set(load_file(path))
    assert {adapter.lora_name for adapter in again.unet_loras} == UNET
    assert {adapter.lora_name for adapter in again.text_encoder_loras} == te_names()
    again.eval()
    again.apply_to(te, unet, True, True)
    torch.testing.assert_close(unet(x, t), output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(te(te_input()), text, atol=1e-5, rtol=1e-5)


def test_file_metadata(tmp_path):
    unet, te = models()
    net = build(unet, te)
    net.apply_to(te, unet, True, True)
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, torch.float16, {"ss_note": "mine"})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_note"] == "mine"
    assert metadata["sshs_model_hash"].startswith("0x")
    assert {value.dtype for value in load_file(path).values()} == {torch.float16}


def test_two_encoders_keep_their_own_tensors(tmp_path):
    """Prefixes that nest do not take each other's keys (rule 39)."""
    unet, tes = models(2)
    net = build(unet, tes)
    net.apply_to(tes, unet, True, True)
    outputs = [te(te_input()) for te in tes]
    assert relative_error(outputs[0], outputs[1]) > 1e-3
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, None, None)
    net.restore()
    again, _ = kohya.create_network_from_weights(1.0, path, None, tes, unet)
    again.eval()
    again.apply_to(tes, unet, True, True)
    for te, output in zip(tes, outputs, strict=True):
        torch.testing.assert_close(te(te_input()), output, atol=1e-5, rtol=1e-5)


def test_load_weights_before_and_after_apply(tmp_path):
    unet, te = models()
    x, t = unet_inputs()
    net = build(unet, te)
    net.apply_to(te, unet, True, True)
    output = unet(x, t)
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, None, None)
    net.restore()
    for early in (True, False):
        other = build(unet, te, seed=60)
        if early:
            other.load_weights(path)
        other.apply_to(te, unet, True, True)
        if not early:
            other.load_weights(path)
        torch.testing.assert_close(unet(x, t), output, atol=1e-5, rtol=1e-5)
        other.restore()


def test_merge_to():
    unet, te = models()
    x, t = unet_inputs()
    net = build(unet, te)
    net.apply_to(te, unet, True, True)
    output, text = unet(x, t), te(te_input())
    file = {key: value.detach().clone() for key, value in net.state_dict().items()}
    net.restore()
    merged = build(unet, te)
    merged.merge_to(te, unet, file, torch.float32, "cpu")
    torch.testing.assert_close(unet(x, t), output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(te(te_input()), text, atol=1e-5, rtol=1e-5)


def test_merge_takes_only_the_sides_in_the_file():
    unet, te = models()
    text, weight = te(te_input()), unet.conv_in.weight.clone()
    net = build(unet, te)
    net.merge_to(te, unet, {"lora_unet_conv_in.alpha": torch.tensor(1.0)}, None, None)
    assert torch.equal(te(te_input()), text)
    assert not torch.equal(unet.conv_in.weight, weight)


def test_training_glue():
    unet, te = models()
    net = build(unet, te)
    net.apply_to(te, unet, True, True)
    net.enable_gradient_checkpointing()
    net.prepare_grad_etc(te, unet)
    net.eval()
    net.on_epoch_start(te, unet)
    assert net.training
    net.on_step_start()
    assert len(list(net.get_trainable_params())) == 2 * len(net.loras)
    net.set_multiplier(0.5)
    assert {adapter.multiplier for adapter in net.loras} == {0.5}


def test_max_norm():
    unet, te = models()
    net = build(unet, te)
    count, mean, largest = net.apply_max_norm_regularization(0.3, torch.device("cpu"))

    def peer() -> None:
        assert int(count) > 0

    def ours() -> None:
        assert count > 0
        assert all(type(value) in (int, float) for value in (count, mean, largest))
        assert largest <= 0.3 * 1.0001

    differs(47, peer=peer, ours=ours)
