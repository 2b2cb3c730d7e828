"""``deltafuse bench`` and ``deltafuse tune``, small; a wrong arm is not timed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deltafuse
from deltafuse.backends.triton import interpreted, tuning
from deltafuse.benchmarking.measure import launches, peak_bytes, wall_and_host
from deltafuse.benchmarking.ops import Plan, bench
from deltafuse.cli.app import run
from deltafuse.core.timing import device_seconds
from deltafuse.primitives import shapes
from deltafuse.primitives.examples import Draw, examples, floor_of, leaves, outputs_of
from deltafuse.primitives.registry import get_primitive

from .test_verify import Other

CPU = torch.device("cpu")
NAME = "lowrank_linear"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def other() -> Iterator[Other]:
    backend = Other()
    deltafuse.register_backend(backend)
    yield backend
    deltafuse.unregister_backend("other")


def small(*arms: str) -> Plan:
    return Plan(CPU, [torch.float32], shapes.TINY, [NAME], arms, rounds=2, calls=2, first_example_only=True)


def test_the_command_writes_every_sample(other: Other, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "ops.json"
    arguments = ["--device", "cpu", "--small", "--first", "--primitive", NAME, "--arm", "eager", "--arm", "other"]
    assert run(["bench", "ops", *arguments, "--out", str(file), "--commit", "abc"]) == 0
    assert "lowrank_linear" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["provenance"]["commit"] == "abc"
    assert record["provenance"]["copy_rate"] > 0
    (row,) = record["rows"]
    assert row["floor_us"] > 0
    for arm in ("eager", "other"):
        assert all(len(row["arms"][arm][key]) == 2 for key in ("device_us", "wall_us", "host_us"))
        assert row["arms"][arm]["error"] < 1e-5


@pytest.mark.parametrize("change", [lambda y: y * 1.01, lambda y: y.detach() + 0 * y, lambda y: y * float("inf")])
def test_a_wrong_arm_is_not_timed(other: Other, change: Any) -> None:
    other.change = change
    (row,) = list(bench(small("eager", "other")))
    assert row.arms["eager"].wall_us
    assert not row.arms["other"].wall_us
    assert "WrongResult" in row.arms["other"].note


def test_a_wrong_arm_is_the_exit_code(other: Other) -> None:
    other.change = lambda y: y * 1.01
    arguments = ["--device", "cpu", "--small", "--first", "--primitive", NAME, "--arm", "eager", "--arm", "other"]
    assert run(["bench", "ops", *arguments]) == 1


def test_unknown_arms_are_named(capsys: Any) -> None:
    assert run(["bench", "ops", "--device", "cpu", "--arm", "eagre"]) == 2
    assert "Did you mean 'eager'" in capsys.readouterr().err
    assert run(["bench", "opz"]) == 2
    assert "unknown command 'opz' of 'deltafuse bench'. Did you mean 'ops'" in capsys.readouterr().err


def test_the_floor_counts_every_tensor_where_none_is_registered() -> None:
    case = next(iter(examples(NAME)))
    sizes = shapes.TINY[0]
    args = case.build(sizes, Draw(torch.float32, CPU))
    outputs = outputs_of(get_primitive(NAME).reference(*args))
    moved, flops = floor_of(NAME, sizes, 4, args, outputs)
    assert flops >= 4 * sizes.rows * sizes.inner * sizes.out
    assert moved >= 4 * (sizes.rows * (sizes.inner + sizes.out))
    plain, none = floor_of("no such primitive", sizes, 4, args, outputs)
    total = sum(item.numel() * 4 for item in args if isinstance(item, torch.Tensor))
    wanted = sum(item.numel() * 4 for item in leaves(args))
    assert (plain, none) == (2 * total + 2 * outputs[0].numel() * 4 + wanted, 0.0)


def test_measures_on_a_cpu() -> None:
    calls: list[int] = []
    one, two = device_seconds([lambda: calls.append(1), lambda: calls.append(2)], 5, CPU)
    assert len(one) == len(two) == 5
    assert sorted(calls) == [1] * 5 + [2] * 5
    wall, host = wall_and_host(lambda: None, 3, CPU)
    assert 0 <= host <= wall
    assert peak_bytes(lambda: None, CPU) is None
    assert launches(lambda: None, CPU) == (None, None)


@pytest.mark.skipif(not interpreted(), reason="asks for Triton's interpreter")
def test_tune_writes_a_table_and_does_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("triton")

    def clock(calls: Any, rounds: int, device: torch.device) -> list[list[float]]:
        return [[1e-3 / (1 + index)] * rounds for index in range(len(calls))]

    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "measure", clock)
    table = tmp_path / "table.json"
    arguments = ["tune", "--device", "cpu", "--primitive", NAME, "--shape", "20x32x48r4"]
    assert run([*arguments, "--out", str(table)]) == 0
    out = capsys.readouterr().out
    assert "lowrank_down" in out
    assert "0 tuned" not in out
    held = json.loads(table.read_text())
    assert held["card"] == "cpu"
    assert held["entries"] == json.loads((tmp_path / "tune" / "cpu.json").read_text())["entries"]
    assert run(arguments) == 0
    assert "0 tuned" in capsys.readouterr().out
    assert run(["tune", "--device", "cpu", "--primitive", "no_such"]) == 2
    assert "unknown operation 'no_such'" in capsys.readouterr().err


def test_steps_run_small(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "steps.json"
    arguments = ["--device", "cpu", "--small", "--only", "ia3", "--steps", "1", "--rounds", "1", "--out", str(file)]
    assert run(["bench", "steps", *arguments]) == 0
    record = json.loads(file.read_text())
    names = [arm["name"] for arm in record["arms"]]
    assert names[:2] == ["frozen", "ia3 | deltafuse"]
    assert all(arm["samples"] for arm in record["arms"] if "lycoris" not in arm["name"])
    assert run(["bench", "steps", "--small", "--only", "loar"]) == 2
    assert "Did you mean 'lora'" in capsys.readouterr().err


def _report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_takes_an_ops_table(tmp_path: Path, other: Other) -> None:
    other.change = lambda y: y * 1.01
    list(bench(small("eager", "other"), tmp_path / "ops.json", commit="abc"))
    text = _report().ops_table([json.loads((tmp_path / "ops.json").read_text())])
    assert "lowrank_linear" in text
    assert "wrong" in text
    page = "a\n<!-- ops: begin -->\nold\n<!-- ops: end -->\nb\n"
    assert _report().between(page, "ops", text) == f"a\n<!-- ops: begin -->\n{text}\n<!-- ops: end -->\nb\n"
