"""``deltafuse verify``: right kernels pass, wrong ones fail with a reason, and what cannot run says so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafuse
from deltafuse.backends.registry import Backend
from deltafuse.cli.app import run
from deltafuse.core.problem import Problem
from deltafuse.core.verdict import Verdict
from deltafuse.primitives import get_primitive, shapes
from deltafuse.verification import Plan, verify
from deltafuse.verification.ulp import ulp_errors

NAME = "lowrank_linear"


class Other(Backend):
    """The references, with ``change`` applied to each result."""

    name = "other"
    order = 200
    summary = "a backend of this test"

    def __init__(self) -> None:
        self.change: Callable[[torch.Tensor], Any] = lambda y: y
        self.runs = True

    def available(self, device: torch.device | None = None) -> Verdict:
        return Verdict(True, "always")

    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        return Verdict(self.runs, "this test")

    def implementation(self, primitive: str) -> Callable[..., Any]:
        return lambda *args: self.change(get_primitive(primitive).reference(*args))


@pytest.fixture
def other() -> Iterator[Other]:
    backend = Other()
    deltafuse.register_backend(backend)
    yield backend
    deltafuse.unregister_backend("other")


ARGUMENTS = ["verify", "--backend", "other", "--primitive", NAME, "--device", "cpu", "--quick", "--dtype", "fp32"]


def test_a_right_backend_passes(other: Other, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "verify.json"
    assert run([*ARGUMENTS, "--json", str(file), "--all"]) == 0
    assert "0 failed" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["provenance"]["torch"] == torch.__version__
    rows = [row for row in record["results"] if row["backend"] == "other"]
    assert rows
    assert all(row["status"] == "pass" and row["ratio"] <= 1 and row["ulp_median"] < 8 for row in rows)


def _no_gradient(y: torch.Tensor) -> torch.Tensor:
    return y.detach() + 0 * y


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda y: y * (1 + 1e-5), "output 0"),
        (_no_gradient, "gradient"),
        (lambda y: y * float("nan"), "output 0"),
        (lambda y: y.half(), "shapes or dtypes"),
        (lambda y: y.reshape(-1), "shapes or dtypes"),
    ],
)
def test_a_wrong_backend_fails(other: Other, change: Callable[[Any], Any], reason: str, capsys: Any) -> None:
    other.change = change
    assert run(ARGUMENTS) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert reason in out


def test_an_exception_is_a_failure_and_the_rest_goes_on(other: Other, capsys: Any) -> None:
    def fail(y: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    other.change = fail
    assert run(ARGUMENTS) == 1
    assert "raises ValueError: no" in capsys.readouterr().out


def test_a_refusal_is_no_failure(other: Other, capsys: Any) -> None:
    other.runs = False
    assert run(ARGUMENTS) == 0
    assert "not run: this test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--full"], "--quick and --full"),
        (["--primitive", "lowrank_liner"], "Did you mean 'lowrank_linear'"),
        (["--backend", "othr", "--device", "cpu"], "unknown backend 'othr'"),
        (["--dtype", "flot32"], "Did you mean 'float32'"),
        (["--device", "cuda:99"], "is not there"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--shape", "3x4"], "rows x out x in"),
        (["--shape", "3x4x0"], "rows x out x in"),
        (["--full", "--device", "cpu"], "--full is for GPUs"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], message: str, capsys: Any) -> None:
    assert run(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_is_complete(capsys: Any) -> None:
    for command in (["verify"], ["tune"], ["bench"], ["bench", "ops"], ["bench", "steps"]):
        assert run([*command, "--help"]) == 0
    assert run(["bench"]) == 0
    out = capsys.readouterr().out
    for option in ("--backend", "--full", "--json", "--again", "--out", "--small", "--rounds", "--compiled"):
        assert option in out


def test_every_backend_that_can_run_here_is_checked() -> None:
    plan = Plan(torch.device("cpu"), [torch.float32], shapes.SMALL[:1], [NAME])
    results = [result for group in verify(plan) for result in group]
    assert {"torch"} <= {result.backend for result in results}
    assert all(result.status == "pass" for result in results)
    eager = [result for result in results if result.backend == "torch"]
    assert all(math.isfinite(result.error) and math.isfinite(result.grad) for result in eager)


def test_ulps() -> None:
    exact = torch.tensor([1.0, 1.5, -4.0, 0.0, 1e-40], dtype=torch.float64)
    assert ulp_errors(exact.float(), exact.float().double()) == (0.0, 0.0)
    one_up = torch.nextafter(exact[:3].float(), torch.full((3,), 100.0))
    median, largest = ulp_errors(one_up, exact[:3])
    assert (median, largest) == (1.0, 1.0)
    assert ulp_errors(torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16), torch.ones(1).double()) == (1.0, 1.0)
    assert ulp_errors(torch.empty(0), torch.empty(0).double()) == (0.0, 0.0)


def test_shapes_are_read_and_written() -> None:
    sizes = shapes.parse("4096x3072x12288r16f-1")
    assert (sizes.rows, sizes.out, sizes.inner, sizes.rank, sizes.factor) == (4096, 3072, 12288, 16, -1)
    assert shapes.name(sizes) == "4096x3072x12288r16f-1"
    assert shapes.parse(" 77X640X640 ").rank == 16
    for listed in (shapes.sweep(), shapes.common(), shapes.to_tune()):
        assert len(set(listed)) == len(listed)
        assert all(shapes.parse(shapes.name(sizes)) == sizes for sizes in listed)
