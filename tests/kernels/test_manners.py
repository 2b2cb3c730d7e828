"""What the Triton backend promises whoever calls it: reasons, dtypes, other ways out, and the same bits every time."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import deltafuse
from deltafuse.algorithms import get_algorithm
from deltafuse.backends import triton as backend
from deltafuse.backends.registry import select
from deltafuse.backends.triton import OPERATIONS, binding
from deltafuse.backends.triton.launch import MAX_KERNEL_RANK
from deltafuse.core.errors import BackendError
from deltafuse.core.geometry import LayerOp
from deltafuse.core.policy import BACKEND_VARIABLES
from deltafuse.core.problem import Problem
from deltafuse.primitives import get_primitive
from deltafuse.primitives.examples import Draw, Example, leaves, limit, outputs_of, relative_error, run, widened

from .support import (
    DEVICE,
    TINY,
    arguments,
    assert_close,
    assert_equal,
    covering,
    every_example,
    implementation,
    needs_kernels,
    one_of_each,
)

pytestmark = needs_kernels
HALF = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
"""The interpreter multiplies bfloat16 wrongly."""


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BACKEND_VARIABLES, "DELTAFUSE_STRICT"):
        monkeypatch.delenv(name, raising=False)


def problem(dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(LayerOp(16, 24), 3, dtype, DEVICE, True)


def adapted(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A linear layer with a LoRA that does something."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, device=DEVICE, dtype=dtype).requires_grad_(False)
    adapter = get_algorithm("locon").module_class("layer", layer, 0.7, lora_dim=4, alpha=2.0, bypass_mode=True)
    adapter.to(DEVICE, dtype if dtype == torch.float64 else None)
    with torch.no_grad():
        for item in adapter.parameters():
            item.normal_(std=0.2)
    adapter.apply_to()
    return nn.Sequential(layer), adapter


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


# -- who runs


@pytest.mark.parametrize("name", OPERATIONS)
def test_float64_is_refused_by_name(name: str) -> None:
    with pytest.raises(BackendError, match=rf"'triton' cannot run {name}.*float64"):
        select((name,), problem(torch.float64), "triton")


def test_an_adapter_refuses_float64_by_name() -> None:
    with deltafuse.use_backend("triton"), pytest.raises(BackendError, match="float64"):
        adapted(torch.float64)[0](x(torch.float64))


def test_a_layer_asked_by_name_runs_fused() -> None:
    model, _ = adapted()
    with deltafuse.use_backend("torch"):
        wanted = model(x())
    with deltafuse.use_backend("triton"), binding.recorded() as calls:
        found = model(x())
    assert [name for name, _ in calls] == ["lowrank_linear"]
    assert_close([found], [wanted])


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        backend.importlib.util, "find_spec", lambda name, *more: None if name == "triton" else found(name, *more)
    )
    backend._installed.cache_clear()
    yield
    backend._installed.cache_clear()


def test_without_triton_there_is_a_reason_and_torch_runs(without_triton: None) -> None:
    assert "not installed" in deltafuse.available_backends(DEVICE)["triton"].reason
    model, adapter = adapted()
    with binding.recorded() as calls:
        found = model(x())
    assert not calls
    with deltafuse.use_backend("torch"):
        assert_close([found], [model(x())])
    assert "triton" not in adapter.nominal_plan().backend
    with deltafuse.use_backend("triton"), pytest.raises(BackendError, match="not installed"):
        model(x())


@pytest.mark.parametrize("variable", BACKEND_VARIABLES)
def test_a_variable_pins_torch(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = adapted()
    monkeypatch.setenv(variable, "torch")
    with binding.recorded() as calls:
        model(x())
    assert not calls
    monkeypatch.setenv(variable, "triton")
    with binding.recorded() as calls:
        model(x())
    assert calls


@pytest.mark.parametrize("case", every_example())
def test_ranks_beyond_the_kernels_run_something_else(case: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lowered for this test: where a rank counts, numbers and dtypes are still the reference's."""
    function, args = implementation(case.primitive), arguments(case)
    for name, module in list(sys.modules.items()):
        if name.startswith("deltafuse.backends.triton.") and hasattr(module, "MAX_KERNEL_RANK"):
            monkeypatch.setattr(module, "MAX_KERNEL_RANK", 1)
    assert_close(run(function, args), run(get_primitive(case.primitive).reference, args), 4e-6)


@pytest.mark.parametrize("rank", [0, MAX_KERNEL_RANK + 1])
def test_a_rank_the_kernels_do_not_take_runs_the_reference(rank: int) -> None:
    case = next(iter(covering("lowrank_linear")))
    args = arguments(case, replace(TINY, rank=rank))
    with binding.recorded() as calls:
        found = run(implementation(case.primitive), args)
    assert not calls
    assert_equal(found, run(get_primitive(case.primitive).reference, args))


# -- dtypes


MIXES = ((torch.float32, torch.float16), (torch.float32, torch.bfloat16), (HALF, HALF), (HALF, torch.float32))
"""(layer, factors); both in float32 is what every other test runs."""


@pytest.mark.parametrize(("layer", "factors"), MIXES, ids=lambda item: str(item).removeprefix("torch."))
@pytest.mark.parametrize("case", every_example())
def test_gradients_come_in_their_leaves_dtypes(case: Example, layer: torch.dtype, factors: torch.dtype) -> None:
    args = case.build(TINY, Draw(layer, DEVICE, factors=factors, seed=3))
    reference = outputs_of(get_primitive(case.primitive).reference(*args))
    found = run(implementation(case.primitive), args)
    assert [item.dtype for item in found] == [item.dtype for item in (*reference, *leaves(args))]
    assert all(item.isfinite().all() for item in found)


@pytest.mark.parametrize("case", every_example())
def test_autocast_gives_the_references_dtype(case: Example) -> None:
    """float32 tensors under autocast, as in mixed-precision training."""
    args, reference = arguments(case), get_primitive(case.primitive).reference
    exact = run(reference, widened(args))
    with torch.autocast(DEVICE.type, HALF):
        eager = run(reference, args)
        found = run(implementation(case.primitive), args)
    assert [item.dtype for item in found] == [item.dtype for item in eager]
    for index, (mine, theirs, wanted) in enumerate(zip(found, eager, exact, strict=True)):
        assert relative_error(mine, wanted) <= limit(relative_error(theirs, wanted), HALF), f"tensor {index}"


# -- determinism


@pytest.mark.parametrize("case", one_of_each())
def test_five_runs_have_the_same_bits(case: Example) -> None:
    args: tuple[Any, ...] = arguments(case)
    first = run(implementation(case.primitive), args)
    for _ in range(4):
        assert_equal(run(implementation(case.primitive), args), first)


def test_an_adapter_that_ran_kernels_can_be_copied_and_pickled() -> None:
    layer = nn.Linear(12, 8).requires_grad_(False)
    network = deltafuse.create_lycoris(nn.Sequential(layer), 0.7, linear_dim=3, linear_alpha=2.0, algo="lora")
    network.apply_to()
    x = torch.randn(2, 12)
    with deltafuse.use_backend("triton"):
        wanted = layer(x)
    adapter = next(iter(network.loras))
    assert adapter._plans
    twin = pickle.loads(pickle.dumps(adapter))
    again = copy.deepcopy(adapter)
    for other in (twin, again):
        with deltafuse.use_backend("triton"):
            assert torch.equal(other(x), wanted)


def test_layers_of_different_algorithms_share_a_compiled_graph() -> None:
    """Each layer brings a kernel table of its own into one trace."""
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 12), nn.Linear(12, 6)).requires_grad_(False)
    for algo, place in (("lora", 0), ("lokr", 1), ("glora", 2)):
        network = deltafuse.create_lycoris(nn.Sequential(model[place]), 0.7, linear_dim=2, linear_alpha=1.0, algo=algo)
        network.apply_to()
        for parameter in network.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    x = torch.randn(3, 12)
    with deltafuse.use_backend("triton"):
        wanted = model(x)
        torch._dynamo.reset()
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, wanted)
