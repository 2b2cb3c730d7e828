"""The LyCORIS names of the adapter base classes."""

from torch import Tensor, nn

from ..bases import is_scaled_fp8
from ..bases import is_scaled_fp8 as is_weight_only_fp8_linear
from ..bases.dense import ScaledFp8Base
from ..core.errors import TargetError
from ..core.geometry import LayerOp
from ..layers.adapter import Adapter as LycorisBaseModule
from ..layers.state import StatefulModule as ModuleCustomSD

FP8_ALGORITHMS = frozenset({"lora", "locon", "loha", "lokr", "glora"})


def is_linear_like_module(module: nn.Module) -> bool:
    """Whether ``module`` multiplies by a weight matrix."""
    return isinstance(module, nn.Linear) or is_scaled_fp8(module)


def is_supported_linear_module(module: nn.Module, algo_name: str, *, weight_decompose: bool = False) -> bool:
    """Whether ``algo_name`` can sit on this linear layer."""
    if is_scaled_fp8(module):
        return algo_name in FP8_ALGORITHMS
    return isinstance(module, nn.Linear)


def dequantize_weight_only_fp8(module: nn.Module) -> Tensor:
    """The dense float32 weight of a weight-only FP8 layer."""
    op = LayerOp.of(module)
    if op is None:
        raise TargetError(f"{type(module).__name__} is no linear layer")
    return ScaledFp8Base(module, op).weight()


__all__ = [
    "LycorisBaseModule",
    "ModuleCustomSD",
    "dequantize_weight_only_fp8",
    "is_linear_like_module",
    "is_supported_linear_module",
    "is_weight_only_fp8_linear",
]
