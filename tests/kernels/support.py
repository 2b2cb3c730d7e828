"""What the kernel suites share: the device, small sizes, the examples worth running, and arguments laid out anew."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from deltafuse.backends import backends
from deltafuse.backends.triton import OPERATIONS, interpreted
from deltafuse.backends.triton.launch import forget
from deltafuse.primitives import get_primitive
from deltafuse.primitives.examples import (
    Draw,
    Example,
    Sizes,
    examples,
    limit,
    relative_error,
    run,
    tensors,
    widened,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = Sizes(lead=(2, 3), inner=24, out=16, rank=2, factor=4)
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""How far two orders of the same sums may lie apart."""
needs_kernels = pytest.mark.skipif(
    DEVICE.type == "cpu" and not interpreted(), reason="needs a GPU or TRITON_INTERPRET=1 before Triton is imported"
)


def arguments(case: Example, sizes: Sizes = TINY, dtype: torch.dtype = torch.float32, seed: int = 3) -> tuple[Any, ...]:
    return case.build(sizes, Draw(dtype, DEVICE, seed=seed))


def implementation(name: str) -> Callable[..., Any]:
    return backends()["triton"].implementation(name)


@cache
def covering(name: str) -> list[Example]:
    """The fewest examples that between them hand in every argument some example hands in."""
    given = {case: {place for place, arg in enumerate(arguments(case)) if tensors((arg,))} for case in examples(name)}
    missing, chosen = set().union(*given.values()), []
    while missing:
        chosen.append(max(given, key=lambda case: (len(given[case] & missing), len(given[case]))))
        missing -= given[chosen[-1]]
    return chosen


def every_example() -> list[Any]:
    """All examples of all operations; those beyond the covering ones run under ``-m slow`` alone."""
    return [
        pytest.param(case, id=f"{name}[{case.label}]", marks=() if case in covering(name) else pytest.mark.slow)
        for name in OPERATIONS
        for case in examples(name)
    ]


def one_of_each() -> list[Any]:
    """The example of each operation that hands in most."""
    return [pytest.param(covering(name)[0], id=name) for name in OPERATIONS]


def has_rows(case: Example) -> bool:
    """Whether anything the example hands in depends on the number of rows."""
    few, more = (arguments(case, replace(TINY, lead=(2, rows))) for rows in (3, 4))
    return [item.shape for item in tensors(few)] != [item.shape for item in tensors(more)]


@contextmanager
def split_early() -> Iterator[None]:
    """Kernels split their reductions at sizes that are small enough for tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("deltafuse.backends.triton."):
                if callable(vars(module).get("processors")):
                    patch.setattr(module, "processors", lambda device: 64)
                if isinstance(vars(module).get("_SPLIT_ROWS"), int):
                    patch.setattr(module, "_SPLIT_ROWS", 8)
        forget()
        yield
    forget()


def mapped(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """``args`` with ``change`` applied to every tensor, nested ones too."""

    def one(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return change(arg)
        return tuple(one(item) for item in arg) if isinstance(arg, (tuple, list)) else arg

    return tuple(one(arg) for arg in args)


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leaves of their own with the same values, contiguous."""
    return mapped(args, lambda item: item.detach().clone().contiguous().requires_grad_(item.requires_grad))


def embedded(args: tuple[Any, ...], around: int = 1 << 14) -> tuple[Any, ...]:
    """The same values inside buffers of NaN: what a kernel reads outside an argument shows in its results."""

    def embed(item: Tensor) -> Tensor:
        if not item.is_floating_point():
            return item
        whole = torch.full((item.numel() + 2 * around,), torch.nan, dtype=item.dtype, device=item.device)
        inside = whole[around : around + item.numel()].view(item.shape)
        return inside.copy_(item.detach()).requires_grad_(item.requires_grad)

    return mapped(args, embed)


def faults(function: Callable[..., Any], case: Example, sizes: Sizes = TINY, dtype: torch.dtype = torch.float32) -> str:
    """What is wrong with the results and gradients of ``function`` at one example, or nothing."""
    args, reference = arguments(case, sizes, dtype), get_primitive(case.primitive).reference
    exact, eager, found = run(reference, widened(args)), run(reference, args), run(function, embedded(args))
    for index, (mine, theirs, wanted) in enumerate(zip(found, eager, exact, strict=True)):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"tensor {index} is {tuple(mine.shape)} of {mine.dtype}"
        error, allowed = relative_error(mine, wanted), limit(relative_error(theirs, wanted), dtype)
        if not error <= allowed:
            return f"tensor {index} is off by {error:.1e}, {allowed:.1e} allowed"
    return ""


def assert_close(found: Iterable[Tensor], wanted: Iterable[Tensor], allowed: float | None = None) -> None:
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert mine.shape == theirs.shape, f"tensor {index}"
        assert mine.dtype == theirs.dtype, f"tensor {index}"
        bound = CLOSE[theirs.dtype] if allowed is None else allowed
        assert relative_error(mine, theirs) <= bound, f"tensor {index}"


def assert_equal(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index}"
