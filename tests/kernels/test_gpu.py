"""What only a GPU can show: graphs, memory, streams, Inductor, bfloat16 at the sizes of real layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deltafuse.primitives.examples import Draw, Example, examples, incoming_for, leaves, outputs_of, run, tensors
from deltafuse.primitives.shapes import layer

from .support import arguments, assert_close, assert_equal, every_example, faults, implementation, mapped, one_of_each

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEST = layer(256, 512, 512, 16)
REAL = layer(1024, 1280, 1280, 16)
THIN = layer(256, 4096, 4096, 16)
"""Few rows beside a large weight, so that a temporary of the weight's size stands out."""


@pytest.mark.parametrize("case", every_example())
def test_bfloat16_at_a_real_size(case: Example) -> None:
    wrong = faults(implementation(case.primitive), case, REAL, torch.bfloat16)
    assert not wrong, wrong


# -- CUDA graphs and streams


@pytest.mark.parametrize("case", every_example())
def test_graph_capture(case: Example) -> None:
    """Forward and backward, captured after a warm-up and replayed on other numbers."""
    function = implementation(case.primitive)
    static, fresh = (arguments(case, MODEST, torch.bfloat16, seed) for seed in (1, 2))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    incoming = incoming_for(outputs_of(function(*static)))

    def step() -> list[Tensor]:
        outputs = outputs_of(function(*static))
        return [*outputs, *torch.autograd.grad(outputs, leaves(static), incoming)]

    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for mine, other in zip(tensors(static), tensors(fresh), strict=True):
            mine.copy_(other)
    graph.replay()
    replayed = [item.detach().clone() for item in captured]
    assert_equal(replayed, step())


@pytest.mark.parametrize("case", one_of_each())
def test_the_same_bits_on_every_stream(case: Example) -> None:
    function, args = implementation(case.primitive), arguments(case, MODEST, torch.bfloat16)
    first = run(function, args)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number in range(20):
        with torch.cuda.stream(streams[number % 2]):
            found = run(function, args)
        torch.cuda.synchronize()
        assert_equal(found, first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("case", one_of_each())
def test_tensors_of_another_device(case: Example) -> None:
    """The current device stays the first; the work happens where the tensors are."""
    function = implementation(case.primitive)
    args = arguments(case, MODEST, torch.bfloat16)
    moved = mapped(args, lambda item: item.detach().to("cuda:1").requires_grad_(item.requires_grad))
    found = run(function, moved)
    assert {item.device.index for item in found} == {1}
    assert torch.cuda.current_device() == 0
    assert_equal([item.to("cuda:0") for item in found], run(function, args))


# -- torch.compile


@pytest.mark.parametrize("case", every_example())
def test_inductor_gradients_equal_eager(case: Example) -> None:
    function = implementation(case.primitive)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for rows in (64, 96, 130):
        args = arguments(case, layer(rows, 256, 192, 16), torch.bfloat16)
        assert_close(run(compiled, args), run(function, args))
    torch._dynamo.reset()


# -- memory


def held(action: Callable[[], Any]) -> tuple[Any, int]:
    """What ``action`` returns, and the most bytes it had allocated above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = action()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def size(*items: Tensor) -> int:
    return sum(item.numel() * item.element_size() for item in items)


@pytest.mark.parametrize("case", [pytest.param(item, id=item.label) for item in examples("lowrank_linear")])
def test_lowrank_linear_allocates_nothing_of_the_weights_size(case: Example) -> None:
    function = implementation(case.primitive)
    args = case.build(THIN, Draw(torch.bfloat16, torch.device("cuda"), seed=1, local=True))
    x, weight, *_ = args
    run(function, args)  # compiled, counters allocated
    outputs, forward = held(lambda: outputs_of(function(*args)))
    incoming = incoming_for(outputs, local=True)
    grads, backward = held(lambda: torch.autograd.grad(outputs, leaves(args), incoming))
    activations = size(x, *outputs)
    # forward: y, h and at most one more y; backward: gradients, G, q and the parts of dB
    assert forward < 2 * activations
    assert backward < size(*grads) + 3 * activations
    assert max(forward, backward) < size(weight) // 2


@pytest.mark.parametrize("case", [pytest.param(item, id=item.label) for item in examples("lowrank_linear")])
def test_lowrank_linear_saves_its_inputs_and_h(case: Example) -> None:
    args = case.build(THIN, Draw(torch.bfloat16, torch.device("cuda"), seed=1, local=True))
    saved: dict[int, Tensor] = {}

    def keep(item: Tensor) -> Tensor:
        saved[item.untyped_storage().data_ptr()] = item
        return item

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda item: item):
        outputs = outputs_of(implementation(case.primitive)(*args))
    known = {item.untyped_storage().data_ptr() for item in (*tensors(args), *outputs)}
    extra = [item for place, item in saved.items() if place not in known]
    assert size(*extra) <= THIN.rows * THIN.rank * 4
