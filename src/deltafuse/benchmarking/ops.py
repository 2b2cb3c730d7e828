"""One primitive at a time, forward and backward together: eager PyTorch, torch.compile of it, and a backend's kernels.

Each arm is checked against float64 on the very arguments it is timed on; a wrong arm is not timed. A compiled arm's
gradients are also compared with eager's. Arms take turns in shuffled rounds. Every sample is kept:

device  events around one call, cold in L2 and behind a backlog
wall    a loop of calls until the device is done
host    the same loop until everything is enqueued

The floor is the larger of bytes over the copy rate and flops over the product rate, both measured on the card first.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends import backends, require_backend
from ..core.geometry import LayerOp
from ..core.problem import Problem
from ..core.timing import device_seconds
from ..primitives import get_primitive, shapes
from ..primitives.examples import (
    Draw,
    Example,
    Sizes,
    examples,
    floor_of,
    incoming_for,
    leaves,
    limit,
    outputs_of,
    relative_error,
    run,
    widened,
)  # fmt: skip
from ..verification.sweep import fits
from .measure import copy_rate, launches, peak_bytes, product_rate, wall_and_host
from .provenance import provenance

EAGER, COMPILE = "eager", "compile"
DEFAULT_ARMS = (EAGER, COMPILE, "triton")
WARM_UP = 3


@dataclass(frozen=True)
class Plan:
    """What to time. rounds: samples of each arm. calls: length of the loop behind one wall sample."""

    device: torch.device
    dtypes: Sequence[torch.dtype]
    sizes: Sequence[Sizes]
    primitives: Sequence[str] = ()
    arms: Sequence[str] = DEFAULT_ARMS
    rounds: int = 15
    calls: int = 10
    factors: torch.dtype = torch.float32
    first_example_only: bool = False


@dataclass
class Arm:
    """One way to compute it. error: the worst relative error of any output or gradient. us: microseconds."""

    name: str
    note: str = ""
    error: float | None = None
    device_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    launches: int | None = None
    profiler_us: float | None = None
    call: Callable[[], Any] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in self.__dict__.items() if key not in ("call", "name")}
        return {key: [round(item, 3) for item in value] if isinstance(value, list) else value
                for key, value in plain.items()}  # fmt: skip


@dataclass
class Row:
    """One example at one size and dtype."""

    primitive: str
    example: str
    sizes: Sizes
    dtype: torch.dtype
    bytes: float = 0.0
    flops: float = 0.0
    floor_us: float = 0.0
    arms: dict[str, Arm] = field(default_factory=dict)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        head = {"primitive": self.primitive, "example": self.example, "sizes": shapes.name(self.sizes)}
        tail = {"arms": {name: arm.to_dict() for name, arm in self.arms.items()}, "note": self.note}
        cost = {"bytes": self.bytes, "flops": self.flops, "floor_us": round(self.floor_us, 3)}
        return {**head, "dtype": str(self.dtype).removeprefix("torch."), **cost, **tail}


def cases(plan: Plan) -> Iterator[tuple[Example, Sizes, torch.dtype]]:
    """What is timed, in order; an unknown primitive is an OptionError."""
    for name in plan.primitives:
        get_primitive(name)
    names = plan.primitives or list(dict.fromkeys(case.primitive for case in examples()))
    for name in names:
        found = list(examples(name))
        for case in found[:1] if plan.first_example_only else found:
            for sizes in plan.sizes:
                for dtype in plan.dtypes:
                    yield case, sizes, dtype


def bench(plan: Plan, out: Path | None = None, commit: str = "") -> Iterator[Row]:
    """Measure every case; ``out`` is rewritten after each one, so that a run cut short keeps what it has."""
    facts = provenance(plan.device, commit)
    for name in plan.arms:
        if name not in (EAGER, COMPILE):
            require_backend(name, plan.device)
    facts["copy_rate"] = copy_rate(plan.device)
    facts["product_rate"] = {str(dtype): product_rate(plan.device, dtype) for dtype in plan.dtypes}
    rows: list[Row] = []
    for case, sizes, dtype in cases(plan):
        rows.append(measure_case(plan, case, sizes, dtype))
        if out is not None:
            record = {"provenance": facts, "rows": [row.to_dict() for row in rows]}
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        yield rows[-1]


def measure_case(plan: Plan, case: Example, sizes: Sizes, dtype: torch.dtype) -> Row:
    """Check every arm, then time those that are right."""
    row = Row(case.primitive, case.label, sizes, dtype)
    torch._dynamo.reset()
    if not fits(sizes, plan.device):
        row.note = "the float64 check does not fit in memory"
        return row
    try:
        _measure(plan, case, row)
    except torch.OutOfMemoryError:
        row.note = "out of memory"
    for arm in row.arms.values():
        arm.call = None
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _measure(plan: Plan, case: Example, row: Row) -> None:
    local = plan.device.type == "cuda"
    args = case.build(row.sizes, Draw(row.dtype, plan.device, plan.factors, seed=7, local=local))
    reference = get_primitive(case.primitive).reference
    eager = run(reference, args, local=local)
    exact = run(reference, widened(args), local=local)
    errors = [relative_error(mine, wanted) for mine, wanted in zip(eager, exact, strict=True)]
    outputs = eager[: len(eager) - len(leaves(args))]
    row.bytes, row.flops = floor_of(case.primitive, row.sizes, row.dtype.itemsize, args, outputs)
    rate = product_rate(plan.device, row.dtype)
    row.floor_us = 1e6 * max(row.bytes / copy_rate(plan.device), row.flops / rate)
    incoming = incoming_for(outputs, local=local)
    for name in plan.arms:
        arm = row.arms[name] = Arm(name)
        try:
            function = _function(name, case, row, plan.device)
            arm.error = _check(name, run(function, args, local=local), exact, eager, errors, row.dtype)
            arm.call = _step(function, args, incoming)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            arm.note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    del exact, eager, outputs
    _time([arm for arm in row.arms.values() if arm.call is not None], plan)


class WrongResult(RuntimeError):
    """An arm that computes something else, or nothing, is not timed."""


def _function(name: str, case: Example, row: Row, device: torch.device) -> Callable[..., Any]:
    reference = get_primitive(case.primitive).reference
    if name == EAGER:
        return reference
    if name == COMPILE:
        verdict = backends()["compile"].available(device)
        if not verdict:
            raise RuntimeError(verdict.reason)
        return torch.compile(reference)
    backend = require_backend(name, device)
    problem = Problem(LayerOp(row.sizes.out, row.sizes.inner), row.sizes.rows.bit_length(), row.dtype, device, True)
    verdict = backend.verdict(case.primitive, problem)
    if not verdict:
        raise RuntimeError(verdict.reason)
    return backend.implementation(case.primitive)


def _check(
    name: str, found: list[Tensor], exact: list[Tensor], eager: list[Tensor], errors: list[float], dtype: torch.dtype
) -> float:
    """The worst error of any output or gradient; WrongResult where one is beyond the limit, not finite or lost."""
    if len(found) != len(exact):
        raise WrongResult(f"{len(found)} tensors where {len(exact)} are due")
    worst = 0.0
    for index, (mine, wanted, theirs, error) in enumerate(zip(found, exact, eager, errors, strict=True)):
        if not bool(torch.isfinite(mine).all()):
            raise WrongResult(f"tensor {index} is not finite")
        if bool(wanted.any()) and not bool(mine.any()):
            raise WrongResult(f"tensor {index} is zero")
        own = relative_error(mine, wanted)
        if name != EAGER and own > limit(error, dtype):
            raise WrongResult(f"tensor {index}: error {own:.1e}, {limit(error, dtype):.1e} allowed")
        if name == COMPILE and relative_error(mine, theirs) > 2 * limit(error, dtype):
            raise WrongResult(f"tensor {index} differs from eager's by {relative_error(mine, theirs):.1e}")
        worst = max(worst, own)
    return worst


def _step(function: Callable[..., Any], args: tuple[Any, ...], incoming: list[Tensor]) -> Callable[[], Any]:
    """Forward and backward; gradients are returned, not accumulated, so nothing grows from call to call."""
    wanted = leaves(args)
    if not wanted:
        return lambda: function(*args)
    return lambda: torch.autograd.grad(outputs_of(function(*args)), wanted, incoming)


def _time(arms: list[Arm], plan: Plan) -> None:
    calls = [arm.call for arm in arms if arm.call is not None]
    for call in calls * WARM_UP:
        call()
    for arm, call in zip(arms, calls, strict=True):
        arm.peak_bytes = peak_bytes(call, plan.device)
        arm.launches, arm.profiler_us = launches(call, plan.device)
    for arm, samples in zip(arms, device_seconds(calls, plan.rounds, plan.device), strict=True):
        arm.device_us = [1e6 * value for value in samples]
    shuffler = random.Random(1)
    for _ in range(plan.rounds):
        for index in shuffler.sample(range(len(arms)), len(arms)):
            wall, host = wall_and_host(calls[index], plan.calls, plan.device)
            arms[index].wall_us.append(1e6 * wall)
            arms[index].host_us.append(1e6 * host)


def median(samples: Sequence[float]) -> float | None:
    """The median, or None where there are no samples."""
    return statistics.median(samples) if samples else None
