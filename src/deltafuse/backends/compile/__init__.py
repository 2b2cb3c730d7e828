"""torch.compile of each primitive's reference, one compiled function per primitive, dynamic in the row count.

``auto`` does not take it: no measurement says that compiling a single primitive beats eager PyTorch. Asked for by
name it runs, or raises with what is missing (a C++ compiler on CPU, Triton on CUDA).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...core.problem import Problem
from ...core.verdict import Verdict
from ...primitives import get_primitive
from ..registry import Backend, register_backend


@lru_cache(maxsize=1)
def _host_compiler() -> str | None:
    return next(filter(None, (shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


@lru_cache(maxsize=64)
def _compiled(primitive: str) -> Callable[..., Any]:
    reference = get_primitive(primitive).reference
    compiled = torch.compile(reference, dynamic=True)

    def run(*args: Any) -> Any:
        return reference(*args) if torch.compiler.is_compiling() else compiled(*args)

    return run


class CompileBackend(Backend):
    """Inductor on one primitive at a time."""

    name = "compile"
    order = 50
    summary = "torch.compile per primitive"

    def available(self, device: torch.device | None = None) -> Verdict:
        kind = "cpu" if device is None and not torch.cuda.is_available() else "cuda" if device is None else device.type
        if kind == "cuda" and importlib.util.find_spec("triton") is None:
            return Verdict(False, "torch.compile on CUDA needs the package 'triton'")
        if kind == "cpu" and _host_compiler() is None:
            return Verdict(False, "torch.compile on CPU needs a C++ compiler on the PATH")
        return Verdict(True, "torch.compile")

    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        return Verdict(True, "traced from the reference")

    def competes(self, primitive: str, problem: Problem) -> Verdict:
        return Verdict(False, "not measured faster than eager for single primitives")

    def implementation(self, primitive: str) -> Callable[..., Any]:
        return _compiled(primitive)


register_backend(CompileBackend())
