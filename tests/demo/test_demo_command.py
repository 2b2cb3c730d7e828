"""``deltafuse demo``: files, reload check, every algorithm, and failures before anything is written."""

from __future__ import annotations

import json
import signal
import sys

import pytest
import torch
from safetensors import safe_open

from deltafuse.algorithms.registry import algorithms
from deltafuse.cli.app import run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("accelerate")

FILES = ("adapter.safetensors", "metrics.jsonl", "loss.png", "samples.png")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """One thread, small batches and few sampling steps: these tests look at the command, not at the pictures."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("deltafuse.demo.run.BATCH_SIZE", 16)
    monkeypatch.setattr("deltafuse.demo.task.SAMPLE_STEPS", 2)
    yield
    torch.set_num_threads(before)


def numbers(out):
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def held_out(out):
    return [record["eval_loss"] for record in numbers(out) if "eval_loss" in record]


@pytest.mark.parametrize("algo", ["lokr", "lora", "boft"])
def test_writes_all_files_and_reloads(algo, tmp_path, capsys):
    out = tmp_path / "run"
    assert run(["demo", "--algo", algo, "--steps", "5", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in FILES:
        assert (out / name).stat().st_size > 0, name
        assert name in printed
    assert "the same outputs" in printed
    assert "Try next" in printed
    before, *_, after = held_out(out)
    assert after < before
    assert len([record for record in numbers(out) if "loss" in record]) == 5
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "samples.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("algo", sorted(algorithms()))
def test_every_algorithm_is_taken(algo, tmp_path):
    """Two steps of whatever the registry lists, algorithms added from outside included."""
    assert run(["demo", "--algo", algo, "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "samples.png").is_file()


def test_settings_reach_the_adapter(tmp_path):
    out = tmp_path / "run"
    arguments = ["--rank", "4", "--alpha", "1", "--strength", "0.5", "--digit", "3", "--seed", "5", "--lr", "1e-3"]
    assert run(["demo", "--algo", "lora", "--steps", "2", "--out", str(out), *arguments]) == 0
    with safe_open(out / "adapter.safetensors", framework="pt") as file:
        keys = list(file.keys())
        alphas = {float(file.get_tensor(key)) for key in keys if key.endswith(".alpha")}
        ranks = {file.get_tensor(key).shape[0] for key in keys if key.endswith("lora_down.weight")}
    assert alphas == {1.0}
    assert ranks == {4}


def test_same_seed_same_run(tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run(["demo", "--steps", "3", "--seed", seed, "--out", str(tmp_path / name)]) == 0
    assert held_out(tmp_path / "a") == held_out(tmp_path / "b")
    assert held_out(tmp_path / "a") != held_out(tmp_path / "c")


def test_base_is_not_trained(tmp_path):
    from deltafuse.demo.base import load_base
    from deltafuse.demo.run import Demo, DemoSettings
    from deltafuse.training.progress import Silent

    demo = Demo(DemoSettings(steps=3, out=tmp_path / "run"))
    demo.run(Silent())
    demo.network.restore()
    trained = demo.model.state_dict()
    for name, tensor in load_base().state_dict().items():
        assert torch.equal(trained[name], tensor), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algo", "lokrr"], ["lokrr", "lokr"]),
        (["--option", "factr=4"], ["factr", "factor"]),
        (["--option", "factor"], ["factor"]),
        (["--digit", "12"], ["digit"]),
        (["--steps", "0"], ["steps"]),
        (["--rank", "0"], ["rank"]),
        (["--lr", "0"], ["lr"]),
        (["--strength", "nan"], ["strength"]),
        (["--ranks", "4"], ["--ranks", "--rank"]),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else value,
)
def test_refusals_come_first(arguments, words, tmp_path, capsys):
    """Exit code 2, one message that names what is wrong, and nothing written."""
    assert run(["demo", "--out", str(tmp_path / "run"), "--steps", "2", *arguments]) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


def test_out_is_a_file(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("mine")
    assert run(["demo", "--steps", "2", "--out", str(path)]) == 2
    assert "file" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_missing_package_names_the_extra(package, tmp_path, monkeypatch, capsys):
    for name in [key for key in sys.modules if key.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert run(["demo", "--steps", "2", "--out", str(tmp_path / "run")]) == 2
    assert "deltafuse[demo]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_differs_fails(tmp_path, monkeypatch, capsys):
    """The reload check is a real one: a file that was changed after training ends the run with exit code 1."""
    from safetensors.torch import load_file, save_file

    from deltafuse.training import state

    original = state.save_adapter

    def spoiled(network, path, dtype, metadata):
        original(network, path, dtype, metadata)
        tensors = {key: tensor + 1e-2 if tensor.ndim > 1 else tensor for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata)

    monkeypatch.setattr("deltafuse.training.loop.save_adapter", spoiled)
    assert run(["demo", "--steps", "2", "--out", str(tmp_path / "run")]) == 1
    assert "NOT the same" in capsys.readouterr().err


def test_interruption_saves_and_says_so(tmp_path, monkeypatch, capsys):
    """The first SIGINT ends the run after the step; exit code 130, the adapter of that step is there."""
    from deltafuse.training.progress import Silent

    class Impatient(Silent):
        def step(self, step, loss, lr):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("deltafuse.training.progress.make_progress", Impatient)
    assert run(["demo", "--steps", "5", "--out", str(tmp_path / "run")]) == 130
    assert "after step 1" in capsys.readouterr().err
    assert (tmp_path / "run" / "adapter.safetensors").is_file()
