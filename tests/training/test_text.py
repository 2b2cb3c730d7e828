"""Text training from the command line, on a tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import deltafuse
from deltafuse.core.errors import DataError
from deltafuse.integrations.transformers import load_causal_lm
from deltafuse.training.files import read_config
from deltafuse.training.text import find_files, make_text_task, pack, read_documents, split_files, tokenise

Cli = Callable[..., Any]


def eval_losses(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["eval_loss"] for record in map(json.loads, lines) if "eval_loss" in record]


@pytest.mark.parametrize("algo", ["lora", "lokr", "loha", "ia3", "diag-oft"])
def test_training_lowers_held_out_loss(cli: Cli, text_flags: list[object], tmp_path: Path, algo: str) -> None:
    outcome = cli(*text_flags, "--algo", algo, "--steps", 25, "--lr", 0.02)
    assert outcome.code == 0, outcome.err
    before, after = eval_losses(tmp_path / "out")
    assert after < before - (0.01 if algo == "ia3" else 0.05)
    for word in ("adapter.safetensors", "metrics.jsonl", "loss.png", "config.toml", "next:", "trainable", "scale"):
        assert word in outcome.out


def test_reloaded_file_gives_the_same_output(
    cli: Cli, text_flags: list[object], text_model: Path, tmp_path: Path
) -> None:
    outcome = cli(*text_flags, "--algo", "lora", "--lr", 0.02, "--option", "dora_wd=true")
    assert outcome.code == 0, outcome.err
    job_loss = eval_losses(tmp_path / "out")[-1]
    model, tokenizer = load_causal_lm(str(text_model))
    network, _ = deltafuse.create_lycoris_from_weights(1.0, str(tmp_path / "out" / "adapter.safetensors"), model)
    network.apply_to()
    config = read_config(tmp_path / "out" / "config.toml")
    task = make_text_task(tokenizer, config["data"], seq_len=16, held_out=config["held_out"], seed=config["seed"])
    model.eval()
    with torch.no_grad():
        values = task.evaluate(model, list(task.batches("held_out", 2))[:32])
    assert values["loss"] == pytest.approx(job_loss, abs=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(job_loss), rel=1e-4)


def test_config_file_equals_flags(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    first = cli(*text_flags, "--algo", "lora")
    assert first.code == 0, first.err
    written = tmp_path / "out" / "config.toml"
    again = cli("train", "--config", written, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    one, two = (load_file(tmp_path / name / "adapter.safetensors") for name in ("out", "again"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    saved = [read_config(tmp_path / name / "config.toml") for name in ("out", "again")]
    assert {**saved[0], "out": ""} == {**saved[1], "out": ""}


def test_resume_equals_uninterrupted(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    flags = [*text_flags, "--algo", "lora", "--option", "dropout=0.2"]
    assert cli(*flags, "--steps", 6).code == 0
    half, whole = tmp_path / "half", tmp_path / "out"
    assert cli(*flags, "--steps", 3, "--out", half).code == 0
    outcome = cli("train", "--resume", "--out", half, "--steps", 6)
    assert outcome.code == 0, outcome.err
    one, two = (torch.load(where / "state.pt", weights_only=True)["parameters"] for where in (half, whole))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_default_targets_are_the_blocks(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    assert cli(*text_flags, "--algo", "lora").code == 0
    names = adapted(tmp_path / "out")
    assert len(names) == 14
    assert not [name for name in names if "lm_head" in name]


def test_targets_excludes_and_overrides(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    outcome = cli(
        *text_flags,
        *("--algo", "lora", "--target", "self_attn", "--exclude", "re:.*layers\\.1.*k_proj"),
        *("--override", "v_proj=algo:loha,rank:2,alpha:1", "--override", "gate_proj=rank:3"),
    )
    assert outcome.code == 0, outcome.err
    shapes = tensors(tmp_path / "out")
    names = adapted(tmp_path / "out")
    assert "lycoris_model_layers_0_self_attn_k_proj" in names
    assert "lycoris_model_layers_1_self_attn_k_proj" not in names
    assert "lycoris_model_layers_1_mlp_up_proj" not in names
    assert shapes["lycoris_model_layers_0_self_attn_q_proj.lora_down.weight"][0] == 4
    assert shapes["lycoris_model_layers_0_self_attn_v_proj.hada_w1_b"][0] == 2
    assert shapes["lycoris_model_layers_1_mlp_gate_proj.lora_down.weight"][0] == 3


def test_preset_file(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text('target_module = ["LlamaMLP"]\ntarget_name = []\n', encoding="utf-8")
    outcome = cli(*text_flags, "--algo", "lora", "--preset", preset, "--exclude", "layers.0.mlp.up_proj")
    assert outcome.code == 0, outcome.err
    names = adapted(tmp_path / "out")
    assert len(names) == 5
    assert all("mlp" in name for name in names)


def test_metadata_says_what_it_is(cli: Cli, text_flags: list[object], text_model: Path, tmp_path: Path) -> None:
    assert cli(*text_flags, "--algo", "lora").code == 0
    with safe_open(tmp_path / "out" / "adapter.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["ss_base_model"] == text_model.name
    assert metadata["ss_steps"] == "4"


def test_dry_run_writes_nothing(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    outcome = cli(*text_flags, "--dry-run")
    assert outcome.code == 0, outcome.err
    assert "trainable" in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_out_directory_rules(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    assert cli(*text_flags).code == 0
    (tmp_path / "out" / "notes").write_text("mine", encoding="utf-8")
    refused = cli(*text_flags)
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert cli(*text_flags, "--overwrite").code == 0
    assert (tmp_path / "out" / "notes").read_text(encoding="utf-8") == "mine"
    changed = cli("train", "--resume", "--out", tmp_path / "out", "--steps", 9, "--lr", 0.5)
    assert changed.code == 2
    assert "lr" in changed.err
    done = cli("train", "--resume", "--out", tmp_path / "out")
    assert done.code == 2
    assert "--steps" in done.err


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("algo", ["lora", "lokr"])
def test_checkpointing_changes_no_number(
    cli: Cli, text_flags: list[object], tmp_path: Path, kind: str, algo: str
) -> None:
    flags = [*text_flags, "--algo", algo, "--lr", 0.02, "--option", "dropout=0.3"]
    assert cli(*flags).code == 0
    outcome = cli(*flags, "--out", tmp_path / "saved", "--gradient-checkpointing", kind)
    assert outcome.code == 0, outcome.err
    one, two = (torch.load(tmp_path / name / "state.pt", weights_only=True)["parameters"] for name in ("out", "saved"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-5)


def test_more_data_arguments_and_held_out_files(
    cli: Cli, text_flags: list[object], text_data: Path, tmp_path: Path
) -> None:
    flags = [flag for flag in text_flags if flag != text_data]
    flags[flags.index("--data") :] = [
        "--data",
        text_data / "0.txt",
        text_data / "1.txt",
        *flags[flags.index("--data") + 1 :],
    ]
    outcome = cli(*flags, "--held-out-data", text_data / "2.txt")
    assert outcome.code == 0, outcome.err
    assert [Path(p).name for p in read_config(tmp_path / "out" / "config.toml")["data"]] == ["0.txt", "1.txt"]
    assert len(eval_losses(tmp_path / "out")) == 2


def adapted(out: Path) -> set[str]:
    return {name.split(".")[0] for name in tensors(out)}


def tensors(out: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(out / "adapter.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def test_files_are_found_by_path_directory_and_glob(text_data: Path) -> None:
    by_directory = find_files([str(text_data)])
    assert len(by_directory) == 6
    assert find_files([f"{text_data}/*.txt", str(text_data / "0.txt")]) == by_directory


def test_split_is_by_file_and_by_seed(text_data: Path) -> None:
    files = find_files([str(text_data)])
    train, held = split_files(files, 0.3, seed=1)
    assert sorted([*train, *held]) == files
    assert len(held) == 2
    assert split_files(files, 0.3, seed=1)[1] == held
    assert any(split_files(files, 0.3, seed=s)[1] != held for s in range(2, 6))
    assert split_files(files[:1], 0.3, seed=1) == (files[:1], [])


def test_jsonl_and_packing(tmp_path: Path, text_model: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n\n{"text": "de", "id": 4}\n', encoding="utf-8")
    assert read_documents(path) == ["abc", "de"]
    _, tokenizer = load_causal_lm(str(text_model))
    ids = tokenise(tokenizer, [path])
    assert tokenizer.decode(ids) == "abc<end>de<end>"
    assert pack(ids, 3, "training").shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"x\0y", "NUL"),
        ("a.txt", b"\xff\xfe\xfa", "UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{oops\n', "line 2"),
        ("a.jsonl", b'{"body": "a"}\n', "text"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_documents(tmp_path / name)
    assert name in str(caught.value)
