"""Options that several commands share: device, dtype, and a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from ..core.errors import OptionError, unknown_name

if TYPE_CHECKING:
    import torch

_DTYPES = {"float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "half": "float16",
           "bfloat16": "bfloat16", "bf16": "bfloat16"}  # fmt: skip
Item = TypeVar("Item")


def parse_device(name: str | None) -> torch.device:
    """The device asked for, by default the GPU where there is one; an OptionError says what is wrong with it."""
    import torch

    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name.strip().lower())
    except RuntimeError as error:
        raise OptionError(unknown_name("device", name, ["cpu", "cuda", "cuda:1"])) from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise OptionError(f"device '{name}' is not there: {count} CUDA devices were found")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu":
        raise OptionError(f"device '{name}': this command runs on cpu and cuda")
    return device


def parse_dtype(name: str) -> torch.dtype:
    """A floating-point dtype by its name or a short form of it."""
    import torch

    known = _DTYPES.get(name.strip().lower().removeprefix("torch."))
    if known is None:
        raise OptionError(unknown_name("dtype", name, _DTYPES))
    found: torch.dtype = getattr(torch, known)
    return found


def progress(items: Iterable[Item], total: int, title: str) -> Iterator[Item]:
    """``items``, with a bar on standard error where that is a terminal."""
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc=title, disable=not sys.stderr.isatty(), leave=False)
