"""The shipped base model: where its weights lie, what its file says, and how a fresh copy is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ..core.errors import CheckpointError
from .model import DigitDenoiser

BASE_WEIGHTS = Path(__file__).parent / "weights" / "digits_base.safetensors"


@dataclass(frozen=True)
class BaseFacts:
    """What the weights file says about itself."""

    left_out: int
    seed: int
    steps: int
    loss: float


def base_facts(path: Path = BASE_WEIGHTS) -> BaseFacts:
    """Read the metadata of the weights file."""
    _check_exists(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    try:
        return BaseFacts(
            left_out=int(metadata["left_out_class"]),
            seed=int(metadata["seed"]),
            steps=int(metadata["steps"]),
            loss=float(metadata["held_out_loss"]),
        )
    except KeyError as error:
        raise CheckpointError(f"{path} has no metadata entry {error}: it is not a base of the demo") from error


def load_base(path: Path = BASE_WEIGHTS) -> DigitDenoiser:
    """A fresh fp32 copy of the base, frozen and in eval mode."""
    _check_exists(path)
    # Building the layers draws random numbers that the weights then replace; the caller's stream is left alone.
    with torch.random.fork_rng(devices=[]):
        model = DigitDenoiser()
    model.load_state_dict({key: value.float() for key, value in load_file(path).items()})
    return model.requires_grad_(False).eval()


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"the weights of the demo are missing: no file {path}; reinstall the package")
