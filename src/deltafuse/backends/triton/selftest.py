"""A tiny forward and backward against the reference, the first time a device uses an operation.

Once for each primitive, device and dtype of a process. A failure switches the primitive off for that device: the
verdict says why, and the registry turns it into one line in the log, or into an error under ``DELTAFUSE_STRICT`` and
for a backend asked for by name.

The test draws from generators of its own, so random states stay as they are. It waits for the device, once. It is put
off while torch.compile traces and while a CUDA graph is captured: neither can run it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ...core.verdict import Verdict
from ...primitives import get_primitive
from ...primitives.examples import Draw, Example, examples, limit, relative_error, run, widened
from ...primitives.shapes import TINY
from .tuning import without_timing

KINDS = {"cuda"}
"""Device types that are tested; on a CPU the test suite runs the same examples in Triton's interpreter."""
PASSED = Verdict(True, "self-test passed")
_POSTPONED = Verdict(True, "self-test put off: tracing or capturing")
_verdicts: dict[tuple[str, torch.device, torch.dtype], Verdict] = {}
_broken: dict[tuple[str, torch.device], Verdict] = {}
_lock = threading.RLock()
_running = threading.local()


def check(
    primitive: str, device: torch.device, dtype: torch.dtype, function: Callable[[], Callable[..., Any]]
) -> Verdict:
    """Whether ``primitive`` works on ``device``; runs the test at the first call. ``function()`` is what to test."""
    if device.type not in KINDS or getattr(_running, "now", False):
        return PASSED
    device = _indexed(device)
    if (primitive, device) in _broken:
        return _broken[primitive, device]
    if (primitive, device, dtype) in _verdicts:
        return _verdicts[primitive, device, dtype]
    if _postponed(device):
        return _POSTPONED
    with _lock:
        if (primitive, device, dtype) not in _verdicts:
            verdict = _verdicts[primitive, device, dtype] = _test(primitive, device, dtype, function)
            if not verdict:
                _broken[primitive, device] = verdict
        return _verdicts[primitive, device, dtype]


def forget() -> None:
    """Test everything anew."""
    _verdicts.clear()
    _broken.clear()


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _postponed(device: torch.device) -> bool:
    """Whether a trace or a capture is under way."""
    if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
        return True
    if torch._guards.detect_fake_mode() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _test(
    primitive: str, device: torch.device, dtype: torch.dtype, function: Callable[[], Callable[..., Any]]
) -> Verdict:
    _running.now = True
    try:
        with (
            torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False),
            torch.autograd.graph.saved_tensors_hooks(_keep, _keep), without_timing(),
        ):  # fmt: skip
            tested = function()
            for case in examples(primitive):
                wrong = _compare(case, device, dtype, tested)
                if wrong:
                    return Verdict(False, f"its self-test on {device} in {dtype} fails at '{case.label}': {wrong}")
    except torch.OutOfMemoryError:
        return Verdict(True, "self-test left out: no memory")
    except Exception as error:
        line = (str(error).splitlines() or [""])[0][:200]
        return Verdict(False, f"its self-test on {device} in {dtype} raises {type(error).__name__}: {line}")
    finally:
        _running.now = False
    return PASSED


def _keep(value: Any) -> Any:
    """Saved tensors stay where they are, whatever hooks the caller has installed."""
    return value


def _compare(case: Example, device: torch.device, dtype: torch.dtype, tested: Callable[..., Any]) -> str:
    """What is wrong with one example, or nothing."""
    reference = get_primitive(case.primitive).reference
    for sizes in TINY:
        args = case.build(sizes, Draw(dtype, device, seed=5))
        exact, eager, found = run(reference, widened(args)), run(reference, args), run(tested, args)
        if [(item.shape, item.dtype) for item in found] != [(item.shape, item.dtype) for item in eager]:
            return "shapes or dtypes differ from the reference's"
        for index, (mine, theirs, wanted) in enumerate(zip(found, eager, exact, strict=True)):
            error, allowed = relative_error(mine, wanted), limit(relative_error(theirs, wanted), dtype)
            if not error <= allowed:
                what = "the result" if index == 0 else f"gradient {index}"
                return f"error {error:.1e} in {what}, {allowed:.1e} allowed"
    return ""
