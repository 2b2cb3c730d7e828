"""Tuning ahead of time: the operations run forward and backward at given sizes, and every kernel they launch is timed.

Nothing here knows a kernel: whatever asks :mod:`deltafuse.backends.triton.tuning` for a configuration is tuned. A
result is stored the moment it is there; what is stored already is not timed again unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..backends import require_backend
from ..backends.triton import OPERATIONS, tuning
from ..backends.triton.store import Entries, Store
from ..core.errors import OptionError, unknown_name
from ..primitives.examples import Draw, Example, Sizes, examples, run

BACKEND = "triton"


@dataclass(frozen=True)
class Plan:
    """What to tune. again: time what is stored already, too."""

    device: torch.device
    dtypes: Sequence[torch.dtype]
    sizes: Sequence[Sizes]
    primitives: Sequence[str] = ()
    again: bool = False
    factors: torch.dtype = torch.float32


@dataclass
class Report:
    """outcomes of this run; notes on what could not run; where results are stored."""

    store: Path
    outcomes: list[tuning.Outcome] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)


def cases(plan: Plan) -> list[tuple[Example, Sizes, torch.dtype]]:
    """The calls that are made; a primitive without kernels is an OptionError."""
    for name in plan.primitives:
        if name not in OPERATIONS:
            raise OptionError(unknown_name("operation", name, OPERATIONS, "of the triton backend"))
    names = plan.primitives or list(OPERATIONS)
    return [
        (case, sizes, dtype)
        for dtype in plan.dtypes
        for sizes in plan.sizes
        for name in names
        for case in examples(name)
    ]


def tune(plan: Plan, report: Report) -> Iterator[Report]:
    """Run every case, yielding after each; outcomes collect in ``report``."""
    backend = require_backend(BACKEND, plan.device)
    local = plan.device.type == "cuda"
    with tuning.forced("lazy", plan.again, report.outcomes.append):
        for case, sizes, dtype in cases(plan):
            function = backend.implementation(case.primitive)
            try:
                run(
                    function,
                    case.build(sizes, Draw(dtype, plan.device, plan.factors, seed=9, local=local)),
                    local=local,
                )
            except torch.OutOfMemoryError:
                report.notes[f"{sizes.rows} x {sizes.out} x {sizes.inner}: out of memory"] = None
                torch.cuda.empty_cache()
            yield report


def start(plan: Plan) -> Report:
    """An empty report for ``plan``."""
    return Report(tuning.user_store(plan.device).path)


def recorded(device: torch.device) -> Entries:
    """Every stored entry of this card that the kernels and Triton of today would use."""
    stamp = tuning.triton_version()
    held = tuning.user_store(device).entries()
    return {
        name: {key: entry for key, entry in held[name].items()
               if entry.get("version") == item.version and entry.get("triton") == stamp}
        for name, item in tuning.tunables().items() if name in held
    }  # fmt: skip


def write_table(path: Path, device: torch.device) -> int:
    """Merge what is recorded for ``device`` into a table file that can be shipped; returns the number of entries."""
    found = recorded(device)
    Store(path, tuning.card_name(device)).merge(found)
    return sum(len(items) for items in found.values())
