"""``deltafuse explain``: the planner's report on the command line."""

from __future__ import annotations

import json

import pytest

from deltafuse.cli.app import run

FIELDS = {"layer", "algorithm", "form", "backend", "reason", "scale", "parameters", "saved_bytes"}


def rows_of(capsys):
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("algo", ["lokr", "lora", "boft"])
def test_json_rows(algo, capsys):
    assert run(["explain", "--algo", algo, "--demo", "--json"]) == 0
    rows = rows_of(capsys)
    assert len(rows) > 10
    for row in rows:
        assert set(row) >= FIELDS
        assert row["form"]
        assert row["reason"]


def test_scale_is_alpha_over_rank(capsys):
    assert run(["explain", "--algo", "lora", "--rank", "4", "--alpha", "1", "--json"]) == 0
    assert {row["scale"] for row in rows_of(capsys)} == {0.25}


def test_table_is_plain_when_piped(capsys):
    assert run(["explain"]) == 0
    printed = capsys.readouterr().out
    assert "lokr" in printed
    assert "reason" in printed
    assert "\x1b" not in printed


def test_adapter_file(tmp_path, capsys):
    import deltafuse
    from deltafuse.demo.base import load_base
    from deltafuse.demo.recipes import ADAPTED_BLOCKS

    model = load_base()
    preset = {"target_module": list(ADAPTED_BLOCKS)}
    network = deltafuse.create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2.0, algo="loha", preset=preset)
    network.apply_to()
    path = tmp_path / "adapter.safetensors"
    network.save_weights(str(path), None, {})
    assert run(["explain", "--adapter", str(path), "--json"]) == 0
    rows = rows_of(capsys)
    assert len(rows) == len(network.loras)
    assert {row["algorithm"] for row in rows} == {"loha"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algo", "lorra"], ["lorra", "lora"]),
        (["--option", "factr=4"], ["factr", "factor"]),
        (["--model", "no/such/place"], ["no/such/place"]),
        (["--adapter", "no/such.safetensors"], ["no/such.safetensors"]),
        (["--demo", "--model", "somewhere"], ["--demo", "--model"]),
    ],
)
def test_refusals(arguments, words, capsys):
    assert run(["explain", *arguments]) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


def save_denoiser(path):
    diffusers = pytest.importorskip("diffusers")
    diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).save_pretrained(path)


def save_language_model(path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


@pytest.mark.parametrize("save", [save_denoiser, save_language_model])
def test_model_directories(save, tmp_path, capsys):
    save(tmp_path)
    capsys.readouterr()
    assert run(["explain", "--algo", "loha", "--model", str(tmp_path), "--json"]) == 0
    rows = rows_of(capsys)
    assert rows
    assert {row["algorithm"] for row in rows} == {"loha"}
