"""Triton: fused kernels for NVIDIA and AMD GPUs, and for CPU tensors in Triton's interpreter where tests ask for it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...core.problem import Problem
from ...core.verdict import Verdict
from ..registry import Backend, register_backend

OPERATIONS = {
    "lowrank_linear": "lowrank_linear",
    "kron_linear": "kron_linear",
    "kron_apply": "kron_linear",
    "kron_merge": "kron_merge",
    "khatri_rao": "khatri_rao",
    "lowrank_merge": "lowrank_merge",
    "conv_epilogue": "conv_epilogue",
    "tucker_fold": "tucker",
    "tucker_merge": "tucker",
    "glora_linear": "glora_linear",
    "scaled_linear": "scaled_linear",
    "channel_scale": "channel_scale",
    "scaled_add": "scaled_add",
    "columns_linear": "columns_linear",
    "decomposed_linear": "decomposed_linear",
    "decomposition_gain": "norms",
    "norm_compose": "norms",
    "weight_norm": "norms",
}
"""Primitive -> module of ``ops`` that implements it under the same name."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (``TRITON_INTERPRET=1``, read by Triton itself)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class TritonBackend(Backend):
    """One fused operation per primitive and direction."""

    name = "triton"
    order = 10
    summary = "fused Triton kernels"
    fused = True

    def available(self, device: torch.device | None = None) -> Verdict:
        if not _installed():
            return Verdict(False, "the package 'triton' is not installed")
        kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cpu" and interpreted():
            return Verdict(True, "Triton's interpreter on CPU tensors")
        if kind != "cuda":
            return Verdict(False, f"Triton kernels run on GPUs, this is {kind}")
        if not torch.cuda.is_available():
            return Verdict(False, "no CUDA device")
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability < (8, 0):
            return Verdict(False, f"compute capability {capability[0]}.{capability[1]}: the kernels need 8.0")
        return Verdict(True, "Triton kernels")

    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        if primitive not in OPERATIONS:
            return Verdict(False, f"no Triton kernel for {primitive}")
        if problem.dtype not in DTYPES:
            return Verdict(False, f"{problem.dtype} runs the reference")
        if problem.device.type == "cpu" and problem.dtype == torch.bfloat16:
            return Verdict(False, "Triton's interpreter multiplies bfloat16 wrongly")
        from .selftest import check

        tested = check(primitive, problem.device, problem.dtype, lambda: self.implementation(primitive))
        return Verdict(True, "fused kernel") if tested else tested

    def competes(self, primitive: str, problem: Problem) -> Verdict:
        if problem.device.type != "cuda":
            return Verdict(False, "the interpreter is for tests")
        if primitive not in OPERATIONS:
            return Verdict(False, f"no kernel for {primitive}")
        if problem.dtype not in DTYPES:
            return Verdict(False, f"no kernels for {problem.dtype}")
        return Verdict(True, "fused kernels")

    def implementation(self, primitive: str) -> Callable[..., Any]:
        module = importlib.import_module(f".ops.{OPERATIONS[primitive]}", __package__)
        return getattr(module, primitive)  # type: ignore[no-any-return]


register_backend(TritonBackend())
