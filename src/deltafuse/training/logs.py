"""Numbers of a run on disk: ``metrics.jsonl``, one JSON object per line, and TensorBoard on request."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from ..core.optional import require


class Metrics:
    """Appends records to ``metrics.jsonl``; a resumed run drops what came after the step it starts from.

    Without a path (processes other than the first) the records are kept in memory only.
    """

    def __init__(self, path: Path | None, *, resume_step: int | None = None, tensorboard: bool = False) -> None:
        self.records: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        self._board: Any = None
        if path is None:
            return
        if resume_step is not None:
            self.records = [record for record in read_metrics(path) if record["step"] <= resume_step]
        path.write_text("".join(_line(record) for record in self.records), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            require("tensorboard", extra="tensorboard", purpose="--tensorboard")
            self._board = require("torch.utils.tensorboard", extra="tensorboard").SummaryWriter(path.parent)

    def write(self, step: int, **values: float) -> None:
        """One line ``{"step": step, **values}``; None values are left out."""
        record = {"step": step, **{k: v for k, v in values.items() if v is not None}}
        self.records.append(record)
        if self._file is not None:
            self._file.write(_line(record))
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _line(record: dict[str, Any]) -> str:
    finite = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in record.items()}
    return json.dumps(finite) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file; a line cut by a crash is left out. An absent file has none."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [record for record in records if isinstance(record, dict) and "step" in record]
