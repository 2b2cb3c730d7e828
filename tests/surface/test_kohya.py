"""kohya networks on a toy UNet and text encoders: the flows of a trainer from creation to a saved file."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from deltafuse import explain, kohya
from deltafuse.core.errors import CheckpointError, MergeError, OptionError, TargetError
from deltafuse.kohya import LycorisNetworkKohya, create_network, create_network_from_weights
from deltafuse.network import LycorisNetwork

from .toys import TEXT_LAYERS, UNET_LAYERS, T5Attention, TextEncoder, UNet


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def batch():
    return torch.randn(2, 4, 6, 6), torch.randn(2, 16), torch.randint(0, 20, (2, 5))


def run(unet, tes, data):
    x, t, ids = data
    with torch.no_grad():
        return [unet(x, t), *[te(ids) for te in tes]]


def shake(network, size=0.2):
    """Random values in every parameter, so that no delta is zero."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * size)


def make(unet, tes, dim=4, alpha=2.0, **options):
    return create_network(1.0, dim, alpha, None, tes, unet, **options)


def names(prefix, layers):
    return {f"{prefix}_{name}" for name in layers}


def differ(left, right):
    return [not torch.allclose(a, b, atol=1e-6) for a, b in zip(left, right, strict=True)]


def close(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_signatures_are_the_peers():
    peer = pytest.importorskip("lycoris.kohya")
    for name in ("create_network", "create_network_from_weights"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (kohya, peer))
        assert list(ours) == list(theirs)
    ours, theirs = (
        inspect.signature(cls.__init__).parameters for cls in (LycorisNetworkKohya, peer.LycorisNetworkKohya)
    )
    positional = [name for name, item in theirs.items() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    for name in vars(peer.LycorisNetworkKohya):
        assert name.startswith("__") or hasattr(LycorisNetworkKohya, name), name


def test_layers_names_and_order_are_the_peers():
    peer = pytest.importorskip("lycoris.kohya")
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    unet, tes = UNet(), [TextEncoder(), TextEncoder()]
    for options in ({}, {"conv_dim": "2", "algo": "loha"}, {"preset": "attn-mlp"}, {"train_norm": "True"}):
        for encoders in (tes, tes[0], None):
            if options.get("preset") == "attn-mlp" and encoders is None:
                continue
            ours, theirs = (
                make(unet, encoders, **options),
                peer.create_network(1, 4, 2.0, None, encoders, unet, **options),
            )
            assert {item.lora_name for item in ours.unet_loras} == {item.lora_name for item in theirs.unet_loras}
            assert [x.lora_name for x in ours.text_encoder_loras] == [x.lora_name for x in theirs.text_encoder_loras]
            assert {type(x).__name__ for x in ours.loras} == {type(x).__name__ for x in theirs.loras}
    peer.LycorisNetworkKohya.apply_preset(peer.PRESET["full"])


@pytest.mark.parametrize(
    ("encoders", "prefixes"), [(None, []), ("one", ["lora_te"]), (1, ["lora_te1"]), (2, ["lora_te1", "lora_te2"])]
)
def test_prefixes(encoders, prefixes):
    tes = TextEncoder() if encoders == "one" else encoders and [TextEncoder() for _ in range(encoders)]
    network = make(UNet(), tes)
    expected = names("lora_unet", UNET_LAYERS).union(*(names(prefix, TEXT_LAYERS) for prefix in prefixes))
    assert {item.lora_name for item in network.loras} == expected
    assert len(list(network.parameters())) == 2 * len(expected)  # there before apply_to


def test_a_missing_encoder_keeps_its_number():
    network = make(UNet(), [None, TextEncoder()])
    assert {item.lora_name for item in network.text_encoder_loras} == names("lora_te2", TEXT_LAYERS)


def test_strings_as_a_trainer_passes_them():
    network = make(
        UNet(),
        TextEncoder(),
        dim=4,
        algo="LoKr",
        factor="2",
        conv_dim="2",
        conv_alpha="1",
        decompose_both="True",
        full_matrix="False",
        dora_wd="False",
        rs_lora="1",
        bypass_mode="None",
        dropout="0.1",
        rank_dropout="0",
        module_dropout=None,
        neuron_dropout=0.5,
        train_norm="false",
        disable_conv_cp="False",
    )
    assert network.loras[0].dropout == 0.1
    assert network.loras[0].rs_lora
    assert {type(item).__name__ for item in network.loras} == {"LokrModule"}
    assert make(UNet(), None, neuron_dropout=0.5).loras[0].dropout == 0.5
    assert make(UNet(), None, dim=None, alpha=None).loras[0].scale == 1.0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"algoo": "lokr"}, "algo"),
        ({"algo": "lokrr"}, "lokr"),
        ({"loraplus_unet_lr": 4}, "loraplus_unet_lr_ratio"),
        ({"train_norm": "flase"}, "flase"),
        ({"preset": "attn-mpl"}, "attn-mlp"),
        ({"factor": 4}, "factor"),
        ({"preset": {"unet_target_modul": []}}, "unet_target_module"),
    ],
)
def test_wrong_options(options, word):
    with pytest.raises(OptionError, match=word):
        make(UNet(), TextEncoder(), **options)


def test_nothing_matched_is_an_error():
    with pytest.raises(TargetError, match="Transformer2DModel"):
        make(UNet(), None, preset={"unet_target_module": ["Transformer2DModl"], "unet_target_name": []})


def test_presets_stay_with_their_network():
    unet = UNet()
    first = make(unet, None, preset="unet-convblock-only")
    assert {item.lora_name for item in first.loras} == names(
        "lora_unet", {"conv_in", "conv_out", "down_conv1", "down_conv_shortcut"}
    )
    assert first.UNET_TARGET_REPLACE_MODULE == ["ResnetBlock2D", "Downsample2D", "Upsample2D"]
    assert "Transformer2DModel" in LycorisNetworkKohya.UNET_TARGET_REPLACE_MODULE
    assert {item.lora_name for item in make(unet, None).loras} == names("lora_unet", UNET_LAYERS)
    try:
        LycorisNetworkKohya.apply_preset({"unet_target_module": ["Transformer2DModel"], "unet_target_name": []})
        narrow = LycorisNetworkKohya(None, unet)
        assert {item.lora_name for item in narrow.loras} == names("lora_unet", {"mid_to_q", "mid_to_out"})
    finally:
        LycorisNetworkKohya.reset_preset()
    assert {item.lora_name for item in LycorisNetworkKohya(None, unet).loras} == names("lora_unet", UNET_LAYERS)
    assert LycorisNetwork.TARGET_REPLACE_NAME == []


def test_presets_of_names_alone():
    network = make(UNet(), TextEncoder(), algo="ia3", preset={"unet_target_module": [], "unet_target_name": ["to_q"],
        "text_encoder_target_module": [], "text_encoder_target_name": ["v_proj", "mlp.fc2"],
        "name_algo_map": {"mlp.fc2": {"train_on_input": True}}})  # fmt: skip
    assert {item.lora_name for item in network.loras} == {
        "lora_unet_mid_to_q",
        "lora_te_self_attn_v_proj",
        "lora_te_mlp_fc2",
    }
    on_input = {item.lora_name: item.train_input for item in network.loras}
    assert on_input["lora_te_mlp_fc2"]
    assert not on_input["lora_unet_mid_to_q"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(6, 6) for _ in range(3))
        self.ff = nn.Module()
        self.ff.net = nn.ModuleList([nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)])


def test_the_built_in_ia3_preset_finds_its_layers():
    unet = nn.Module()
    unet.blocks = nn.ModuleList([Attention(), Attention()])
    network = make(unet, None, algo="ia3", preset="ia3")
    assert {item.lora_name: item.train_input for item in network.loras} == {
        f"lora_unet_blocks_{block}_{name}": name == "ff_net_2"
        for block in (0, 1)
        for name in ("to_k", "to_v", "ff_net_2")
    }


def test_overrides_exclusions_and_extra_targets():
    preset = {
        "exclude_name": [r"mid\.to_out"],
        "module_algo_map": {"ResnetBlock2D": {"algo": "loha", "dim": 3, "alpha": 1}},
        "name_algo_map": {"conv_in": {"algo": "lokr", "factor": 2}, "other": {"algo": "lokr"}},
    }
    network = make(UNet(), None, preset=preset)
    kinds = {item.lora_name: type(item).__name__ for item in network.loras}
    assert "lora_unet_mid_to_out" not in kinds
    assert "lora_unet_other" not in kinds  # an override is no target
    assert kinds["lora_unet_down_conv1"] == "LohaModule"
    assert kinds["lora_unet_conv_in"] == "LokrModule"
    assert kinds["lora_unet_mid_to_q"] == "LoConModule"


def test_t5_on_request():
    tes = [TextEncoder(), TextEncoder(attention=T5Attention)]
    assert "lora_te2_self_attn_q" not in {item.lora_name for item in make(UNet(), tes).loras}
    assert "lora_te2_self_attn_q" in {item.lora_name for item in make(UNet(), tes, train_t5xxl="True").loras}


def test_optimizer_groups():
    network = make(UNet(), [TextEncoder(), TextEncoder()], loraplus_lr_ratio="4", loraplus_unet_lr_ratio="8")
    groups, texts = network.prepare_optimizer_params(1e-4, 2e-4, 3e-4)
    assert texts == ["textencoder", "textencoder plus", "unet", "unet plus"]
    assert [group["lr"] for group in groups] == pytest.approx([1e-4, 4e-4, 2e-4, 16e-4])
    assert [len(group["params"]) for group in groups] == [8, 8, 7, 7]
    torch.optim.AdamW(groups)
    listed = [id(item) for group in groups for item in group["params"]]
    assert sorted(listed) == sorted(id(item) for item in network.parameters())
    groups, texts = network.prepare_optimizer_params_with_multiple_te_lrs([1e-4, 0], None, 3e-4)
    assert texts == ["textencoder 1", "textencoder 1 plus", "unet", "unet plus"]
    assert groups[2]["lr"] == 3e-4
    plain = make(UNet(), TextEncoder())
    assert plain.prepare_optimizer_params(None, None, 3e-4)[1] == ["textencoder", "unet"]
    assert plain.prepare_optimizer_params(0, 1e-4)[1] == ["unet"]
    assert plain.prepare_optimizer_params([1e-4], 1e-4)[1] == ["textencoder 1", "unet"]
    with pytest.raises(OptionError, match="2 text encoder"):
        make(UNet(), [TextEncoder() for _ in range(3)]).prepare_optimizer_params([1, 2], 1)


def test_optimizer_groups_are_the_peers():
    peer = pytest.importorskip("lycoris.kohya")
    logging.getLogger("LyCORIS").setLevel(logging.ERROR)
    unet, tes = UNet(), [TextEncoder(), TextEncoder()]
    for options in ({}, {"loraplus_lr_ratio": 4}, {"loraplus_text_encoder_lr_ratio": 2}):
        both = [make(unet, tes, **options), peer.create_network(1, 4, 2.0, None, tes, unet, **options)]
        for rates in ((1e-4, 2e-4, 3e-4), (None, 2e-4, 3e-4), (0, 1e-4, None), (None, None, 1e-4)):
            (ours, our_texts), (theirs, their_texts) = (network.prepare_optimizer_params(*rates) for network in both)
            assert our_texts == their_texts
            assert [g["lr"] for g in ours] == [g["lr"] for g in theirs]
            assert [len(g["params"]) for g in ours] == [len(g["params"]) for g in theirs]


def test_a_training_step_then_save_and_reload(tmp_path):
    unet, tes, data = UNet(), [TextEncoder(), TextEncoder()], batch()
    unet.requires_grad_(False)
    base = run(unet, tes, data)
    network = make(unet, tes, dropout=0.1)
    network.apply_to(tes, unet, True, True)
    network.apply_to(tes, unet, True, True)
    close(run(unet, tes, data), base)
    network.prepare_grad_etc(tes, unet)
    network.on_epoch_start(tes, unet)
    network.on_step_start(tes, unet)
    network.enable_gradient_checkpointing()
    groups, _ = network.prepare_optimizer_params(1e-2, 1e-2, None)
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        x, t, ids = data
        loss = unet(x, t).square().mean() + sum(te(ids).square().mean() for te in tes)
        loss.backward()
        assert all(torch.isfinite(item.grad).all() for item in network.get_trainable_params())
        optimizer.step()
        optimizer.zero_grad()
    network.eval()
    trained = run(unet, tes, data)
    assert all(differ(trained, base))

    path = tmp_path / "a.safetensors"
    network.save_weights(str(path), torch.float32, {"ss_output_name": "mine"})
    network.restore()
    close(run(unet, tes, data), base)
    again, tensors = create_network_from_weights(1.0, str(path), None, tes, unet)
    assert {item.lora_name for item in again.loras} == {item.lora_name for item in network.loras}
    assert set(tensors) == set(load_file(path))
    again.apply_to(tes, unet)
    again.eval()
    close(run(unet, tes, data), trained)
    again.set_multiplier(0)
    close(run(unet, tes, data), base)
    assert len(explain(again)) == len(again.loras)


def test_file_metadata_and_hash(tmp_path):
    unet, path = UNet(), tmp_path / "a.safetensors"
    network = make(unet, None, algo="lokr", factor=2)
    network.save_weights(path, torch.float16, {"ss_output_name": "mine", "ss_epoch": 3})
    blob = path.read_bytes()
    data = blob[8 + int.from_bytes(blob[:8], "little") :]
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    assert metadata["sshs_model_hash"] == "0x" + hashlib.sha256(data).hexdigest()
    assert metadata["ss_output_name"] == "mine"
    assert metadata["ss_epoch"] == "3"
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("4", "2.0")
    assert json.loads(metadata["ss_network_args"])["algo"] == "lokr"
    # A re-save keeps the user's entries and bundled embeddings, and never a stale hash.
    tensors = load_file(path) | {"bundle_emb.word.string_to_param": torch.ones(1, 3)}
    save_file(tensors, path, metadata | {"sshs_legacy_hash": "12345678"})
    loaded, _ = create_network_from_weights(1.0, path, None, None, unet)
    shake(loaded)
    loaded.save_weights(path, None, None)
    with safe_open(path, "pt") as handle:
        after = handle.metadata()
    assert after["ss_output_name"] == "mine"
    assert "sshs_legacy_hash" not in after
    assert after["sshs_model_hash"] != metadata["sshs_model_hash"]
    assert "bundle_emb.word.string_to_param" in load_file(path)


@pytest.mark.parametrize("parts", [(True, False), (False, True)])
def test_apply_to_one_model_only(parts, tmp_path):
    unet, te, data = UNet(), TextEncoder(), batch()
    base = run(unet, [te], data)
    network = make(unet, te)
    network.apply_to(te, unet, *parts)
    shake(network)
    network.eval()
    text, in_unet = parts
    assert differ(run(unet, [te], data), base) == [in_unet, text]
    kept = "lora_te_" if text else "lora_unet_"
    assert all(item.lora_name.startswith(kept) for item in network.loras)
    assert all(key.startswith(kept) for key in network.state_dict())
    assert len(network.prepare_optimizer_params(1e-4, 1e-4)[1]) == 1
    network.restore()
    close(run(unet, [te], data), base)


def test_load_weights_reports(tmp_path):
    unet, te, path = UNet(), TextEncoder(), tmp_path / "a.safetensors"
    network = make(unet, te)
    shake(network)
    network.save_weights(path, None, None)
    tensors = load_file(path)
    lost = {key: value for key, value in tensors.items() if not key.startswith("lora_te_mlp_fc1")}
    save_file(lost | {"lora_unet_strange.lora_up.weight": torch.ones(2, 2)}, path)
    other = make(unet, te)
    for _ in range(2):
        report = other.load_weights(path)
        assert set(report["loaded keys"]) == set(lost)
        assert {key.partition(".")[0] for key in report["missing keys"]} == {"lora_te_mlp_fc1"}
        assert report["unexpected keys"] == ["lora_unet_strange.lora_up.weight"]
        other.apply_to(te, unet)
    save_file({"diffusion_model.x.lora_A.weight": torch.ones(2, 2)}, path)
    with pytest.raises(CheckpointError, match="match no layer"):
        other.load_weights(path)


def test_from_weights_says_what_does_not_fit(tmp_path):
    unet, te, path = UNet(), TextEncoder(), tmp_path / "a.safetensors"
    network = make(unet, te)
    shake(network)
    network.save_weights(path, None, None)
    tensors = load_file(path)
    only_unet, _ = create_network_from_weights(1.0, path, None, None, unet)  # no encoder given: its layers are left out
    assert not only_unet.text_encoder_loras
    assert len(only_unet.unet_loras) == len(UNET_LAYERS)
    in_list, _ = create_network_from_weights(1.0, path, None, [te], unet)
    assert len(in_list.text_encoder_loras) == len(TEXT_LAYERS)
    stranger = tensors | {"lora_unet_mid_to_k.lora_up.weight": torch.ones(2, 2)}
    with pytest.raises(CheckpointError, match="lora_unet_mid_to_q"):
        create_network_from_weights(1.0, None, None, te, unet, stranger)
    create_network_from_weights(1.0, None, None, te, unet, stranger, strict=False)
    with pytest.raises(CheckpointError, match="match no layer"):
        create_network_from_weights(1.0, None, None, te, unet, {"base_model.model.q.lora_A.weight": torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match="no adapter"):
        create_network_from_weights(1.0, None, None, te, unet, {})
    with pytest.raises(CheckpointError, match="no known algorithm"):
        create_network_from_weights(1.0, None, None, te, unet, tensors | {"lora_unet_other.mystery": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"absent\.safetensors"):
        create_network_from_weights(1.0, tmp_path / "absent.safetensors", None, te, unet)


def test_from_weights_options_that_act():
    unet = UNet()
    network = make(unet, None)
    tensors = dict(network.state_dict())
    again, _ = create_network_from_weights(
        0.5, None, None, None, unet, tensors, dropout="0.2", loraplus_lr_ratio="4", algo="lora", conv_dim="8"
    )
    assert {item.dropout for item in again.loras} == {0.2}
    assert {item.multiplier for item in again.loras} == {0.5}
    assert again.loraplus_lr_ratio == 4
    with pytest.raises(OptionError, match="dropout"):
        create_network_from_weights(1, None, None, None, unet, tensors, droput=0.2)


@pytest.mark.parametrize("algo", ["lora", "loha", "lokr", "glora", "dylora", "full", "diag-oft", "oft", "ia3", "tlora"])
def test_merge_like_a_trainer(algo):
    unet, te, data = UNet(), TextEncoder(), batch()
    network = make(unet, te, algo=algo, train_norm=True)
    shake(network, 0.1)
    tensors = {key: value.clone() for key, value in network.state_dict().items()}
    hooked, _ = create_network_from_weights(0.6, None, None, te, unet, tensors)
    hooked.apply_to(te, unet)
    hooked.eval()
    wanted = run(unet, [te], data)
    hooked.restore()
    merged, _ = create_network_from_weights(0.6, None, None, te, unet, tensors, for_inference=True)
    assert merged.is_mergeable()
    merged.merge_to(te, unet, tensors, torch.float32, "cpu")
    close(run(unet, [te], data), wanted)


def test_merge_takes_the_given_tensors_and_models():
    unet, te, data = UNet(), TextEncoder(), batch()
    base = run(unet, [te], data)
    source = make(unet, te)
    shake(source)
    tensors = {key: value for key, value in source.state_dict().items() if key.startswith("lora_unet")}
    network = make(unet, te)
    network.merge_to(te, unet, tensors, None, None)
    assert differ(run(unet, [te], data), base) == [True, False]
    assert not network.text_encoder_loras
    bad = {key: torch.full_like(value, float("nan")) for key, value in tensors.items()}
    before = {key: value.clone() for key, value in unet.state_dict().items()}
    with pytest.raises(MergeError):
        make(unet, te).merge_to(te, unet, bad, None, None)
    assert all(torch.equal(value, before[key]) for key, value in unet.state_dict().items())


def test_pre_calculation_is_undone_bit_exactly():
    unet, te = UNet().bfloat16(), TextEncoder()
    before = {key: value.clone() for key, value in unet.state_dict().items()}
    network = make(unet, te)
    shake(network)
    network.set_multiplier(0.7)
    network.backup_weights()
    network.pre_calculation()
    assert not torch.equal(unet.mid.to_q.weight, before["mid.to_q.weight"])
    network.restore_weights()
    assert all(torch.equal(value, before[key]) for key, value in unet.state_dict().items())
    network.onfly_merge(0.3)
    network.onfly_restore()
    assert all(torch.equal(value, before[key]) for key, value in unet.state_dict().items())


def test_strength_as_the_only_argument():
    unet, data = UNet(), batch()
    network = make(unet, None)
    shake(network)
    network.apply_to(None, unet, False, True)
    network.set_multiplier(0.4)
    network.eval()
    wanted = run(unet, [], data)
    network.restore()
    network.merge_to(0.4)
    close(run(unet, [], data), wanted)


def test_max_norm():
    network = make(UNet(), TextEncoder())
    shake(network, 1.0)
    count, mean, largest = network.apply_max_norm_regularization(0.5, "cpu")
    assert count == len(network.loras)
    assert (type(count), type(mean), type(largest)) == (int, float, float)
    assert mean <= largest <= 0.5 + 1e-3
    for adapter in network.loras:
        assert adapter.get_diff_weight(1.0)[0].norm() <= 0.5 + 1e-3


def test_train_flags_of_adapter_models():
    """What a trainer looks for with hasattr is there, or cleanly absent."""
    network = make(UNet(), TextEncoder())
    for name in (
        *("apply_max_norm_regularization", "apply_to", "backup_weights", "enable_gradient_checkpointing"),
        *("get_trainable_params", "is_mergeable", "load_weights", "merge_to", "on_epoch_start", "on_step_start"),
        *("pre_calculation", "prepare_grad_etc", "prepare_optimizer_params", "restore_weights", "save_weights"),
        *("prepare_optimizer_params_with_multiple_te_lrs", "set_loraplus_lr_ratio", "set_multiplier"),
    ):
        assert callable(getattr(network, name))
    for name in ("prepare_network", "set_region", "set_current_generation", "update_norms", "update_grad_norms"):
        assert not hasattr(network, name)
