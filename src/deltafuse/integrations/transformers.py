"""Causal language models and tokenizers by directory, hub id or ``.gguf`` file."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from ..core.errors import CheckpointError
from ..core.optional import require


def load_causal_lm(source: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Model in ``dtype`` and tokenizer of ``source``; CheckpointError says what is missing or broken there."""
    if source.lower().endswith(".gguf"):
        from .gguf import load_gguf

        return load_gguf(source, dtype)
    _check_source(source)
    return load_pretrained(source, dtype)


def load_pretrained(source: str, dtype: torch.dtype, shown: str = "", **where: Any) -> tuple[nn.Module, Any]:
    """``from_pretrained`` for model and tokenizer, its failures told as one CheckpointError."""
    transformers = require("transformers", extra="train", purpose="--task text")
    name = shown or source
    with bars_on_terminals_only():
        return _load_both(transformers, source, dtype, name, where)


def _load_both(
    transformers: Any, source: str, dtype: torch.dtype, name: str, where: dict[str, Any]
) -> tuple[nn.Module, Any]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"no tokenizer can be read from '{name}': {_first_line(error)}") from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, **{_dtype_name(): dtype}, **where)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"no causal language model can be read from '{name}': {_first_line(error)}") from error
    model.config.use_cache = False
    return model, tokenizer


class _WithoutBars(io.TextIOBase):
    """A stream that passes everything on but lines rewritten in place."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.in_bar = False

    def write(self, text: str) -> int:
        if text.startswith("\r"):
            self.in_bar = True
        elif not (self.in_bar and text == "\n"):
            self.in_bar = False
            self.stream.write(text)
        return len(text)


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Progress bars of loading are for people: in a file or a pipe they are left out, everything else stays."""
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(_WithoutBars(sys.stderr)):
        yield


def max_length(model: nn.Module) -> int | None:
    """The most tokens the model takes, where its config says so."""
    return getattr(model.config, "max_position_embeddings", None)


def _check_source(source: str) -> None:
    path = Path(source).expanduser()
    if path.is_file():
        raise CheckpointError(
            f"model '{source}' is a file of unknown kind. Legal: a directory, a .gguf file, a hub id."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"model directory '{source}' has no config.json.")
    looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1 or not source
    if not path.exists() and looks_local:
        raise CheckpointError(
            f"model '{source}' does not exist. Legal: a directory, a .gguf file, a hub id (owner/name)."
        )


def _dtype_name() -> str:
    """transformers 4.56 renamed ``torch_dtype``."""
    version = require("transformers", extra="train").__version__.split(".")
    return "dtype" if (int(version[0]), int(version[1])) >= (4, 56) else "torch_dtype"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
