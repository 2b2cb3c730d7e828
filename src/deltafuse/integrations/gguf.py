"""Models in ``.gguf`` files, dequantized on load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError
from ..core.optional import require

MAGIC = b"GGUF"


def load_gguf(source: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Causal language model in ``dtype`` and tokenizer of a ``.gguf`` file."""
    path = Path(source).expanduser()
    check_gguf(path)
    require("gguf", extra="train", purpose="a .gguf model")
    from .transformers import load_pretrained

    return load_pretrained(str(path.parent), dtype, shown=source, gguf_file=path.name)


def check_gguf(path: Path) -> None:
    """CheckpointError unless ``path`` is a file that starts as a GGUF file does."""
    if not path.is_file():
        raise CheckpointError(f"model file '{path}' does not exist.")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise CheckpointError(f"model file '{path}' is not a GGUF file: it starts with {start!r}, not {MAGIC!r}.")
