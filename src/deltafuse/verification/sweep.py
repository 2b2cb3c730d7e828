"""Every example of every primitive, at every size and dtype, on every backend, against the reference in float64.

A backend passes where each of its outputs and gradients is within 1.5 times eager PyTorch's own error of the same
dtype, plus one rounding (:func:`deltafuse.primitives.examples.limit`). Inputs are rounded first, so that all three
compute the same thing. What cannot run is listed with the reason; only a wrong result or an exception is a failure.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..backends import backends, require_backend
from ..backends.registry import Backend
from ..core.geometry import LayerOp
from ..core.problem import Problem
from ..primitives import get_primitive, shapes
from ..primitives.examples import Draw, Example, Sizes, examples, leaves, limit, relative_error, run, widened
from .ulp import ulp_errors

PASS, FAIL, SKIP = "pass", "FAIL", "not run"
NOT_BY_DEFAULT = {"torch", "compile"}
"""torch is what the others are measured against; compiling every case takes minutes."""


@dataclass(frozen=True)
class Plan:
    """What to verify. backends: names, or none for every one that can run here."""

    device: torch.device
    dtypes: Sequence[torch.dtype]
    sizes: Sequence[Sizes]
    primitives: Sequence[str] = ()
    backends: Sequence[str] = ()
    factors: torch.dtype = torch.float32


@dataclass
class Result:
    """One example on one backend. error and eager: worst output; grad and eager_grad: worst gradient, all relative.
    ratio: the largest share of the allowed error that any tensor takes."""

    backend: str
    primitive: str
    example: str
    sizes: Sizes
    dtype: torch.dtype
    status: str = PASS
    error: float = math.nan
    eager: float = math.nan
    grad: float = math.nan
    eager_grad: float = math.nan
    ratio: float = math.nan
    ulp_median: float = math.nan
    ulp_max: float = math.nan
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; what is not a number stands as null."""
        plain = {**self.__dict__, "sizes": shapes.name(self.sizes), "dtype": str(self.dtype).removeprefix("torch.")}
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in plain.items()}


@dataclass
class _Truth:
    """One example's arguments, its exact results and eager's errors."""

    args: tuple[Any, ...]
    outputs: int
    exact: list[Tensor]
    eager: list[float]
    layout: list[tuple[torch.Size, torch.dtype]]
    ulps: tuple[float, float] = field(default=(math.nan, math.nan))


def cases(plan: Plan) -> Iterator[tuple[Example, Sizes, torch.dtype]]:
    """The examples to run; an unknown primitive is an OptionError."""
    for wanted in plan.primitives:
        get_primitive(wanted)
    names: Sequence[str | None] = plan.primitives or [None]
    for name in names:
        for case in examples(name):
            for sizes in plan.sizes:
                for dtype in plan.dtypes:
                    yield case, sizes, dtype


def verify(plan: Plan) -> Iterator[list[Result]]:
    """For every case one list: eager, then each backend."""
    chosen = _backends(plan)
    for case, sizes, dtype in cases(plan):
        yield list(_verify_case(plan, chosen, case, sizes, dtype))


def _backends(plan: Plan) -> list[Backend]:
    if plan.backends:
        return [require_backend(name, plan.device) for name in plan.backends if name != "torch"]
    return [item for name, item in backends().items() if name not in NOT_BY_DEFAULT and item.available(plan.device)]


def _verify_case(
    plan: Plan, chosen: list[Backend], case: Example, sizes: Sizes, dtype: torch.dtype
) -> Iterator[Result]:
    def result(backend: str, **values: Any) -> Result:
        return Result(backend, case.primitive, case.label, sizes, dtype, **values)

    if not fits(sizes, plan.device):
        yield result("torch", status=SKIP, note="the float64 reference does not fit in memory")
        return
    try:
        truth = _truth(plan, case, sizes, dtype)
    except torch.OutOfMemoryError:
        yield result("torch", status=SKIP, note="out of memory in the reference")
        return
    except Exception as error:
        yield result("torch", status=FAIL, note=f"the reference raises {_line(error)}")
        return
    yield _eager_result(truth, result)
    problem = Problem(LayerOp(sizes.out, sizes.inner), sizes.rows.bit_length(), dtype, plan.device, True)
    for backend in chosen:
        verdict = backend.verdict(case.primitive, problem)
        if not verdict:
            failed = "self-test" in verdict.reason
            yield result(backend.name, status=FAIL if failed else SKIP, note=verdict.reason)
            continue
        yield _backend_result(truth, backend, case, dtype, _local(plan), result)
    del truth
    if plan.device.type == "cuda" and sizes.rows * max(sizes.inner, sizes.out) > 1 << 24:
        gc.collect()
        torch.cuda.empty_cache()


def fits(sizes: Sizes, device: torch.device) -> bool:
    """Whether a float64 run, with temporaries, fits in the device's free memory."""
    if device.type != "cuda":
        return True
    activations = sizes.rows * (sizes.inner + sizes.out)
    need = 8 * (6 * activations + 4 * sizes.inner * sizes.out)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return need < 0.8 * free


def _local(plan: Plan) -> bool:
    return plan.device.type == "cuda"


def _truth(plan: Plan, case: Example, sizes: Sizes, dtype: torch.dtype) -> _Truth:
    args = case.build(sizes, Draw(dtype, plan.device, plan.factors, seed=3, local=_local(plan)))
    reference = get_primitive(case.primitive).reference
    eager = run(reference, args, local=_local(plan))
    exact = run(reference, widened(args), local=_local(plan))
    outputs = len(eager) - len(leaves(args))
    errors = [relative_error(mine, wanted) for mine, wanted in zip(eager, exact, strict=True)]
    layout = [(item.shape, item.dtype) for item in eager]
    return _Truth(args, outputs, exact, errors, layout, _ulps(eager[:outputs], exact))


def _ulps(values: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    pairs = [ulp_errors(value, wanted) for value, wanted in zip(values, exact, strict=False)]
    return max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)


def _eager_result(truth: _Truth, result: Callable[..., Result]) -> Result:
    error, grad = _worst(truth.eager, truth.outputs)
    good = all(math.isfinite(value) for value in truth.eager)
    return result(
        "torch", status=PASS if good else FAIL, error=error, eager=error, grad=grad, eager_grad=grad,
        ulp_median=truth.ulps[0], ulp_max=truth.ulps[1], note="" if good else "eager PyTorch's result is not finite",
    )  # fmt: skip


def _worst(errors: list[float], outputs: int) -> tuple[float, float]:
    """(largest of the outputs, largest of the gradients); not-a-number counts as largest."""

    def largest(values: list[float]) -> float:
        return max((math.inf if math.isnan(value) else value for value in values), default=0.0)

    return largest(errors[:outputs]), largest(errors[outputs:])


def _backend_result(
    truth: _Truth, backend: Backend, case: Example, dtype: torch.dtype, local: bool, result: Callable[..., Result]
) -> Result:
    try:
        found = run(backend.implementation(case.primitive), truth.args, local=local)
    except torch.OutOfMemoryError:
        return result(backend.name, status=SKIP, note="out of memory")
    except Exception as failure:
        return result(backend.name, status=FAIL, note=f"raises {_line(failure)}")
    if [(item.shape, item.dtype) for item in found] != truth.layout:
        return result(backend.name, status=FAIL, note="shapes or dtypes differ from the reference's")
    errors = [relative_error(mine, wanted) for mine, wanted in zip(found, truth.exact, strict=True)]
    shares = [mine / limit(theirs, dtype) for mine, theirs in zip(errors, truth.eager, strict=True)]
    good = all(share <= 1 for share in shares)
    worst = max(range(len(shares)), key=lambda index: math.inf if math.isnan(shares[index]) else shares[index])
    error, grad = _worst(errors, truth.outputs)
    eager, eager_grad = _worst(truth.eager, truth.outputs)
    ulp_median, ulp_max = _ulps(found[: truth.outputs], truth.exact)
    what = f"output {worst}" if worst < truth.outputs else f"gradient {worst - truth.outputs}"
    note = "" if good else f"{what}: error {errors[worst]:.2e}, {limit(truth.eager[worst], dtype):.2e} allowed"
    return result(
        backend.name, status=PASS if good else FAIL, error=error, eager=eager, grad=grad, eager_grad=eager_grad,
        ratio=shares[worst], ulp_median=ulp_median, ulp_max=ulp_max, note=note,
    )  # fmt: skip


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
