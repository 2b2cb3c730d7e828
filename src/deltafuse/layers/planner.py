"""The planner: per layer and shape, the cheapest exact form.

merged: W' once, then one product. Its backward also needs a full product for the gradient of W'.
bypass: base product plus the delta's own small path.
split: base product plus a product with the dense delta; only where nothing else is exact (dropout on a delta that
has no bypass form, or a layer whose base runs its own forward).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backends import Selection, select
from ..core.cost import Cost
from ..core.device import ceilings
from ..core.errors import BackendError, OptionError
from ..core.geometry import LayerOp
from ..core.problem import Plan, Problem
from ..core.verdict import Verdict
from ..deltas import Delta
from ..deltas.base import product_cost

FORMS = ("bypass", "merged", "split")
NOMINAL_ROWS = 4096
"""Row count that a layer is planned for where the real one is not known: in a report, or under torch.compile."""


@dataclass(frozen=True)
class Needs:
    """What a call asks of a form. branch_only: the base runs its own forward and only the delta is ours to compute."""

    branch_only: bool = False
    dropout: bool = False
    forced: str | None = None


def plan(delta: Delta, problem: Problem, needs: Needs, requested: str) -> Plan:
    """The form, its backend and the reason, for one layer and row bucket."""
    form, why = _choose_form(delta, problem, needs, requested)
    selection = _backend(delta, problem, form, requested)
    cost = _form_cost(delta, problem, form, selection.fused)
    return Plan(form, selection.backend, f"{why}; {selection.reason}", selection.kernels, cost)


def _choose_form(delta: Delta, problem: Problem, needs: Needs, requested: str) -> tuple[str, str]:
    legal = _legal_forms(delta, problem, needs)
    allowed = [form for form in FORMS if legal[form]]
    if not allowed:
        raise OptionError("; ".join(f"{form}: {legal[form].reason}" for form in FORMS))
    forced = needs.forced
    if forced in allowed:
        return str(forced), "asked for by bypass_mode"
    note = f"{forced} was asked for but {legal[forced].reason}; " if forced else ""
    if len(allowed) == 1:
        others = "; ".join(f"{form}: {legal[form].reason}" for form in FORMS if not legal[form])
        return allowed[0], f"{note}only exact form ({others})"
    seconds = {form: _seconds(delta, problem, form, _fused(delta, problem, form, requested)) for form in allowed}
    best = min(allowed, key=lambda form: seconds[form])
    times = ", ".join(f"{form} {1e6 * seconds[form]:.0f} us" for form in allowed)
    return best, f"{note}cheapest by flops and bytes over the base ({times})"


def _legal_forms(delta: Delta, problem: Problem, needs: Needs) -> dict[str, Verdict]:
    bypass = delta.can_bypass(problem.op)
    merged = delta.can_merge(problem.op)
    split = merged
    if merged and needs.dropout:
        merged = Verdict(False, "dropout acts on the delta's output, which a merged weight does not show")
    if merged and needs.branch_only:
        merged = Verdict(False, "the base runs its own forward, so only the delta is added")
    if split and bypass:
        split = Verdict(False, "the bypass form needs no dense delta")
    elif split and merged:
        split = Verdict(False, "the merged form needs one product less")
    return {"bypass": bypass, "merged": merged, "split": split}


def _fused(delta: Delta, problem: Problem, form: str, requested: str) -> bool:
    """Whether fused backends would run ``form``; a named backend that cannot run it is told when it is chosen."""
    try:
        return _backend(delta, problem, form, requested).fused
    except BackendError:
        return False


def _form_cost(delta: Delta, problem: Problem, form: str, fused: bool = False) -> Cost:
    """Work of one forward over the frozen layer's."""
    op, size = problem.op, problem.dtype.itemsize
    if form == "bypass":
        return (delta.fused_cost if fused else delta.bypass_cost)(op, problem.rows, size)
    elements = op.out * op.fan_in
    build = delta.dense_cost(op) + Cost(bytes=float(4 + 2 * size) * elements, launches=2, saved=float(size) * elements)
    return build if form == "merged" else build + product_cost(problem.rows, op.fan_in, op.out, size)


def _seconds(delta: Delta, problem: Problem, form: str, fused: bool = False) -> float:
    """Forward, and in training twice that for backward; a dense weight's gradient is one more full product."""
    cost = _form_cost(delta, problem, form, fused)
    limits = ceilings(problem.device)
    total = cost
    if problem.training:
        total = cost + cost + cost
        if form != "bypass":
            op = problem.op
            total = total + product_cost(op.out, problem.rows, op.fan_in, problem.dtype.itemsize)
    return total.seconds(limits.flops(problem.dtype), limits.bytes, limits.launch)


def _backend(delta: Delta, problem: Problem, form: str, requested: str) -> Selection:
    uses = {"bypass": delta.uses, "merged": delta.merge_uses}
    names = uses[form](problem.op) if form in uses else ()
    return select(names, problem, requested)


def bucket(rows: int) -> int:
    """Row bucket: all counts with the same bit length are planned as one."""
    return int(rows).bit_length()


def problem_for(op: LayerOp, rows: int, dtype: torch.dtype, device: torch.device, training: bool) -> Problem:
    """A Problem for ``rows`` rows."""
    return Problem(op, bucket(rows), dtype, device, training)
