"""What every fused operation owes autograd, torch.compile and the dispatcher, whatever it computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

pytest.importorskip("triton")

from deltafuse.backends.triton import OPERATIONS, binding
from deltafuse.primitives import get_primitive
from deltafuse.primitives.examples import (
    Example,
    examples,
    incoming_for,
    leaves,
    limit,
    outputs_of,
    relative_error,
    run,
    tensors,
    widened,
)

from .support import (
    TINY,
    arguments,
    assert_close,
    assert_equal,
    copies,
    every_example,
    has_rows,
    implementation,
    mapped,
    needs_kernels,
)

pytestmark = needs_kernels
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def calls_of(case: Example) -> list[tuple[str, tuple[Any, ...]]]:
    """The fused operations an example calls, with leaves of their own as arguments."""
    function = implementation(case.primitive)
    with binding.recorded() as calls:
        function(*arguments(case))
    return [(name, copies(args)) for name, args in calls]


# -- the dispatcher


@pytest.mark.parametrize("case", every_example())
def test_opcheck(case: Example) -> None:
    for name, args in calls_of(case):
        torch.library.opcheck(getattr(torch.ops.deltafuse, name).default, args, test_utils=CHECKS)


def test_examples_reach_every_bound_operation() -> None:
    reached = {name for primitive in OPERATIONS for case in examples(primitive) for name, _ in calls_of(case)}
    assert reached == set(binding.FUSED)


# -- torch.compile


@pytest.mark.parametrize("case", every_example())
def test_compiled_gradients_equal_eager(case: Example) -> None:
    """Five row counts, two graphs: one for the first, one for any. What sees no rows needs one call."""
    counts = (3, 5, 6, 9, 4) if has_rows(case) else (3,)
    function = implementation(case.primitive)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=graphs)
    for rows in counts:
        args = arguments(case, replace(TINY, lead=(2, rows)))
        assert_close(run(compiled, args), run(function, args))
    assert graphs.frame_count <= 2
    torch._dynamo.reset()


# -- which gradients are wanted


@pytest.mark.parametrize("case", every_example())
def test_each_leaf_alone(case: Example) -> None:
    """A gradient does not depend on which others are wanted."""
    function = implementation(case.primitive)
    args = arguments(case)
    wanted = run(function, args)[-len(leaves(args)) :]
    for number, gradient in enumerate(wanted):
        assert_close(run(function, alone(args, leaves(args)[number]))[-1:], [gradient])


@pytest.mark.parametrize("case", every_example())
def test_base_tensors_may_train(case: Example) -> None:
    """Examples freeze weight and bias; a gradient asked for all the same equals the reference's. A mask has none;
    a strength's is one sum over all outputs, run by the reference, which cancels beyond the tolerance."""
    args = arguments(case)
    names = list(inspect.signature(get_primitive(case.primitive).reference).parameters)
    masks = tensors(tuple(arg for name, arg in zip(names, args, strict=False) if name in ("mask", "strength")))
    for frozen in tensors(args):
        if frozen.requires_grad or not frozen.is_floating_point() or any(frozen is mask for mask in masks):
            continue
        single = alone(args, frozen)
        exact = run(get_primitive(case.primitive).reference, widened(single))
        assert_close([item.double() for item in run(implementation(case.primitive), single)], exact, 2e-6)


def alone(args: tuple[Any, ...], chosen: Tensor) -> tuple[Any, ...]:
    """Copies of ``args`` where only the copy of ``chosen`` wants a gradient."""
    return mapped(args, lambda item: item.detach().clone().requires_grad_(item is chosen))


# -- memory layouts


def transposed(item: Tensor) -> Tensor:
    """Column-major."""
    return item.mT.contiguous().mT if item.dim() > 1 else item


def every_second(item: Tensor) -> Tensor:
    """Elements two apart."""
    return torch.stack([item, torch.full_like(item, 1e3)], -1)[..., 0] if item.dim() > 0 else item


def wider_rows(item: Tensor) -> Tensor:
    """Rows inside longer rows."""
    if item.dim() == 0:
        return item
    width, around = item.shape[-1], torch.full_like(item, 1e3)
    return torch.cat([around, item, around], -1)[..., width : 2 * width]


def repeated(item: Tensor) -> Tensor:
    """The first row everywhere, at stride zero."""
    return item[:1].expand_as(item) if item.dim() > 1 else item


def constant(item: Tensor) -> Tensor:
    """One number everywhere, as the gradient of a sum is."""
    return item.flatten()[0].expand_as(item)


@pytest.mark.parametrize("layout", [transposed, every_second, wider_rows, repeated])
@pytest.mark.parametrize("case", every_example())
def test_arguments_in_any_layout(case: Example, layout: Callable[[Tensor], Tensor]) -> None:
    function = implementation(case.primitive)
    strided = mapped(arguments(case), lambda item: layout(item.detach()).requires_grad_(item.requires_grad))
    assert_close(run(function, strided), run(function, copies(strided)))


@pytest.mark.parametrize("layout", [transposed, wider_rows, constant])
@pytest.mark.parametrize("case", every_example())
def test_incoming_gradients_in_any_layout(case: Example, layout: Callable[[Tensor], Tensor]) -> None:
    args = arguments(case)
    outputs, wanted = outputs_of(implementation(case.primitive)(*args)), leaves(args)
    incoming = [layout(item) for item in incoming_for(outputs)]
    found = torch.autograd.grad(outputs, wanted, incoming, retain_graph=True)
    plain = torch.autograd.grad(outputs, wanted, [item.contiguous() for item in incoming])
    assert_close(found, plain)


LEADS = ((), (0,), (1,), (3,), (2, 0), (2, 3), (2, 1, 3), (1, 2, 1, 3))


@pytest.mark.parametrize("case", every_example())
def test_leading_shapes(case: Example) -> None:
    """x of one to five dimensions, with no rows, one row and more."""
    seen: list[list[torch.Size]] = []
    for lead in LEADS:
        try:
            args = arguments(case, replace(TINY, lead=lead))
        except IndexError:  # a mask per sample needs a batch axis
            continue
        shapes = [item.shape for item in tensors(args)]
        if shapes in seen:
            continue
        seen.append(shapes)
        reference = get_primitive(case.primitive).reference
        try:
            exact, eager = run(reference, widened(args)), run(reference, args)
        except RuntimeError:  # a convolution takes no empty image
            assert 0 in lead
            continue
        found = run(implementation(case.primitive), args)
        assert [(item.shape, item.dtype) for item in found] == [(item.shape, item.dtype) for item in eager], lead
        for index, (mine, theirs, wanted) in enumerate(zip(found, eager, exact, strict=True)):
            allowed = limit(relative_error(theirs, wanted), torch.float32)
            assert relative_error(mine, wanted) <= allowed, f"{lead}: tensor {index}"


# -- what is left as it was


@pytest.mark.parametrize("case", every_example())
def test_nothing_handed_in_is_modified(case: Example) -> None:
    """Neither arguments, incoming gradients and results, nor what is saved: a second backward is equal."""
    args = arguments(case)
    before = copies(args)
    saved: list[tuple[Tensor, int, Tensor]] = []

    def keep(item: Tensor) -> Tensor:
        saved.append((item, item._version, item.detach().clone()))
        return item

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda item: item):
        outputs = outputs_of(implementation(case.primitive)(*args))
    results = [item.detach().clone() for item in outputs]
    incoming = incoming_for(outputs)
    given = [item.clone() for item in incoming]
    first, second = (torch.autograd.grad(outputs, leaves(args), incoming, retain_graph=True) for _ in range(2))
    assert_equal(first, second)
    assert_equal(tensors(args), tensors(before))
    assert_equal(incoming, given)
    assert_equal(outputs, results)
    assert all(item._version == version and torch.equal(item, copy) for item, version, copy in saved)
    assert all(item._version == 0 for item in [*tensors(args), *incoming])


@pytest.mark.parametrize("case", every_example())
def test_double_backward_raises(case: Example) -> None:
    args = arguments(case)
    outputs = outputs_of(implementation(case.primitive)(*args))
    grads = torch.autograd.grad(outputs, leaves(args), incoming_for(outputs), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad([item.square().sum() for item in grads], leaves(args))


@pytest.mark.parametrize("case", every_example())
def test_linear_in_x(case: Example) -> None:
    """f(a + b) - f(a) - f(b) + f(0) = 0 wherever the reference says so."""
    args, others = arguments(case), arguments(case, seed=4)
    reference, function = get_primitive(case.primitive).reference, implementation(case.primitive)
    if defect(reference, widened(args), widened(others)) > 1e-12:
        pytest.skip("not linear in its first argument")
    assert defect(function, args, others) < 4e-6


def defect(function: Callable[..., Any], args: tuple[Any, ...], others: tuple[Any, ...]) -> float:
    a, b = args[0].detach(), others[0].detach()
    whole, first, second, none = (outputs_of(function(x, *args[1:]))[0].detach() for x in (a + b, a, b, a * 0))
    return float((whole - first - second + none).double().norm() / whole.double().norm())
