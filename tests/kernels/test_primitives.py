"""Every Triton kernel against the float64 reference, through the primitives' registered examples.

On machines without a GPU Triton's interpreter runs the kernels (tests/conftest.py asks for it). Its bfloat16 products
are wrong, so bfloat16 is checked on GPUs only.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from deltafuse.backends import backends
from deltafuse.backends.triton import OPERATIONS, interpreted
from deltafuse.primitives import get_primitive
from deltafuse.primitives.examples import Draw, Example, Sizes, examples, limit, relative_error, run, widened

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
SIZES = [
    Sizes(),
    Sizes(lead=(1, 1), inner=33, out=16, rank=1, factor=-1),
    Sizes(lead=(3, 2, 11), inner=130, out=67, rank=18, factor=2),
]
CASES = [item for name in OPERATIONS for item in examples(name)]

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and not interpreted(), reason="needs a GPU or TRITON_INTERPRET=1 before Triton is imported"
)


def _id(value: object) -> str:
    if isinstance(value, Example):
        return f"{value.primitive}[{value.label}]"
    if isinstance(value, Sizes):
        return f"{value.rows}x{value.inner}x{value.out}r{value.rank}"
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DTYPES, ids=_id)
@pytest.mark.parametrize("sizes", SIZES, ids=_id)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_results_and_gradients_equal_the_reference(case: Example, sizes: Sizes, dtype: torch.dtype) -> None:
    """Error against float64 stays within what eager PyTorch of the same dtype has, or near one rounding."""
    args = case.build(sizes, Draw(dtype, DEVICE, seed=3))
    reference = get_primitive(case.primitive).reference
    wanted = run(reference, widened(args))
    eager = run(reference, args)
    found = run(backends()["triton"].implementation(case.primitive), args)
    assert [item.shape for item in found] == [item.shape for item in eager]
    assert [item.dtype for item in found] == [item.dtype for item in eager]
    for index, (mine, theirs, exact) in enumerate(zip(found, eager, wanted, strict=True)):
        assert relative_error(mine, exact) <= limit(relative_error(theirs, exact), dtype), f"output {index}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_examples(name: str) -> None:
    assert list(examples(name)), name
