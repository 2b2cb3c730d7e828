"""What cannot work is said before the first step: one message, exit code 2, nothing written."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltafuse.core.errors import DependencyError

Cli = Callable[..., Any]


def assert_refused(outcome: Any, out: Path, *words: str) -> None:
    assert outcome.code == 2, outcome.out + outcome.err
    assert outcome.err.startswith("deltafuse: error: ")
    assert outcome.err.count("\n") == 1
    assert all(word in outcome.err for word in words), outcome.err
    assert "Traceback" not in outcome.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--target", "q_prj"], ["q_prj", "q_proj"]),
        (["--exclude", "*"], ["no layer"]),
        (["--target", "re:("], ["regular expression"]),
        (["--algo", "lokrr"], ["lokrr", "lokr"]),
        (["--option", "dora_wdd=true"], ["dora_wdd", "dora_wd"]),
        (["--option", "dora_wd"], ["dora_wd=true"]),
        (["--option", "linear_dim=3"], ["--rank"]),
        (["--override", "q_proj"], ["override", "algo:lora"]),
        (["--override", "q_proj=algo:lorra"], ["lorra"]),
        (["--override", "nothing=rank:3"], ["nothing"]),
        (["--preset", "fulll"], ["fulll", "full"]),
        (["--preset", "absent.toml"], ["absent.toml"]),
        (["--algo", "boft", "--rank", "5"], ["butterfly", "dimension"]),
        (["--seq-len", "65"], ["seq_len", "64"]),
        (["--data", "absent.txt"], ["absent.txt"]),
        (["--held-out-data", "absent.txt"], ["absent.txt"]),
        (["--model", "absent/model/dir"], ["absent/model/dir"]),
        (["--model", "absent.gguf"], ["absent.gguf"]),
        (["--optimizer", "adamm"], ["adamm", "adam"]),
        (["--optimizer", "rprop", "--weight-decay", "0.1"], ["weight_decay"]),
        (["--mixed-precision", "fp16", "--device", "cpu"], ["fp16"]),
        (["--steps", "0"], ["steps"]),
        (["--steps", "many"], ["--steps"]),
        (["--stepz", "3"], ["--stepz", "--steps"]),
        (["--task", "audio"], ["audio", "text"]),
        (["--config", "absent.toml"], ["absent.toml"]),
        (["--device", "tpu"], ["tpu", "cpu"]),
    ],
)
def test_refused_before_anything_is_written(
    cli: Cli, text_flags: list[object], tmp_path: Path, more: list[str], words: list[str]
) -> None:
    assert_refused(cli(*text_flags, *more), tmp_path / "out", *words)


def test_cuda_where_there_is_none(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert_refused(cli(*text_flags, "--device", "cuda"), tmp_path / "out", "cuda", "cpu")


@pytest.mark.parametrize(
    ("content", "word"), [(b"", "empty"), (b"\0\1\2", "binary"), (b"caf\xe9", "UTF-8"), (b"short", "tokens")]
)
def test_unusable_data(cli: Cli, text_flags: list[object], tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    text_flags[text_flags.index("--data") + 1] = path
    assert_refused(cli(*text_flags), tmp_path / "out", word)


def test_empty_directory(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    text_flags[text_flags.index("--data") + 1] = tmp_path / "data"
    assert_refused(cli(*text_flags), tmp_path / "out", "holds no")


def test_not_a_gguf_file(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\3\4 and more")
    assert_refused(cli(*text_flags, "--model", path), tmp_path / "out", "x.gguf", "GGUF")


def test_directory_without_a_model(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert_refused(cli(*text_flags, "--model", tmp_path / "model"), tmp_path / "out", "config.json")


def test_out_is_a_file(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert_refused(cli(*text_flags, "--out", tmp_path / "file"), tmp_path / "out", "is a file")


def test_resume_of_nothing(cli: Cli, text_flags: list[object], tmp_path: Path) -> None:
    assert_refused(cli("train", "--resume", "--out", tmp_path / "out"), tmp_path / "out", "config.toml")
    assert_refused(cli("train", "--resume"), tmp_path / "out", "--out")


@pytest.mark.parametrize("flag", ["--model", "--data", "--out"])
def test_required_flags(cli: Cli, text_flags: list[object], tmp_path: Path, flag: str) -> None:
    index = text_flags.index(flag)
    assert_refused(cli(*text_flags[:index], *text_flags[index + 2 :]), tmp_path / "out", flag)


def test_missing_extra_is_named(
    cli: Cli, text_flags: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = importlib.import_module("deltafuse.training.job")

    def absent(module: str, *, extra: str, purpose: str = "") -> None:
        raise DependencyError(f"the package '{module}' is not installed: pip install 'deltafuse[{extra}]'")

    monkeypatch.setattr(job, "require", absent)
    assert_refused(cli(*text_flags), tmp_path / "out", "accelerate", "deltafuse[train]")


def test_unknown_command(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("trian"), tmp_path / "out", "trian", "train")


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version").out.startswith("deltafuse ")
    assert "train" in cli("--help").out
    assert cli().code == 0


def test_help_is_quick_and_imports_no_big_package() -> None:
    code = (
        "import sys; from deltafuse.cli.app import run; run(['train', '--help']);"
        "print(sorted({'transformers', 'diffusers', 'accelerate', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    assert "--gradient-checkpointing" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_saves_and_exits_130(text_flags: list[object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "deltafuse", *map(str, text_flags), "--algo", "lora", "--steps", "1000000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_text(encoding="utf-8").count('"loss"') > 3:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    lines = [line for line in err.splitlines() if "interrupted" in line]
    assert len(lines) == 1
    assert "--resume" in lines[0]
    assert "Traceback" not in err
    assert (out / "adapter.safetensors").is_file()
