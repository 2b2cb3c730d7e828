"""How programs that share a sum find out which of them is last, so that it adds their parts in order: no atomics on
floating-point numbers, the same result every time."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive_last(counter_ptr, chunks):
    """Whether this program is the last of ``chunks`` to arrive; leaves the counter at zero for the next launch."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    last = seen == chunks - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
