"""Tiny models, data and a command line to try them with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from .toy import TEST_DEVICE

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

SENTENCES = ["the cat sat on the mat. ", "a dog ran to the red door. ", "one and two are three. "]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run ``deltafuse`` in this process."""

    def call(*arguments: object) -> Outcome:
        from deltafuse.cli.app import run

        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-block causal language model with a byte tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    where = tmp_path_factory.mktemp("text-model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{letter: i for i, letter in enumerate(alphabet, 1)}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(where)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(where)
    return where


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small text files."""
    where = tmp_path_factory.mktemp("text-data")
    for index in range(6):
        (where / f"{index}.txt").write_text(SENTENCES[index % 3] * (20 + index), encoding="utf-8")
    return where


@pytest.fixture
def text_flags(text_model: Path, text_data: Path, tmp_path: Path) -> list[object]:
    """Flags of a short text run into ``tmp_path / 'out'``."""
    return [
        *("train", "--task", "text", "--model", text_model, "--data", text_data, "--out", tmp_path / "out"),
        *("--seq-len", 16, "--steps", 4, "--batch-size", 2, "--rank", 4, "--alpha", 2, "--device", TEST_DEVICE),
    ]


@pytest.fixture(scope="session")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-class pixel-space UNet with convolutions and attention."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
        num_class_embeds=2,
    )
    where = tmp_path_factory.mktemp("unet")
    model.save_pretrained(where)
    return where


@pytest.fixture(scope="session")
def dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pixel-space DiT with a scheduler, laid out as a pipeline."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=6,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=4,
    )
    with torch.no_grad():  # a fresh DiT ends in zeros; a trained one does not
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    where = tmp_path_factory.mktemp("dit")
    model.save_pretrained(where / "transformer")
    diffusers.DDPMScheduler(num_train_timesteps=100).save_pretrained(where / "scheduler")
    return where


@pytest.fixture(scope="session")
def image_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of twelve plain images: a bright top, a bright left half."""
    image = pytest.importorskip("PIL.Image")
    where = tmp_path_factory.mktemp("images")
    for label, box in enumerate([(0, 0, 10, 5), (0, 0, 5, 10)]):
        (where / str(label)).mkdir()
        for index in range(12):
            picture = image.new("RGB", (10, 10), (10 * index, 20, 20))
            picture.paste((200, 220, 240 - index), box)
            picture.save(where / str(label) / f"{index}.png")
    return where
