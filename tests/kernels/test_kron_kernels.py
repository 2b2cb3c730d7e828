"""Kronecker kernels beyond the registered examples: split sums, strides, empty batches, every shape of the path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deltafuse.backends import backends
from deltafuse.backends.triton import interpreted
from deltafuse.primitives import kron
from deltafuse.primitives.examples import relative_error, run, widened

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not interpreted(), reason="needs a GPU or TRITON_INTERPRET=1 before Triton is imported"
)


def _factor(out: int, inner: int, rank: int | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def leaf(*shape: int) -> Tensor:
        return (torch.randn(shape) * shape[1] ** -0.5).to(DEVICE, dtype).requires_grad_()

    return (leaf(out, inner),) if rank is None else (leaf(rank, inner), leaf(out, rank))


def _columns(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)[..., ::2]


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _call(
    rows: int, sides: tuple[int, int, int, int], ranks: tuple[int | None, int | None], dtype: torch.dtype,
    view: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    torch.manual_seed(0)
    l, m, k, n = sides
    x = torch.randn(rows, m * n, device=DEVICE, dtype=dtype)
    x = (x if view is None else view(x)).detach().requires_grad_()
    weight = torch.randn(l * k, m * n, device=DEVICE, dtype=dtype) * (m * n) ** -0.5
    bias = torch.randn(l * k, device=DEVICE, dtype=dtype)
    factors = _factor(l, m, ranks[0], torch.float32), _factor(k, n, ranks[1], torch.float32)
    return x, weight, bias, *factors, 0.7


CASES = {
    "chain, rows split": (1100, (4, 4, 20, 12), (None, 5)),
    "chain, uneven sides": (37, (2, 8, 40, 24), (None, 5)),
    "chain, one line": (37, (3, 1, 40, 24), (None, 5)),
    "chain, wide w1, rank 64": (9, (60, 64, 12, 20), (None, 64)),
    "pair, many programs": (80, (12, 8, 30, 24), (None, None)),
    "mix": (150, (6, 4, 50, 40), (None, None)),
    "mix, wide w1": (20, (60, 48, 40, 33), (None, None)),
    "w1 low-rank": (37, (12, 8, 40, 33), (3, 4)),
    "w1 beyond the kernels": (7, (90, 70, 4, 3), (3, None)),
    "rank beyond the kernels": (7, (9, 7, 100, 30), (None, 70)),
    "no rows: chain": (0, (4, 4, 40, 24), (None, 5)),
    "no rows: pair": (0, (2, 8, 30, 24), (None, None)),
    "no rows: mix": (0, (2, 8, 40, 33), (None, None)),
}


def _agrees(args: tuple[Any, ...]) -> None:
    eager = run(kron.kron_linear, args)
    found = run(backends()["triton"].implementation("kron_linear"), args)
    for mine, theirs, exact in zip(found, eager, run(kron.kron_linear, widened(args)), strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, exact) <= 2 * relative_error(theirs, exact) + 6e-7


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_path(case: tuple[Any, ...]) -> None:
    _agrees(_call(*case, torch.float32))


@pytest.mark.parametrize("view", [_columns, _transposed], ids=["every second column", "transposed"])
@pytest.mark.parametrize("case", ["chain, uneven sides", "pair, many programs", "mix"])
def test_strided_inputs(case: str, view: Callable[[Tensor], Tensor]) -> None:
    rows, sides, ranks = CASES[case]
    _agrees(_call(min(rows, 21), sides, ranks, torch.float32, view))


@pytest.mark.parametrize("case", ["chain, rows split", "pair, many programs", "mix"])
def test_gradients_are_the_same_every_time(case: str) -> None:
    args = _call(*CASES[case], torch.float32)
    kernel = backends()["triton"].implementation("kron_linear")
    for first, second in zip(run(kernel, args), run(kernel, args), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("scale", [0.7, torch.tensor(0.7)], ids=["number", "tensor"])
def test_merge_gradients_over_many_tiles(scale: Any) -> None:
    torch.manual_seed(0)
    scale = scale.to(DEVICE) if isinstance(scale, Tensor) else scale
    (w1,), (w2,) = _factor(7, 5, None, torch.float32), _factor(40, 150, None, torch.float16)
    weight = torch.randn(280, 750, device=DEVICE, dtype=torch.float16).requires_grad_()
    args = weight, w1, w2, scale
    found = run(backends()["triton"].implementation("kron_merge"), args)
    for mine, exact in zip(found, run(kron.kron_merge, widened(args)), strict=True):
        assert relative_error(mine, exact) <= (6e-7 if mine.dtype == torch.float32 else 5e-4)
