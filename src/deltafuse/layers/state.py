"""Checkpoint behaviour of an adapter module: what it saves, how it takes a file's tensors back.

Subclasses say what they save (``own_state``) and may reshape a file's tensors to their parameters (``adopt``). Saved
tensors are whole: scalars folded in, contiguous, unshared. Loading checks every shape first and names key and layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError


class StatefulModule(nn.Module):
    """nn.Module whose state dict is a set of named tensors chosen by the algorithm."""

    lora_name: str

    def __init__(self) -> None:
        super().__init__()
        self._register_load_state_dict_pre_hook(self._before_load)

    # saving

    def custom_state_dict(self) -> Mapping[str, Tensor] | None:
        """Tensors to save by key, or None to save all parameters and persistent buffers."""
        return None

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The saved tensors; positional arguments as in older PyTorch."""
        names = ("destination", "prefix", "keep_vars")
        given = dict(zip(names, args, strict=False))
        destination = given.get("destination", destination)
        prefix, keep_vars = given.get("prefix", prefix), given.get("keep_vars", keep_vars)
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        own = self.custom_state_dict()
        if own is None:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for key, value in own.items():
            destination[prefix + key] = value if keep_vars else value.detach().contiguous()
        return destination

    # loading

    def adopt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A file's tensors by key -> this module's parameters and buffers by name."""
        return tensors

    def after_load(self) -> None:
        """Refresh what was derived from loaded tensors."""

    def _before_load(self, state_dict: Any, prefix: str, *_: Any) -> None:
        tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        if not tensors:
            return
        adopted = self.adopt(dict(tensors))
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, value in adopted.items():
            if name in own and tuple(own[name].shape) != tuple(value.shape):
                adopted[name] = self._reshape(name, value, own[name])
        for key in tensors:
            del state_dict[prefix + key]
        state_dict.update({prefix + name: value for name, value in adopted.items()})

    def other_shapes(self, key: str) -> tuple[tuple[int, ...], ...]:
        """Shapes of a saved tensor that :meth:`adopt` takes besides the module's own."""
        return ()

    def refuse_misfits(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise where a file's tensor, by key without prefix, does not fit this module; nothing is changed."""
        own = self.state_dict()
        for key, value in tensors.items():
            if key in own and tuple(value.shape) not in self.other_shapes(key):
                self._reshape(key, value, own[key])

    def _reshape(self, name: str, value: Tensor, own: Tensor) -> Tensor:
        squeezed = [side for side in own.shape if side != 1] == [side for side in value.shape if side != 1]
        if squeezed and value.numel() == own.numel():
            return value.reshape(own.shape)
        raise CheckpointError(
            f"key '{self.lora_name}.{name}' has shape {tuple(value.shape)}, but layer '{self.lora_name}' "
            f"({type(self).__name__}) needs {tuple(own.shape)}: the file was made with other dimensions or options"
        )


def folded(factor: Tensor, scalar: Tensor | None) -> Tensor:
    """A factor with the learnable scalar multiplied in, where there is one."""
    return factor if scalar is None else factor * scalar


def as_float(value: Any) -> float:
    """A number from an int, float, numpy scalar, 0-d or one-element tensor of any dtype."""
    if isinstance(value, Tensor):
        return float(value.detach().to(torch.float64).reshape(-1)[0])
    return float(value)
