"""What a run leaves on disk: the adapter file and the state a later run continues from. Every write is one move."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.errors import CheckpointError
from .randomness import random_state, restore_random_state

ADAPTER_FILE = "adapter.safetensors"
STATE_FILE = "state.pt"
CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "loss.png"


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` with a temporary path of the same suffix beside ``path``, then move it over ``path``."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """The process's file mode mask; some writers make files only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_adapter(network: Any, path: Path, dtype: torch.dtype, metadata: dict[str, str]) -> None:
    """Write the adapter file of ``network``; a reader never sees half of it."""
    write_atomically(path, lambda temporary: network.save_weights(str(temporary), dtype, dict(metadata)))


@dataclass
class Resumable:
    """The moving parts of a run."""

    network: nn.Module
    optimizer: Optimizer
    scheduler: Any
    scaler: Any = None

    def save(self, path: Path, step: int) -> None:
        """Write them, with the random state, after ``step`` optimizer steps."""
        content = {
            "format": 1,
            "step": step,
            "parameters": {name: p.detach().cpu() for name, p in self._tensors().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "random": random_state(),
        }
        write_atomically(path, lambda temporary: torch.save(content, temporary))

    def load(self, path: Path) -> int:
        """Take up what :meth:`save` wrote and return the step; CheckpointError where it does not fit."""
        content = _read(path)
        own = self._tensors()
        _check_fit(path, own, content["parameters"])
        with torch.no_grad():
            for name, tensor in content["parameters"].items():
                own[name].copy_(tensor)
        self.optimizer.load_state_dict(content["optimizer"])
        self.scheduler.load_state_dict(content["scheduler"])
        for group, base, factor in zip(
            self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(self.scheduler.last_epoch)  # the schedule may be longer than it was
        if self.scaler is not None and content["scaler"]:
            self.scaler.load_state_dict(content["scaler"])
        restore_random_state(content["random"])
        return int(content["step"])

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Trainable parameters and buffers as they train, not as the adapter file shows them."""
        parameters = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        return {**parameters, **dict(self.network.named_buffers())}


def read_step(path: Path) -> int:
    """The step stored in a state file."""
    return int(_read(path)["step"])


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"nothing to resume: '{path}' does not exist.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"'{path}' cannot be read as the state of a run: {error}") from error
    if not isinstance(content, dict) or content.get("format") != 1:
        raise CheckpointError(f"'{path}' is not the state of a run of this version.")
    return content


def _check_fit(path: Path, own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    for name in own.keys() ^ stored.keys():
        where = "this adapter" if name in stored else f"'{path}'"
        raise CheckpointError(f"cannot resume from '{path}': parameter '{name}' is missing in {where}.")
    for name, tensor in stored.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"cannot resume from '{path}': parameter '{name}' has shape {tuple(tensor.shape)}, "
                f"this adapter needs {tuple(own[name].shape)}."
            )
