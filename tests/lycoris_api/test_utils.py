"""utils: booleans, products, SVD extraction, name conversion, hashes, preset files, merging a file."""

from __future__ import annotations

import copy

import lycoris.utils as utils
import pytest
import torch
from lycoris.utils.preset import read_preset
from torch import nn

from .support import saved
from .target import ON_PEER, refused, relative_error


@pytest.mark.parametrize(
    ("value", "expected"),
    [("False", False), ("false", False), (False, False), ("True", True), ("true", True), (True, True), ("1", True)],
)
def test_str_bool(value, expected):
    assert utils.str_bool(value) is expected


def test_default_and_product():
    assert utils.default(None, 3) == 3
    assert utils.default(0, 3) == 0
    assert utils.product([2, 3, 0.5]) == 3
    assert utils.product([]) == 1


def test_make_sparse():
    tensor = torch.randn(40, 30)
    sparse = utils.make_sparse(tensor, 0.9)
    kept = sparse != 0
    assert abs(kept.float().mean() - 0.1) < 0.01
    assert torch.equal(sparse[kept], tensor[kept])
    assert tensor[~kept].abs().max() <= tensor[kept].abs().min()


def low_rank(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    flat = torch.randn(shape[0], rank) @ torch.randn(rank, int(torch.tensor(shape[1:]).prod()))
    return flat.reshape(shape)


@pytest.mark.parametrize(("mode", "param", "rank"), [("fixed", 3, 3), ("threshold", 1e-3, 4), ("ratio", 1e-4, 4)])
def test_extract_linear(mode, param, rank):
    weight = low_rank((24, 15), 4)
    (down, up, rest), kind = utils.extract_linear(weight, mode, param)
    assert kind == "low rank"
    assert (down.shape, up.shape) == ((rank, 15), (24, rank))
    torch.testing.assert_close(up @ down + rest, weight, atol=1e-4, rtol=1e-4)
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ vh[:rank]
    torch.testing.assert_close(up @ down, best, atol=1e-4, rtol=1e-4)


def test_extract_quantile():
    weight = torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.05]))
    (down, _, _), kind = utils.extract_linear(weight, "quantile", 0.8)
    assert kind == "low rank"
    assert down.shape[0] == 2


@pytest.mark.parametrize(("mode", "param", "rank"), [("fixed", 3, 3), ("threshold", 1e-3, 4)])
def test_extract_conv(mode, param, rank):
    weight = low_rank((24, 10, 3, 3), 4)
    (down, up, rest), kind = utils.extract_conv(weight, mode, param)
    assert kind == "low rank"
    assert (down.shape, up.shape) == ((rank, 10, 3, 3), (24, rank, 1, 1))
    torch.testing.assert_close(torch.einsum("or,rikl->oikl", up[..., 0, 0], down) + rest, weight, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("extract", [utils.extract_linear, utils.extract_conv])
def test_extract_full(extract):
    weight = torch.randn(6, 5) if extract is utils.extract_linear else torch.randn(6, 5, 3, 3)
    for mode, param in (("full", 0), ("fixed", 4)):
        result, kind = extract(weight, mode, param)
        assert kind == "full"
        assert torch.equal(result, weight)
    with pytest.raises(Exception, match=r"(?i)mode"):
        extract(weight, "median", 1)


NAMES = {
    "lora_unet_conv_in": "lora_unet_input_blocks_0_0",
    "lora_unet_conv_out": "lora_unet_out_2",
    "lora_unet_time_embedding_linear_1": "lora_unet_time_embed_0",
    "lora_unet_time_embedding_linear_2": "lora_unet_time_embed_2",
    "lora_unet_down_blocks_1_attentions_0_proj_in": "lora_unet_input_blocks_4_1_proj_in",
    "lora_unet_down_blocks_2_resnets_1_conv1": "lora_unet_input_blocks_8_0_in_layers_2",
    "lora_unet_down_blocks_0_downsamplers_0_conv": "lora_unet_input_blocks_3_0_op",
    "lora_unet_mid_block_attentions_0_proj_out": "lora_unet_middle_block_1_proj_out",
    "lora_unet_mid_block_resnets_1_conv2": "lora_unet_middle_block_2_out_layers_3",
    "lora_unet_up_blocks_2_attentions_1_proj_in": "lora_unet_output_blocks_7_1_proj_in",
    "lora_unet_up_blocks_1_resnets_2_conv_shortcut": "lora_unet_output_blocks_5_0_skip_connection",
    "lora_unet_up_blocks_1_upsamplers_0_conv": "lora_unet_output_blocks_5_2_conv",
    "lora_te_text_model_encoder": "lora_te_text_model_encoder",
}


@pytest.mark.parametrize(("diffusers", "compvis"), NAMES.items())
def test_compvis_names(diffusers, compvis):
    assert utils.convert_diffusers_name_to_compvis(diffusers) == compvis


def test_hash():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.float16)}
    first = utils.precalculate_safetensors_hashes(tensors)
    assert first.startswith("0x")
    assert len(first) == 66
    assert first == utils.precalculate_safetensors_hashes({key: value.clone() for key, value in tensors.items()})
    assert first != utils.precalculate_safetensors_hashes({**tensors, "b": torch.zeros(4, dtype=torch.float16)})


def test_hash_is_the_sha256_of_the_data():
    import hashlib

    tensor = torch.arange(6.0)
    expected = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert utils.precalculate_safetensors_hashes({"a": tensor}) == f"0x{expected}"


def test_read_preset(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text('enable_conv = true\ntarget_module = ["Linear"]\n[module_algo_map.Linear]\nalgo = "loha"\n')
    assert read_preset(str(path)) == {
        "enable_conv": True, "target_module": ["Linear"], "module_algo_map": {"Linear": {"algo": "loha"}}
    }  # fmt: skip


@pytest.mark.parametrize("text", ["enable_conv = = 1", "target_modul = []\n"])
def test_bad_preset_file(text, tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(text)
    if ON_PEER:
        assert read_preset(str(path)) is None
    refused(lambda: read_preset(str(path)), rule=44)


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(40, 25)
        self.conv = nn.Conv2d(10, 24, 3, padding=1)
        self.norm = nn.LayerNorm(25)


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(6)
    base = Unet()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.proj.weight.add_(low_rank((25, 40), 3) * 0.1)
        tuned.conv.weight.add_(low_rank((24, 10, 3, 3), 3) * 0.1)
        tuned.norm.weight.add_(0.3)
    return base, tuned


def test_extract_diff_then_merge():
    """What is extracted from two models turns the first into the second when merged."""
    base, tuned = models()
    tensors = utils.extract_diff([], [], base, tuned, "fixed", 3, 3, small_conv=False)
    assert tensors["lora_unet_proj.lora_down.weight"].shape == (3, 40)
    assert tensors["lora_unet_conv.lora_up.weight"].shape == (24, 3, 1, 1)
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    assert float(tensors["lora_unet_proj.alpha"]) == 3
    utils.merge([], base, dict(tensors), 1.0)
    for name in ("proj", "conv"):
        start = models()[0].get_submodule(name).weight
        wanted = tuned.get_submodule(name).weight - start
        assert relative_error(base.get_submodule(name).weight - start, wanted) < 5e-3


def test_extract_diff_full_mode():
    base, tuned = models()
    tensors = utils.extract_diff([], [], base, tuned, "full")
    assert {key.split(".")[1] for key in tensors if key.startswith("lora_unet_norm")} == {"w_norm", "b_norm"}
    assert relative_error(tensors["lora_unet_norm.w_norm"], torch.full((25,), 0.3)) < 1e-2
    assert relative_error(tensors["lora_unet_proj.diff"], tuned.proj.weight - base.proj.weight) < 1e-2


def test_merge_scale():
    from lycoris.modules import LoConModule

    base, _ = models()
    start = base.proj.weight.detach().clone()
    adapter = LoConModule("lora_unet_proj", base.proj, 1.0, 3, 2.0)
    torch.nn.init.normal_(adapter.lora_up.weight)
    expected = start + 0.3 * adapter.get_diff_weight(1.0)[0].detach()
    file = {f"lora_unet_proj.{key}": value for key, value in saved(adapter).items()}
    utils.merge([], base, file, 0.3)
    torch.testing.assert_close(base.proj.weight.detach(), expected, atol=1e-6, rtol=1e-5)
