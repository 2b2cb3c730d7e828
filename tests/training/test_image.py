"""Image training from the command line, on tiny denoisers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafuse
from deltafuse.core.errors import CheckpointError, DataError, OptionError
from deltafuse.integrations.diffusers import load_denoiser
from deltafuse.training.image import make_image_task, predict
from deltafuse.training.images import Images, find_images

from .toy import TEST_DEVICE

Cli = Callable[..., Any]


def flags(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    return [
        *("train", "--task", "image", "--model", model, "--data", data, "--out", out, "--device", TEST_DEVICE),
        *("--rank", 4, "--alpha", 2, "--batch-size", 6, "--eval-batches", 0, "--held-out", 0.25, *more),
    ]


@pytest.mark.parametrize(("kind", "algo"), [("unet", "lora"), ("unet", "lokr"), ("dit", "lokr"), ("dit", "loha")])
def test_training_lowers_held_out_loss_and_reloads(
    cli: Cli, request: pytest.FixtureRequest, image_data: Path, tmp_path: Path, kind: str, algo: str
) -> None:
    where = request.getfixturevalue(kind)
    out = tmp_path / "out"
    outcome = cli(*flags(where, image_data, out, "--algo", algo, "--steps", 30, "--lr", 0.01))
    assert outcome.code == 0, outcome.err
    records = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    before, after = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert after < before
    assert_reloads(where, out, image_data)


def test_tlora_ranks_follow_the_timestep(dit: Path, image_data: Path, tmp_path: Path, cli: Cli) -> None:
    from deltafuse.algorithms.tlora import clear_timestep_mask, get_timestep_mask

    try:
        outcome = cli(*flags(dit, image_data, tmp_path / "out", "--algo", "tlora", "--steps", 3))
        assert outcome.code == 0, outcome.err
        mask = get_timestep_mask()
        assert mask is not None
        assert mask.shape[1] == 4
        assert len({tuple(row) for row in mask.tolist()}) > 1
    finally:
        clear_timestep_mask()


def assert_reloads(where: Path, out: Path, data: Path) -> None:
    """The file on a fresh model acts, and as ``merge_to`` does."""
    model, _ = load_denoiser(str(where))
    model.eval()
    channels = model.config.in_channels
    noisy = torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    steps, labels = torch.tensor([3, 50]), torch.tensor([0, 1])
    with torch.no_grad():
        base = predict(model, noisy, steps, labels)
        network, _ = deltafuse.create_lycoris_from_weights(1.0, str(out / "adapter.safetensors"), model)
        network.apply_to()
        hooked = predict(model, noisy, steps, labels)
        network.restore()
        network.merge_to(1.0)
        merged = predict(model, noisy, steps, labels)
    assert (hooked - base).abs().max() > 1e-3
    torch.testing.assert_close(merged, hooked, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("model", ["unet", "dit"])
def test_checkpointing_changes_no_number(
    cli: Cli, request: pytest.FixtureRequest, image_data: Path, tmp_path: Path, model: str, kind: str
) -> None:
    more = ("--algo", "lora", "--steps", 3, "--lr", 0.01, "--held-out", 0)
    where = request.getfixturevalue(model)
    assert cli(*flags(where, image_data, tmp_path / "a", *more)).code == 0
    outcome = cli(*flags(where, image_data, tmp_path / "b", *more, "--gradient-checkpointing", kind))
    assert outcome.code == 0, outcome.err
    one, two = (torch.load(tmp_path / name / "state.pt", weights_only=True)["parameters"] for name in "ab")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)


def test_default_targets_are_the_blocks(cli: Cli, unet: Path, image_data: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    assert cli(*flags(unet, image_data, tmp_path / "out", "--algo", "lora", "--steps", 1, "--conv-rank", 2)).code == 0
    with safe_open(tmp_path / "out" / "adapter.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    names = {name.split(".")[0] for name in shapes}
    assert all("_blocks_" in name or "mid_block" in name for name in names)
    assert shapes["lycoris_down_blocks_0_resnets_0_conv1.lora_down.weight"] == [2, 8, 3, 3]
    assert shapes["lycoris_mid_block_attentions_0_to_q.lora_down.weight"] == [4, 16]


def test_pixels_and_labels(image_data: Path) -> None:
    files = find_images([str(image_data)])
    assert {item.label for item in files} == {0, 1}
    sample = Images(files, 3, 8)[0]
    assert sample["pixels"].shape == (3, 8, 8)
    assert -1 <= sample["pixels"].min() < sample["pixels"].max() <= 1
    assert Images(files, 1, 8)[0]["pixels"].shape == (1, 8, 8)


def test_class_folders_by_name_and_by_number(image_data: Path, tmp_path: Path) -> None:
    for names, expected in ((("cat", "ant"), {0, 1}), (("7", "3"), {3, 7})):
        root = tmp_path / names[0]
        for old, name in zip(("0", "1"), names, strict=True):
            (root / name).mkdir(parents=True)
            (root / name / "x.png").write_bytes((image_data / old / "0.png").read_bytes())
        assert {item.label for item in find_images([str(root)])} == expected


def test_flat_folder_trains_a_dit_without_class(dit: Path, unet: Path, image_data: Path) -> None:
    flat = str(image_data / "0")
    model, scheduler = load_denoiser(str(dit))
    task = make_image_task(model, scheduler, [flat])
    assert {item.label for item in task.data["train"].files} == {4}
    assert scheduler.config.num_train_timesteps == 100
    model, scheduler = load_denoiser(str(unet))
    with pytest.raises(DataError, match="class folder"):
        make_image_task(model, scheduler, [flat])


def test_data_refusals(unet: Path, dit: Path, image_data: Path, tmp_path: Path) -> None:
    model, scheduler = load_denoiser(str(unet))
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "x.png").write_bytes((image_data / "0" / "0.png").read_bytes())
    with pytest.raises(DataError, match="class 5"):
        make_image_task(model, scheduler, [str(tmp_path)])
    (tmp_path / "5" / "x.png").write_bytes(b"not a picture")
    (tmp_path / "5").rename(tmp_path / "1")
    with pytest.raises(DataError, match=r"x\.png"):
        make_image_task(model, scheduler, [str(tmp_path)])
    model, scheduler = load_denoiser(str(dit))
    with pytest.raises(OptionError, match="resolution"):
        make_image_task(model, scheduler, [str(image_data)], resolution=16)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_class_name": "UNet2DConditionModel"}, "UNet2DModel"),
        ({"_class_name": "DiTTransformer2DModel", "in_channels": 4}, "latents"),
        ({"_class_name": "UNet2DModel", "class_embed_type": "identity"}, "identity"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        load_denoiser(str(tmp_path))


def test_latent_pipelines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"vae": ["diffusers", "AutoencoderKL"]}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="latent-space"):
        load_denoiser(str(tmp_path))
