"""Which backend runs: the order of precedence, refusals with reasons, fallbacks that say so, and strict mode."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import deltafuse
from deltafuse.backends.registry import BUILT_IN, PLANNED, Backend, select
from deltafuse.core.errors import BackendError, OptionError
from deltafuse.core.geometry import LayerOp
from deltafuse.core.messages import forget_said
from deltafuse.core.policy import BACKEND_VARIABLES, requested_backend
from deltafuse.core.problem import Problem
from deltafuse.core.verdict import Verdict
from deltafuse.functional import locon
from deltafuse.primitives import get_primitive

from .support import assert_same, build, cases, step

WHOLE_LAYER = "lowrank_linear"
"""The one primitive of locon's bypass on a linear layer."""


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*BACKEND_VARIABLES, "DELTAFUSE_STRICT"):
        monkeypatch.delenv(name, raising=False)
    forget_said()
    yield
    forget_said()


class Picky(Backend):
    """Competes for everything, runs all primitives but one, and counts its calls."""

    name = "picky"
    order = 1
    summary = "a backend of this test"

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses = refuses
        self.calls: list[str] = []

    def available(self, device: torch.device | None = None) -> Verdict:
        return Verdict(True, "always")

    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        return Verdict(primitive != self.refuses, "this test says no" if primitive == self.refuses else "fine")

    def implementation(self, primitive: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.calls.append(primitive)
            return get_primitive(primitive).reference(*args)

        return run


@pytest.fixture
def picky() -> Iterator[Callable[[str | None], Picky]]:
    def register(refuses: str | None = None) -> Picky:
        backend = Picky(refuses)
        deltafuse.register_backend(backend)
        return backend

    yield register
    deltafuse.unregister_backend("picky")


# -- precedence


def test_the_default_is_auto() -> None:
    assert requested_backend() == "auto"


def test_regions_nest_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFUSE_BACKEND", "compile")
    with deltafuse.use_backend("torch"):
        assert requested_backend() == "torch"
        with deltafuse.use_backend("compile"):
            assert requested_backend() == "compile"
        assert requested_backend() == "torch"
        with deltafuse.use_backend("auto"):
            assert requested_backend() == "auto"
        assert requested_backend() == "torch"
        with pytest.raises(RuntimeError, match="inside"), deltafuse.use_backend("compile"):
            raise RuntimeError("inside")
        assert requested_backend() == "torch"
    assert requested_backend() == "compile"


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "compile")
    assert requested_backend() == "compile"
    monkeypatch.setenv("DELTAFUSE_BACKEND", "Torch")
    assert requested_backend() == "torch"
    monkeypatch.setenv("DELTAFUSE_BACKEND", "")
    assert requested_backend() == "compile"
    with deltafuse.use_backend("torch"):
        assert requested_backend() == "torch"
        assert requested_backend("auto") == "auto"


@pytest.mark.parametrize("variable", BACKEND_VARIABLES)
def test_unknown_names_come_with_the_nearest(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    with pytest.raises(OptionError, match="Did you mean 'triton'"), deltafuse.use_backend("tritn"):
        pass
    monkeypatch.setenv(variable, "troch")
    with pytest.raises(OptionError, match=f"in {variable}.*Did you mean 'torch'"):
        requested_backend()


def test_a_call_picks_its_own_backend(picky: Callable[..., Picky]) -> None:
    backend = picky()
    weights = (torch.randn(2, 6), torch.randn(5, 2))
    x = torch.randn(3, 6)
    with deltafuse.use_backend("torch"):
        want = locon.bypass_forward_diff(x, None, *weights)
        assert not backend.calls
        got = locon.bypass_forward_diff(x, None, *weights, backend="picky")
    assert backend.calls
    torch.testing.assert_close(got, want)
    with pytest.raises(BackendError, match="triton"):
        locon.bypass_forward_diff(x, None, *weights, backend="triton")


# -- what can run


def test_every_name_has_a_verdict_with_a_reason() -> None:
    verdicts = deltafuse.available_backends()
    assert set(verdicts) >= {*BUILT_IN, *PLANNED}
    assert verdicts["torch"].ok
    assert all(verdict.reason for verdict in verdicts.values())
    assert all(deltafuse.available_backends(device)["torch"].ok for device in ("cpu", "cuda", "meta"))


@pytest.mark.parametrize("name", list(PLANNED))
def test_a_named_backend_that_is_absent_raises(name: str) -> None:
    assert not deltafuse.available_backends()[name]
    case = build("locon", "linear")
    with deltafuse.use_backend(name), pytest.raises(BackendError, match=f"'{name}'.*Available: .*torch"):
        case.model(case.kind.inputs(3))


def test_compile_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("deltafuse.backends.compile")
    monkeypatch.setattr(module, "_host_compiler", lambda: None)
    assert "C++ compiler" in deltafuse.available_backends("cpu")["compile"].reason
    case = build("lokr", "linear")
    with deltafuse.use_backend("compile"), pytest.raises(BackendError, match=r"C\+\+ compiler"):
        case.model(case.kind.inputs(3))


def test_compile_on_cuda_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("deltafuse.backends.compile")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert "triton" in deltafuse.available_backends("cuda")["compile"].reason


def test_a_named_backend_that_refuses_a_primitive_raises(picky: Callable[..., Picky]) -> None:
    picky(WHOLE_LAYER)
    case = build("locon", "linear", bypass_mode=True)
    with deltafuse.use_backend("picky"), pytest.raises(BackendError, match=rf"{WHOLE_LAYER}.*this test says no"):
        case.model(case.kind.inputs(3))


# -- auto


def test_auto_takes_what_competes(picky: Callable[..., Picky]) -> None:
    case = build("locon", "linear", bypass_mode=True)
    x = case.kind.inputs(3)
    want = step(case, x)
    backend = picky()
    assert_same(step(case, x), want)
    assert WHOLE_LAYER in backend.calls
    seen = len(backend.calls)
    deltafuse.unregister_backend("picky")
    assert_same(step(case, x), want)
    assert len(backend.calls) == seen


def test_auto_falls_back_and_says_so_once(picky: Callable[..., Picky], caplog: pytest.LogCaptureFixture) -> None:
    backend = picky(WHOLE_LAYER)
    logger = logging.getLogger("deltafuse")
    logger.addHandler(caplog.handler)
    try:
        for seed in (1, 2):
            case = build("locon", "linear", bypass_mode=True, seed=seed)
            case.model(case.kind.inputs(3))
            case.model(case.kind.inputs(50))
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if "picky" in record.getMessage()]
    assert len(set(said)) == 1
    assert len(said) <= 2
    assert WHOLE_LAYER in said[0]
    assert "this test says no" in said[0]
    assert not backend.calls
    plan = case.adapters[0].nominal_plan()
    assert plan.backend != "picky"
    assert "this test says no" in plan.reason


NAMES = ("lowrank_down", "gemm_epilogue")
PROBLEM = Problem(LayerOp(16, 12), 3, torch.float32, torch.device("cpu"), True)


def test_auto_chooses_for_each_primitive(picky: Callable[..., Picky]) -> None:
    """A refusal moves one primitive to the next backend, not the whole form."""
    picky("gemm_epilogue")
    found = select(NAMES, PROBLEM, "auto")
    assert found.backend == "picky + torch"
    assert found.choice == (("lowrank_down", "picky"), ("gemm_epilogue", "torch"))
    assert "this test says no" in found.reason
    assert found.kernels.gemm_epilogue is get_primitive("gemm_epilogue").reference
    assert found.kernels.lowrank_down is not get_primitive("lowrank_down").reference


def test_competing_is_asked_for_each_primitive(picky: Callable[..., Picky], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not competing is no failure: nothing is said and strict mode has nothing to raise."""
    backend = picky()
    monkeypatch.setenv("DELTAFUSE_STRICT", "1")
    asked: list[str] = []

    def competes(primitive: str, problem: Problem) -> Verdict:
        asked.append(primitive)
        return Verdict(primitive == "lowrank_down", "not measured faster here")

    monkeypatch.setattr(backend, "competes", competes)
    found = select(NAMES, PROBLEM, "auto")
    assert asked == list(NAMES)
    assert dict(found.choice) == {"lowrank_down": "picky", "gemm_epilogue": "torch"}
    assert "not measured faster here" in found.reason


def test_a_form_without_primitives_is_torch(picky: Callable[..., Picky]) -> None:
    picky()
    assert select((), PROBLEM, "auto").backend == "torch"
    assert select((), PROBLEM, "picky").backend == "torch"


def test_strict_mode_raises(picky: Callable[..., Picky], monkeypatch: pytest.MonkeyPatch) -> None:
    picky(WHOLE_LAYER)
    monkeypatch.setenv("DELTAFUSE_STRICT", "1")
    case = build("locon", "linear", bypass_mode=True)
    with pytest.raises(BackendError, match=WHOLE_LAYER):
        case.model(case.kind.inputs(3))
    monkeypatch.setenv("DELTAFUSE_STRICT", "perhaps")
    with pytest.raises(OptionError, match=r"DELTAFUSE_STRICT.*Legal"):
        case.model(case.kind.inputs(3))


def test_a_backend_that_is_not_measured_faster_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFUSE_STRICT", "1")
    case = build("locon", "linear")
    case.model(case.kind.inputs(3))
    assert "not measured" in case.adapters[0].nominal_plan().reason


# -- the compile backend


@pytest.mark.skipif(not deltafuse.available_backends("cpu")["compile"], reason="needs a C++ compiler")
def test_compile_gives_the_numbers_of_torch() -> None:
    torch._dynamo.reset()
    case = build("locon", "linear", bypass_mode=True)
    x = case.kind.inputs(6)
    with deltafuse.use_backend("torch"):
        want = step(case, x)
    with deltafuse.use_backend("compile"):
        got = step(case, x)
        assert case.adapters[0].nominal_plan().backend == "compile"
    assert_same(got, want)


@pytest.mark.parametrize(("name", "kind"), cases())
def test_compile_traced_without_a_code_generator(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every algorithm through the compile backend's own wrapper; graphs run as they are."""
    module = importlib.import_module("deltafuse.backends.compile")
    if not deltafuse.available_backends("cpu")["compile"]:
        monkeypatch.setattr(module, "_host_compiler", lambda: "c++")
    plain = torch.compile
    monkeypatch.setattr(module.torch, "compile", lambda fn, **_: plain(fn, backend="eager", dynamic=False))
    module._compiled.cache_clear()
    deltafuse.unregister_backend("none")
    torch._dynamo.reset()
    case = build(name, kind)
    x = case.kind.inputs(5)
    with deltafuse.use_backend("torch"):
        want = step(case, x)
    with deltafuse.use_backend("compile"):
        got = step(case, x)
    module._compiled.cache_clear()
    deltafuse.unregister_backend("none")
    assert_same(got, want)
