"""Flags, TOML and YAML say the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from deltafuse.core.errors import OptionError
from deltafuse.training.config import JobConfig, TrainConfig, job_from_flat, job_to_flat, option_fields
from deltafuse.training.files import read_config, to_toml
from deltafuse.training.job import load_job
from deltafuse.training.schedules import factor

SAMPLE = {
    "task": "image",
    "model": 'a "quoted" \\ path',
    "data": ["x", "y"],
    "out": "o",
    "lr": 0.0003,
    "steps": 7,
    "freeze_base": False,
    "override": ["a=algo:lora,rank:2"],
    "alpha": 3.0,
}


def test_flat_names_round_trip() -> None:
    job = job_from_flat(SAMPLE)
    assert job.train.lr == 0.0003
    assert job.adapter.alpha == 3.0
    assert job_from_flat(job_to_flat(job)) == job


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_file_equals_flags(tmp_path: Path, suffix: str) -> None:
    import yaml

    path = tmp_path / f"job{suffix}"
    path.write_text(to_toml(SAMPLE) if suffix == ".toml" else yaml.safe_dump(SAMPLE), encoding="utf-8")
    assert load_job({}, str(path), resume=False) == load_job(SAMPLE, None, resume=False)


def test_flag_wins_over_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("steps = 3\nseq-len = 99\n", encoding="utf-8")
    job = load_job({"steps": 5}, str(path), resume=False)
    assert (job.train.steps, job.seq_len) == (5, 99)


def test_yaml_exponent_without_dot_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("lr: 1e-4\nalpha: 1\n", encoding="utf-8")
    assert load_job({}, str(path), resume=False).train.lr == 1e-4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepz": 3}, ["stepz", "steps"]),
        ({"steps": 0}, ["steps", "at least 1"]),
        ({"steps": 2.5}, ["steps", "int"]),
        ({"steps": True}, ["steps", "int"]),
        ({"lr": 0.0}, ["lr", "above 0"]),
        ({"lr": "fast"}, ["lr", "float"]),
        ({"schedule": "cosin"}, ["schedule", "cosine"]),
        ({"mixed_precision": "bf61"}, ["mixed_precision", "bf16"]),
        ({"warmup": 3}, ["warmup", "constant_with_warmup"]),
        ({"warmup": 300, "schedule": "linear"}, ["warmup", "steps"]),
        ({"data": [1]}, ["data", "list of strings"]),
        ({"held_out": 1.0}, ["held_out"]),
        ({"rank": 0}, ["rank"]),
    ],
)
def test_bad_values_are_named(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        job_from_flat(values)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.toml", "steps = = 3"), ("a.yaml", "a: [1"), ("a.yaml", "- 1\n- 2\n"), ("a.ini", "x"), ("absent.toml", None)],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | None) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=name):
        read_config(path)


def test_every_option_has_a_flag_and_a_help_text() -> None:
    import inspect

    from deltafuse.cli.train import make_command

    flags = inspect.signature(make_command()).parameters
    for name, item in option_fields().items():
        assert name in flags
        assert item.metadata["help"]
    assert dataclasses.is_dataclass(JobConfig)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_schedules(name: str) -> None:
    warmup = 0 if name == "constant" else 4
    at = factor(name, 20, warmup)
    values = [at(step) for step in range(20)]
    assert all(0 < value <= 1 for value in values)
    assert max(values) == values[warmup] == 1.0
    assert values[:warmup] == sorted(values[:warmup])
    if name in ("linear", "cosine"):
        assert values[warmup:] == sorted(values[warmup:], reverse=True)
        assert at(20) == pytest.approx(0.0, abs=1e-9)


def test_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]
