"""The self-test at first use: a broken operation is switched off with one line, a right one stays, once each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from deltafuse.backends import backends, select
from deltafuse.backends.triton import TritonBackend, interpreted, selftest
from deltafuse.core.errors import BackendError
from deltafuse.core.geometry import LayerOp
from deltafuse.core.messages import forget_said
from deltafuse.core.problem import Problem
from deltafuse.core.verdict import Verdict
from deltafuse.primitives import get_primitive

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
NAME = "lowrank_linear"
PROBLEM = Problem(LayerOp(64, 48), 6, torch.float32, DEVICE, True)

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not interpreted(), reason="needs a GPU or TRITON_INTERPRET=1 before Triton is imported"
)


class Stand:
    """What the backend would run, replaced by ``change(reference result)``; counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0
        self.change: Callable[[torch.Tensor], Any] = lambda y: y

    def implementation(self, backend: TritonBackend, primitive: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.calls += 1
            return self.change(get_primitive(primitive).reference(*args))

        return run


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    found = Stand()
    monkeypatch.delenv("DELTAFUSE_STRICT", raising=False)
    monkeypatch.setattr(selftest, "KINDS", {DEVICE.type})
    monkeypatch.setattr(TritonBackend, "implementation", lambda self, name: found.implementation(self, name))
    monkeypatch.setattr(TritonBackend, "competes", lambda self, name, problem: Verdict(True, "in this test"))
    selftest.forget()
    forget_said()
    yield found
    selftest.forget()
    forget_said()


class _Wrong(torch.autograd.Function):
    """Right forward, gradient twice too large."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


def _raise(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction")


BROKEN = {
    "result": (lambda y: y * 1.01, "in the result"),
    "gradient": (_Wrong.apply, "in gradient 1"),
    "not a number": (lambda y: y * float("nan"), "in the result"),
    "dtype": (lambda y: y.double(), "shapes or dtypes"),
    "raises": (_raise, "raises RuntimeError: no such instruction"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_operation_is_switched_off(tested: Stand, kind: str, caplog: Any) -> None:
    tested.change, reason = BROKEN[kind]
    with caplog.at_level(logging.WARNING, "deltafuse"):
        for _ in range(3):
            chosen = select((NAME,), PROBLEM, "auto")
    assert dict(chosen.choice)[NAME] != "triton"
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]
    calls = tested.calls
    other = Problem(PROBLEM.op, 6, torch.float16, DEVICE, True)  # the whole device, not one dtype
    assert not backends()["triton"].verdict(NAME, other)
    assert tested.calls == calls


def test_strict_mode_raises(tested: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    tested.change = BROKEN["result"][0]
    monkeypatch.setenv("DELTAFUSE_STRICT", "1")
    with pytest.raises(BackendError, match="self-test"):
        select((NAME,), PROBLEM, "auto")


def test_a_backend_asked_for_by_name_raises(tested: Stand) -> None:
    tested.change = BROKEN["gradient"][0]
    with pytest.raises(BackendError, match=r"cannot run lowrank_linear.*self-test"):
        select((NAME,), PROBLEM, "triton")


def test_a_right_operation_is_tested_once_a_dtype(tested: Stand, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "deltafuse"):
        for _ in range(3):
            assert dict(select((NAME,), PROBLEM, "auto").choice)[NAME] == "triton"
        calls = tested.calls
        assert calls > 0
        select((NAME,), Problem(PROBLEM.op, 6, torch.float16, DEVICE, True), "auto")
    assert tested.calls == 2 * calls
    assert not caplog.messages


def test_random_and_grad_states_stay(tested: Stand) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        assert select((NAME,), PROBLEM, "triton").backend == "triton"
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_inference_mode_is_no_obstacle(tested: Stand) -> None:
    with torch.inference_mode():
        assert select((NAME,), PROBLEM, "triton").backend == "triton"


def test_not_inside_a_trace_and_not_forgotten_after_it(tested: Stand) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert backends()["triton"].verdict(NAME, PROBLEM)
    assert tested.calls == 0
    seen: list[int] = []

    def compiler(module: Any, inputs: Any) -> Any:
        assert backends()["triton"].verdict(NAME, PROBLEM)
        seen.append(tested.calls)
        return module.forward

    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
    assert seen == [0]
    assert backends()["triton"].verdict(NAME, PROBLEM)
    assert tested.calls > 0


def test_cpu_tensors_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    selftest.forget()
    assert selftest.check(NAME, torch.device("cpu"), torch.float32, lambda: called.append(1)) is selftest.PASSED  # type: ignore[arg-type,return-value]
    assert not called


@pytest.mark.skipif(DEVICE.type != "cpu", reason="GPUs run this at first use")
def test_the_real_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "KINDS", {"cpu"})
    selftest.forget()
    assert backends()["triton"].verdict(NAME, PROBLEM).reason == "fused kernel"
    selftest.forget()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_not_while_a_graph_is_captured(tested: Stand) -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(4, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x + 1
        assert backends()["triton"].verdict(NAME, PROBLEM)
    assert tested.calls == 0
