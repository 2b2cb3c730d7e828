"""Primitives: the few operations that backends implement. Importing this package defines them all."""

from . import conv, decomposed, gemm, kron, linear, lowrank, norms, rotation, scaling, two_sided
from .registry import Kernels, Primitive, get_primitive, kernel_table, primitives

__all__ = [
    "decomposed",
    "Kernels",
    "Primitive",
    "conv",
    "gemm",
    "get_primitive",
    "kernel_table",
    "kron",
    "linear",
    "lowrank",
    "norms",
    "primitives",
    "rotation",
    "scaling",
    "two_sided",
]
