"""Primitives: the few operations that backends implement. Importing this package defines them all."""

from . import gemm, glora, kron, linear, lowrank, norms, rotation, scaling
from .registry import Kernels, Primitive, get_primitive, kernel_table, primitives

__all__ = [
    "Kernels",
    "Primitive",
    "gemm",
    "get_primitive",
    "glora",
    "kernel_table",
    "kron",
    "linear",
    "lowrank",
    "norms",
    "primitives",
    "rotation",
    "scaling",
]
