"""Memory a kernel allocates starts as NaN and lies between guard bands.

What is read before it is written turns results into NaN; what is written outside a buffer changes its guards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deltafuse.primitives.examples import Example, Sizes, run

from .support import (
    arguments,
    assert_equal,
    every_example,
    faults,
    has_rows,
    implementation,
    needs_kernels,
    split_early,
)

pytestmark = needs_kernels
GUARD = 64
"""Elements on either side; their product with any element size keeps the alignment kernels may count on."""
SIGN = 1024
TAILS = Sizes(lead=(1, 37), inner=33, out=35, rank=3, factor=-1)
SPLIT_ROWS = Sizes(lead=(1, 130), inner=24, out=16, rank=2)
SPLIT_COLUMNS = Sizes(lead=(1, 3), inner=264, out=264, rank=2)
SPLIT_WEIGHT = Sizes(inner=40, out=24, rank=2)
"""For operations on weights alone, whose work is inner times out."""
LONG = Sizes(lead=(1, 1100), inner=24, out=16, rank=2)
WIDE = Sizes(lead=(1, 3), inner=520, out=520, rank=2)


class Poison:
    """Wraps the functions that allocate without filling."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.empty = torch.empty
        self.whole: list[tuple[Tensor, int]] = []
        for place, name in (
            (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
            (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"),
        ):  # fmt: skip
            patch.setattr(place, name, self.wrapped(getattr(place, name)))

    def wrapped(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            made = allocate(*args, **kwargs)
            if not made.is_floating_point() or made.device.type == "meta" or made.requires_grad:
                return made
            extent = 1 + sum((side - 1) * step for side, step in zip(made.shape, made.stride(), strict=True))
            extent = extent if made.numel() else 0
            whole = self.empty(extent + 2 * GUARD, dtype=made.dtype, device=made.device).fill_(torch.nan)
            whole[:GUARD] = whole[GUARD + extent :] = SIGN
            self.whole.append((whole, extent))
            return whole.as_strided(made.shape, made.stride(), GUARD)

        return poisoned

    def assert_guards(self) -> None:
        assert self.whole
        for whole, extent in self.whole:
            assert (whole[:GUARD] == SIGN).all(), "written before the start of a buffer"
            assert (whole[GUARD + extent :] == SIGN).all(), "written past the end of a buffer"


def check(case: Example, sizes: Sizes, patch: pytest.MonkeyPatch) -> None:
    function, args = implementation(case.primitive), arguments(case, sizes)
    wrong = faults(function, case, sizes)
    assert not wrong, wrong
    clean = run(function, args)
    poison = Poison(patch)
    found = run(function, args)
    patch.undo()
    poison.assert_guards()
    assert all(item.isfinite().all() for item in found)
    assert_equal(found, clean)


@pytest.mark.parametrize("case", every_example())
def test_buffers(case: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, TAILS, monkeypatch)


@pytest.mark.parametrize("case", every_example())
def test_buffers_of_split_reductions(case: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    implementation(case.primitive)
    for sizes in (SPLIT_ROWS, SPLIT_COLUMNS) if has_rows(case) else (SPLIT_WEIGHT,):
        with split_early():
            check(case, sizes, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [LONG, WIDE], ids=["long", "wide"])
@pytest.mark.parametrize("case", every_example())
def test_buffers_of_larger_layers(case: Example, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, sizes, monkeypatch)
