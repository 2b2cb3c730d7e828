"""Language-model training on text files."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..core.errors import DataError, OptionError
from .task import Split, make_loader, mean_loss

SUFFIXES = (".txt", ".md", ".py", ".jsonl")


def find_files(places: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Files named by paths, directories (searched for ``suffixes``) and globs, sorted and without repeats."""
    if not places:
        raise DataError("no data given: --data takes files, directories or globs.")
    found: list[Path] = []
    for place in places:
        found += _files_at(place, suffixes)
    return sorted({path.resolve(): path for path in found}.values())


def _files_at(place: str, suffixes: Sequence[str]) -> list[Path]:
    path = Path(place).expanduser()
    if path.is_file():
        if path.stat().st_size == 0:
            raise DataError(f"data file '{place}' is empty.")
        return [path]
    inside = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    files = [item for item in inside if item.is_file() and item.stat().st_size]
    if path.is_dir():
        files = [item for item in files if item.suffix.lower() in suffixes]
    if not files:
        what = f"holds no {', '.join(suffixes)} file with content" if path.is_dir() else "does not exist"
        raise DataError(f"data '{place}' {what}.")
    return files


def read_documents(path: Path) -> list[str]:
    """Texts of a file: one, or one per line of a ``.jsonl`` file; DataError names the file, and the line."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"data file '{path}' cannot be read: {error.strerror or error}") from error
    if b"\0" in raw:
        raise DataError(f"data file '{path}' is binary (it holds NUL bytes); text in UTF-8 is needed.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data file '{path}' is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}."
        ) from error
    if path.suffix.lower() == ".jsonl":
        return [_record(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [text] if text.strip() else []


def _record(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"data file '{path}' line {number} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f"data file '{path}' line {number} must be an object with a string \"text\".")
    return record["text"]


def split_files(files: Sequence[Path], fraction: float, seed: int) -> tuple[list[Path], list[Path]]:
    """Training and held-out files: at least one of each where there are two; one file alone is all for training."""
    if fraction == 0 or len(files) < 2:
        return list(files), []
    count = min(len(files) - 1, max(1, round(fraction * len(files))))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    held = set(order[:count])
    return [f for i, f in enumerate(files) if i not in held], [f for i, f in enumerate(files) if i in held]


class Blocks(Dataset[torch.Tensor]):
    """Token ids, (blocks, seq_len), one row per sample."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index]


class TextTask:
    """Next-token prediction in packed blocks of ``seq_len`` tokens; files are told apart by an end-of-text token."""

    name = "text"

    def __init__(self, train: torch.Tensor, held_out: torch.Tensor | None) -> None:
        self.data = {"train": Blocks(train), "held_out": None if held_out is None else Blocks(held_out)}

    def batches(self, split: Split, batch_size: int) -> DataLoader[Any] | None:
        """Batches of ids, (batch, seq_len)."""
        data = self.data[split]
        return None if data is None else make_loader(data, batch_size, split)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Mean negative log-likelihood per token, in nats."""
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    def evaluate(self, model: nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, float]:
        """Loss and perplexity."""
        values = mean_loss(self, model, batches)
        return {**values, "perplexity": math.exp(min(values["loss"], 80.0))}


def make_text_task(
    tokenizer: Any,
    data: Sequence[str],
    *,
    seq_len: int,
    held_out: float = 0.1,
    held_out_data: Sequence[str] = (),
    max_len: int | None = None,
    seed: int = 0,
) -> TextTask:
    """Read, split, tokenise and pack. DataError and OptionError say what is wrong with data or block length."""
    if max_len is not None and seq_len > max_len:
        raise OptionError(f"option 'seq_len' is {seq_len}; the model takes at most {max_len} tokens.")
    files = find_files(data)
    if held_out_data:
        train_files, held_files = files, find_files(held_out_data)
    else:
        train_files, held_files = split_files(files, held_out, seed)
    train = tokenise(tokenizer, train_files)
    if held_files:
        held = tokenise(tokenizer, held_files)
    else:
        cut = len(train) - round(held_out * len(train))
        train, held = train[:cut], train[cut:]
    blocks = pack(train, seq_len, "training")
    return TextTask(blocks, pack(held, seq_len, "held-out") if held_files or held_out else None)


def tokenise(tokenizer: Any, files: Sequence[Path]) -> torch.Tensor:
    """All ids of ``files`` in a row, (tokens,)."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for path in files:
        for text in read_documents(path):
            ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
    return torch.tensor(ids, dtype=torch.long)


def pack(ids: torch.Tensor, seq_len: int, what: str) -> torch.Tensor:
    """Ids cut into (blocks, seq_len); the incomplete rest is left out."""
    count = len(ids) // seq_len
    if count == 0:
        less = " or --held-out 0" if what == "held-out" else ""
        raise DataError(
            f"the {what} data hold {len(ids)} tokens, fewer than one block of {seq_len}: "
            f"give more data, a smaller --seq-len{less}."
        )
    return ids[: count * seq_len].view(count, seq_len)
