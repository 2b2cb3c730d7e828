"""Utilities: switches, hashes, names, extraction."""

from __future__ import annotations

import hashlib
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deltafuse import utils
from deltafuse.core.errors import CheckpointError, MergeError, OptionError, ShapeError
from deltafuse.logging import error_once, info_once, logger, warning_once

peer = pytest.importorskip("lycoris.utils")


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, "1", "true", "True", " YES ", "on", np.bool_(True), torch.tensor(True)]
)
def test_true(value):
    assert utils.str_bool(value) is True


@pytest.mark.parametrize("value", [None, False, 0, "0", "false", "FALSE", "no", "Off", np.bool_(False)])
def test_false(value):
    assert utils.str_bool(value) is False


@pytest.mark.parametrize("value", ["flase", "", "None", 2, -1, 0.5, [], [1], object(), torch.ones(2)])
def test_neither(value):
    with pytest.raises(OptionError, match="switch"):
        utils.str_bool(value)


def test_default_and_product():
    assert utils.default(None, 3) == 3
    assert utils.default(0, 3) == 0
    assert utils.product([2, 3, 4]) == 24
    assert utils.product([]) == 1


def test_hashes(tmp_path):
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(4).bfloat16(), "s": torch.tensor(2.0), "t": torch.randn(4, 6).T}
    dense = {key: value.contiguous() for key, value in tensors.items()}
    assert utils.precalculate_safetensors_hashes(tensors) == peer.precalculate_safetensors_hashes(dense)
    path = tmp_path / "x.safetensors"
    save_file(dense, path, {"any": "entry"})
    blob = path.read_bytes()
    data = blob[8 + int.from_bytes(blob[:8], "little") :]
    assert utils.safetensors_data_hash(tensors) == "0x" + hashlib.sha256(data).hexdigest()


DIFFUSERS_NAMES = [
    "conv_in",
    "conv_out",
    "time_embedding_linear_1",
    "time_embedding_linear_2",
    "down_blocks_0_downsamplers_0_conv",
    "up_blocks_1_upsamplers_0_conv",
    "mid_block_attentions_0_proj_in",
    "mid_block_resnets_1_conv2",
    "unknown_layer",
    *[
        f"{side}_blocks_{block}_{kind}_{layer}_{part}"
        for side in ("down", "up")
        for block in (0, 2)
        for layer in (0, 1)
        for kind, part in [
            ("attentions", "transformer_blocks_0_attn1_to_q"),
            ("resnets", "conv1"),
            ("resnets", "time_emb_proj"),
            ("resnets", "conv_shortcut"),
        ]
    ],
]


@pytest.mark.parametrize("name", DIFFUSERS_NAMES)
def test_names(name):
    key = f"lora_unet_{name}"
    assert utils.convert_diffusers_name_to_compvis(key) == peer.convert_diffusers_name_to_compvis(key)
    assert utils.convert_diffusers_name_to_compvis(f"lora_te_{name}") == f"lora_te_{name}"


def test_make_sparse():
    t = torch.randn(20, 31)
    kept = utils.make_sparse(t, 0.9)
    assert torch.equal(kept, peer.make_sparse(t, 0.9))
    assert torch.equal(utils.make_sparse(t.bfloat16(), 0.9) != 0, utils.make_sparse(t.bfloat16().float(), 0.9) != 0)
    with pytest.raises(OptionError):
        utils.make_sparse(t, 1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("out", "inp", "rank"), [(24, 17, 3), (40, 8, 8), (13, 50, 1)])
def test_extract_linear_finds_a_known_delta(out, inp, rank, dtype):
    delta = (torch.randn(out, rank) @ torch.randn(rank, inp)).to(dtype)
    (down, up, rest), kind = utils.extract_linear(delta, "fixed", rank)
    assert kind == "low rank"
    assert down.shape == (rank, inp)
    assert up.shape == (out, rank)
    wide = delta.double()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.linalg.norm(up.double() @ down.double() - wide) <= tolerance * torch.linalg.norm(wide)
    torch.testing.assert_close((up @ down + rest).double(), wide, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [(3,), (3, 3), (3, 5), (1, 1), (2, 3, 2)])
@pytest.mark.parametrize("rank", [2, 6])
def test_extract_conv_finds_a_known_delta(kernel, rank):
    delta = torch.einsum("or,rik->oik", torch.randn(32, rank), torch.randn(rank, 7, int(np.prod(kernel))))
    delta = delta.reshape(32, 7, *kernel)
    (down, up, rest), kind = utils.extract_conv(delta, "fixed", rank)
    assert kind == "low rank"
    assert down.shape == (rank, 7, *kernel)
    assert up.shape == (32, rank, *[1] * len(kernel))
    torch.testing.assert_close((up.flatten(1) @ down.flatten(1)).reshape(delta.shape), delta, rtol=1e-4, atol=1e-4)
    assert rest.abs().max() < 1e-3


@pytest.mark.parametrize(
    ("mode", "param"), [("fixed", 4), ("threshold", 3.0), ("ratio", 0.4), ("quantile", 0.3), ("percentile", 0.2)]
)
def test_extract_keeps_the_peers_rank(mode, param):
    torch.manual_seed(1)
    weight = torch.randn(64, 20)
    ours, theirs = utils.extract_linear(weight, mode, param), peer.extract_linear(weight, mode, param)
    assert ours[1] == theirs[1]
    if ours[1] == "low rank":
        torch.testing.assert_close(ours[0][1] @ ours[0][0], theirs[0][1] @ theirs[0][0], rtol=1e-4, atol=1e-4)


def test_extract_refuses():
    with pytest.raises(OptionError, match="fixed"):
        utils.extract_linear(torch.ones(4, 4), "fixd", 1)
    with pytest.raises(OptionError, match="between 0 and 1"):
        utils.extract_linear(torch.ones(4, 4), "ratio", 1.5)
    with pytest.raises(ShapeError):
        utils.extract_linear(torch.ones(4, 4, 3))
    assert utils.extract_linear(torch.ones(4, 4), "fixed", 2)[1] == "full"


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 40)
        self.conv = nn.Conv2d(12, 36, 3)
        self.norm = nn.LayerNorm(12)
        self.same = nn.Linear(5, 7)


def tuned(base, rank=3):
    """A copy of ``base`` with rank-``rank`` differences in fc and conv and a dense one in norm."""
    model = Toy()
    model.load_state_dict(base.state_dict())
    with torch.no_grad():
        model.fc.weight += torch.randn(40, rank) @ torch.randn(rank, 12) * 0.1
        model.conv.weight += torch.einsum(
            "op,pqkl,qi->oikl", torch.randn(36, rank), torch.randn(rank, rank, 3, 3), torch.randn(rank, 12)
        )
        model.norm.weight += 0.5
    return model


@pytest.mark.parametrize("small_conv", [True, False])
def test_extract_diff(small_conv):
    torch.manual_seed(0)
    base, te_base = Toy(), [Toy(), Toy()]
    target, te_target = tuned(base), [tuned(te) for te in te_base]
    found = utils.extract_diff(
        te_base, te_target, base, target, "fixed", 3, 3, small_conv=small_conv, use_bias=True, sparsity=0.5
    )
    names = {key.partition(".")[0] for key in found}
    assert names == {f"{p}_{n}" for p in ("lora_unet", "lora_te1", "lora_te2") for n in ("fc", "conv")}
    fc = found["lora_unet_fc.lora_up.weight"].float() @ found["lora_unet_fc.lora_down.weight"].float()
    torch.testing.assert_close(fc, target.fc.weight - base.fc.weight, rtol=2e-2, atol=2e-2)
    up, down = (found[f"lora_unet_conv.lora_{part}.weight"].float().flatten(1) for part in ("up", "down"))
    if small_conv:
        mid = found["lora_unet_conv.lora_mid.weight"].float()
        conv = torch.einsum("pqkl,op,qi->oikl", mid, up, down)
    else:
        conv = (up @ down).reshape(36, 12, 3, 3)
    torch.testing.assert_close(conv, (target.conv.weight - base.conv.weight).detach(), rtol=2e-2, atol=5e-2)
    assert float(found["lora_unet_conv.alpha"]) == 3
    # What the low rank leaves out is (nearly) nothing here, whatever it was compressed to.
    assert found["lora_unet_conv.bias_values"].float().abs().max() < 0.05
    assert all(t.is_contiguous() for t in found.values())


def test_extract_diff_full_and_odd_pairs():
    base = Toy()
    target = tuned(base)
    with torch.no_grad():
        target.same.bias += 1
    found = utils.extract_diff([], [], base, target, "full")
    assert set(found) == {
        *[f"lora_unet_{n}.{k}" for n in ("fc", "conv", "same") for k in ("diff", "diff_b")],
        "lora_unet_norm.w_norm",
        "lora_unet_norm.b_norm",
    }
    torch.testing.assert_close(found["lora_unet_norm.w_norm"].float(), torch.full((12,), 0.5))
    with pytest.raises(OptionError, match="pairs"):
        utils.extract_diff([base], [], base, target)
    target.fc = nn.Linear(12, 41)
    with pytest.raises(ShapeError, match="fc"):
        utils.extract_diff([], [], base, target)


def lora_file(names, rank=2, alpha=1.0):
    tensors = {}
    for name, (out, inp) in names.items():
        tensors[f"{name}.lora_up.weight"] = torch.randn(out, rank)
        tensors[f"{name}.lora_down.weight"] = torch.randn(rank, inp)
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def delta_of(tensors, name, rank=2, alpha=1.0):
    return tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"] * (alpha / rank)


@pytest.mark.parametrize("encoders", [1, 2])
def test_merge(encoders):
    unet, tes = Toy(), [Toy() for _ in range(encoders)]
    prefixes = ["lora_unet", *(["lora_te"] if encoders == 1 else ["lora_te1", "lora_te2"])]
    models = [unet, *tes]
    tensors = lora_file({f"{prefix}_fc": (40, 12) for prefix in prefixes} | {"lora_unet_absent": (3, 3)})
    kept = dict(tensors)
    before = [model.fc.weight.detach().clone() for model in models]
    report = utils.merge(tes, unet, tensors, 0.7)
    assert report == {"merged": 1 + encoders, "unused": ["lora_unet_absent"]}
    for prefix, model, weight in zip(prefixes, models, before, strict=True):
        expected = weight + 0.7 * delta_of(kept, f"{prefix}_fc")
        torch.testing.assert_close(model.fc.weight, expected, rtol=1e-6, atol=1e-6)
    assert tensors.keys() == kept.keys()
    assert all(tensors[key] is kept[key] for key in kept)


class Original(nn.Module):
    """Two layers under the names the original checkpoints use."""

    def __init__(self):
        super().__init__()
        self.out = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Conv2d(4, 6, 3)])
        self.time_embed = nn.ModuleList([nn.Linear(5, 8)])


def test_merge_reads_diffusers_names_onto_the_original_layout():
    model = Original()
    before = model.time_embed[0].weight.detach().clone()
    tensors = lora_file({"lora_unet_time_embedding_linear_1": (8, 5)})
    assert utils.merge([], model, tensors)["merged"] == 1
    expected = before + delta_of(tensors, "lora_unet_time_embedding_linear_1")
    torch.testing.assert_close(model.time_embed[0].weight, expected, rtol=1e-6, atol=1e-6)


def test_merge_refuses_before_it_writes():
    unet = Toy()
    before = {key: value.clone() for key, value in unet.state_dict().items()}
    good = lora_file({"lora_unet_fc": (40, 12)})
    bad = good | {"lora_unet_same.lora_up.weight": torch.tensor([[float("nan")]])}
    with pytest.raises(MergeError, match=r"lora_unet_same\.lora_up"):
        utils.merge([], unet, bad)
    overflows = good | {key.replace("_fc", "_same"): value * 1e25 for key, value in lora_file({"_fc": (7, 5)}).items()}
    overflows = {key if key.startswith("lora") else f"lora_unet{key}": value for key, value in overflows.items()}
    with pytest.raises(MergeError, match="lora_unet_same"):
        utils.merge([], unet, overflows)
    with pytest.raises(CheckpointError, match="lora_unet_other"):
        utils.merge([], unet, lora_file({"lora_unet_other": (40, 12)}))
    with pytest.raises(CheckpointError, match="no known algorithm"):
        utils.merge([], unet, good | {"lora_unet_same.mystery": torch.ones(2)})
    assert all(torch.equal(value, before[key]) for key, value in unet.state_dict().items())


def test_extracted_layers_merge_back():
    torch.manual_seed(0)
    base = Toy()
    target = tuned(base)
    for mode in ("fixed", "full"):
        model = Toy()
        model.load_state_dict(base.state_dict())
        utils.merge([], model, utils.extract_diff([], [], base, target, mode, 3, 3))
        for name in ("fc", "conv") if mode == "fixed" else ("fc", "conv", "norm"):
            got, wanted = getattr(model, name).weight, getattr(target, name).weight
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=5e-2)


def test_logging_says_once(caplog):
    with caplog.at_level(logging.INFO, logger="deltafuse"):
        for _ in range(3):
            info_once("surface: an info")
            warning_once("surface: a warning")
            error_once("surface: an error")
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING", "ERROR"]
    assert logger.name == "deltafuse"


@pytest.fixture
def unconfigured(monkeypatch):
    """Call it to give the root logger no handler, as in a fresh process; levels are put back afterwards."""
    level = logger.level
    yield lambda: monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (logging.NOTSET, ["[deltafuse] WARNING: careful"]),
        (logging.INFO, ["[deltafuse] INFO: hello", "[deltafuse] WARNING: careful"]),
        (logging.ERROR, []),
    ],
)
def test_warnings_go_to_stderr_by_default(unconfigured, capsys, level, expected):
    unconfigured()
    logger.setLevel(level)
    logger.info("hello")
    logger.warning("careful")
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == expected


def test_an_applications_own_handlers_take_over(unconfigured, capsys):
    unconfigured()
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append
    for owner in (logging.getLogger(), logger):
        owner.addHandler(handler)
        logger.warning("careful")
        owner.removeHandler(handler)
    assert [record.getMessage() for record in seen] == ["careful", "careful"]
    assert capsys.readouterr().err == ""
