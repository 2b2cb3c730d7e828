"""A new algorithm is one file, a new backend one class: both registered from outside and found everywhere."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deltafuse
from deltafuse.algorithms import algorithms, get_algorithm, unregister_algorithm
from deltafuse.backends import backends
from deltafuse.backends.registry import Backend
from deltafuse.cli.app import run
from deltafuse.core.errors import BackendError, OptionError
from deltafuse.core.problem import Problem
from deltafuse.core.verdict import Verdict
from deltafuse.primitives import get_primitive
from generic import table
from generic.test_forms import check
from runtime import support

TOY_FILE = '''
"""Outer: dW = scale * out_vector in_vector^T, a LoRA of rank 1 under another name."""

from typing import Any

import torch
from torch import nn

from deltafuse.algorithms import register_algorithm
from deltafuse.algorithms.common import Ranked, kaiming
from deltafuse.deltas import LowRank


@register_algorithm()
class OuterModule(Ranked):
    name = "toy"
    aliases = ("outer",)
    summary = "an outer product of two vectors"
    weight_list = ["toy_out", "toy_in", "alpha"]
    weight_list_det = ["toy_out"]
    options = frozenset({"toy_gain"})

    def __init__(self, lora_name: str, org_module: nn.Module, multiplier: float = 1.0, lora_dim: int = 1,
                 alpha: Any = 1, dropout: float = 0.0, rank_dropout: float = 0.0, module_dropout: float = 0.0,
                 rank_dropout_scale: bool = False, bypass_mode: Any = None, toy_gain: float = 1.0,
                 **kwargs: Any) -> None:
        super().__init__(lora_name, org_module, multiplier, dropout, rank_dropout, module_dropout,
                         rank_dropout_scale, bypass_mode, **kwargs)
        self.set_scale(1, alpha)
        self.toy_in = nn.Parameter(torch.empty(1, self.geometry.fan_in))
        self.toy_out = nn.Parameter(torch.zeros(self.geometry.out, 1))
        kaiming(self.toy_in)
        self.toy_in.data *= float(toy_gain)

    def build_delta(self, rank_mask, row_mask):
        return LowRank(self.toy_in, self.toy_out, self.scale, None, None, rank_mask, row_mask)

    def custom_state_dict(self):
        return {"toy_out": self.toy_out, "toy_in": self.toy_in, "alpha": self.alpha_tensor()}

    @classmethod
    def from_tensors(cls, lora_name, org_module, tensors):
        return cls(lora_name, org_module, alpha=tensors.get("alpha"))

    def shrink_parameters(self):
        return [(self.toy_out.data, 0.0)]
'''


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ModuleType]:
    """The file above, imported as a user's own module."""
    path = tmp_path / "outer_algorithm.py"
    path.write_text(TOY_FILE)
    spec = importlib.util.spec_from_file_location("outer_algorithm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["outer_algorithm"] = module
    spec.loader.exec_module(module)
    yield module
    unregister_algorithm("toy")
    del sys.modules["outer_algorithm"]


class Echo(Backend):
    """A backend from outside: runs everything and counts."""

    name = "echo"
    order = 5
    summary = "counts its calls"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def available(self, device: torch.device | None = None) -> Verdict:
        return Verdict(True, "made for this test")

    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        return Verdict(True, "any")

    def implementation(self, primitive: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.calls.append(primitive)
            return get_primitive(primitive).reference(*args)

        return run


@pytest.fixture
def echo() -> Iterator[Echo]:
    backend = Echo()
    deltafuse.register_backend(backend)
    yield backend
    deltafuse.unregister_backend("echo")


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[[], Any]:
    """What ``deltafuse doctor --json`` prints."""

    def call() -> Any:
        capsys.readouterr()
        assert run(["doctor", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.conv = nn.Conv1d(24, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.relu(self.first(x)).transpose(1, 2))


def network(strength: float = 0.8, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    net = deltafuse.create_lycoris(model, strength, linear_dim=1, linear_alpha=0.5, algo="toy", **options)
    for adapter in net.loras:
        support.disturb(adapter)
    net.apply_to()
    return model, net


# -- an algorithm


def test_an_algorithm_is_found_and_leaves(tmp_path: Path, toy: ModuleType) -> None:
    assert algorithms()["toy"].module_class is toy.OuterModule
    assert get_algorithm("Outer").name == "toy"
    unregister_algorithm("toy")
    assert "toy" not in algorithms()
    with pytest.raises(OptionError, match="unknown algorithm 'toy'"):
        get_algorithm("toy")
    with pytest.raises(OptionError, match="unknown algorithm 'toy'"):
        deltafuse.create_lycoris(Net(), 1.0, algo="toy")


def test_the_doctor_lists_an_algorithm(toy: ModuleType, doctor: Callable[[], Any]) -> None:
    (row,) = [row for row in doctor()["algorithms"] if row["name"] == "toy"]
    assert row["aliases"] == ["outer"]
    assert row["summary"] == "an outer product of two vectors"
    assert row["origin"] == "outer_algorithm"
    unregister_algorithm("toy")
    assert not [row for row in doctor()["algorithms"] if row["name"] == "toy"]


def test_a_network_of_it_trains_reports_saves_and_reloads(toy: ModuleType, tmp_path: Path) -> None:
    model, net = network(toy_gain=2.0)
    report = deltafuse.explain(net)
    assert {row.algorithm for row in report} == {"toy"}
    x = torch.randn(2, 5, 12)
    model(x).square().mean().backward()
    assert all(item.grad is not None and item.grad.abs().sum() > 0 for item in net.parameters())
    net.eval()
    want = model(x)
    net.save_weights(tmp_path / "toy.safetensors")
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    again, _ = deltafuse.create_lycoris_from_weights(0.8, tmp_path / "toy.safetensors", fresh)
    again.eval().apply_to()
    assert {adapter.name for adapter in again.loras} == {"toy"}
    torch.testing.assert_close(fresh(x), want)
    again.restore()
    again.merge_to(0.8)
    torch.testing.assert_close(fresh(x), want, rtol=1e-5, atol=1e-6)


def test_a_misspelled_option_of_it_is_refused(toy: ModuleType) -> None:
    with pytest.raises(OptionError, match="toy_gain"):
        network(toy_gian=2.0)


def test_the_suites_pick_it_up(toy: ModuleType) -> None:
    """The registry-driven tables of tests/generic and tests/runtime hold it without an entry of its own."""
    assert "toy" in table.weight_algorithms()
    assert ("toy", "linear") in support.cases()
    assert ("toy", "conv2d") in support.cases()


@pytest.mark.parametrize("kind", ["linear", "conv2d", "conv2d_groups"])
def test_it_passes_the_generic_equivalence(toy: ModuleType, kind: str) -> None:
    assert not check("toy", table.LAYERS[kind])


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_it_passes_the_runtime_steps(toy: ModuleType, kind: str) -> None:
    case = support.build("toy", kind)
    x = case.kind.inputs(4)
    torch._dynamo.reset()
    call = torch.compile(case.model, backend="eager", fullgraph=True)
    one, other = support.step(case, x, call), support.step(case, x)
    support.assert_trains(one)
    support.assert_same(one, other)


# -- a backend


def test_a_backend_is_found_and_leaves(echo: Echo, doctor: Callable[[], Any]) -> None:
    assert next(iter(backends())) == "echo"
    assert deltafuse.available_backends()["echo"].ok
    (row,) = [row for row in doctor()["backends"] if row["name"] == "echo"]
    assert row["ok"]
    assert row["reason"] == "made for this test"
    deltafuse.unregister_backend("echo")
    assert "echo" not in deltafuse.available_backends()
    with pytest.raises(OptionError, match="unknown backend 'echo'"), deltafuse.use_backend("echo"):
        pass


def test_a_backend_runs_every_algorithm(echo: Echo) -> None:
    """All algorithms, and every primitive that some form runs, with the numbers of plain PyTorch."""
    for name, kind in support.cases():
        case = support.build(name, kind)
        x = case.kind.inputs(4)
        with deltafuse.use_backend("torch"):
            want = support.step(case, x)
        with deltafuse.use_backend("echo"):
            support.assert_same(support.step(case, x), want)
    assert {"lowrank_down", "gemm_epilogue", "kron_apply", "block_rotate"} & set(echo.calls)


def test_the_report_names_it_and_the_toy_runs_on_it(echo: Echo, toy: ModuleType) -> None:
    model, net = network(bypass_mode=True)
    assert deltafuse.explain(net)[0].backend == "echo"
    assert "echo" in str(deltafuse.explain(net))
    model(torch.randn(2, 5, 12))
    assert "lowrank_linear" in echo.calls
    deltafuse.unregister_backend("echo")
    assert deltafuse.explain(net)[0].backend == "torch"


def test_a_name_that_is_gone_cannot_be_asked_for(echo: Echo) -> None:
    case = support.build("locon", "linear")
    with deltafuse.use_backend("echo"):
        deltafuse.unregister_backend("echo")
        with pytest.raises((BackendError, OptionError), match="echo"):
            case.model(case.kind.inputs(3))
