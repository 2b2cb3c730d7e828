"""Tuned configurations on disk: one JSON file a card, shared by processes that know nothing of each other.

    {"card": "NVIDIA H200", "entries": {kernel: {key: {"config": {...}, "version": 1, "triton": "3.6.0", ...}}}}

Every write takes the file's lock, reads what others have written, adds its own entries and replaces the file in one
step: nothing that another process finished is lost, and a reader never sees half a file. A file that cannot be read is
set aside under another name with one line in the log. Entries of another kernel or Triton version stay in the file and
are ignored.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...core.messages import say_once
from ...core.optional import available, require

Entry = dict[str, Any]
Entries = dict[str, dict[str, Entry]]
LOCK_TIMEOUT = 20.0
STALE_LOCK = 60.0
"""Seconds after which a lock file counts as left behind: it is held for milliseconds."""
_PARTS = re.compile(r"^(\d+g[ib]?b?|hbm\d*e?|sxm\d*)$")


def card_key(name: str) -> str:
    """A card's name as a file name; memory size and socket are left out: ``NVIDIA H100 80GB HBM3`` -> nvidia_h100."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and not _PARTS.match(word)]
    return "_".join(words) or "unknown"


class Store:
    """The entries of one card in one file."""

    def __init__(self, path: Path, card: str) -> None:
        self.path, self.card = path, card
        self._entries: Entries = {}
        self._stamp: tuple[int, int] | None = None

    def entries(self) -> Entries:
        """What the file holds now; reads it only where it changed."""
        stamp = self._file_stamp()
        if stamp != self._stamp:
            self._entries = self._read()
            self._stamp = stamp
        return self._entries

    def find(self, kernel: str, key: str, stamps: Mapping[str, Any]) -> Entry | None:
        """The entry of ``key`` that carries every one of ``stamps``."""
        entry = self.entries().get(kernel, {}).get(key)
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
            return None
        return entry if all(entry.get(name) == value for name, value in stamps.items()) else None

    def add(self, kernel: str, key: str, entry: Entry) -> bool:
        """Write one entry; False, with one line, where the file cannot be written."""
        return self.merge({kernel: {key: entry}})

    def merge(self, found: Entries) -> bool:
        """Write ``found`` over what the file holds by now."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                merged = self._read()
                for kernel, items in found.items():
                    merged.setdefault(kernel, {}).update(items)
                self._replace(merged)
        except (OSError, TimeoutError) as error:
            say_once(f"tuning results are not kept: '{self.path}' cannot be written ({error})")
            return False
        return True

    def _replace(self, entries: Entries) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.{time.monotonic_ns()}")
        text = json.dumps({"card": self.card, "entries": entries}, indent=1, sort_keys=True)
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            os.replace(draft, self.path)
        finally:
            draft.unlink(missing_ok=True)
        self._entries, self._stamp = entries, self._file_stamp()

    def _file_stamp(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _read(self) -> Entries:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            return self._set_aside(error)
        try:
            entries = json.loads(text)["entries"]
            if not all(isinstance(items, dict) for items in entries.values()):
                raise TypeError("an entry is not an object")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self._set_aside(error)
        return entries  # type: ignore[no-any-return]

    def _set_aside(self, error: Exception) -> Entries:
        aside = self.path.with_name(f"{self.path.name}.broken-{time.time_ns()}")
        try:
            os.replace(self.path, aside)
            where = f"set aside as '{aside.name}'"
        except OSError:
            where = "left in place"
        say_once(f"tuning results in '{self.path}' cannot be read ({error!r}); {where}, and tuning starts afresh")
        return {}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path``'s lock: the package filelock's where installed, else a file that only one process can create."""
    if available("filelock", extra="tune"):
        filelock = require("filelock", extra="tune")
        try:
            with filelock.FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT):
                yield
        except filelock.Timeout as error:
            raise TimeoutError(f"'{path}.lock' is held by another process") from error
    else:
        with _created(path.with_name(f"{path.name}.held")):
            yield


@contextmanager
def _created(lock: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            _drop_stale(lock)
            if time.monotonic() > deadline:
                raise TimeoutError(f"'{lock}' is held by another process") from None
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _drop_stale(lock: Path) -> None:
    """Remove a lock that a process left behind when it died."""
    try:
        if time.time() - lock.stat().st_mtime > STALE_LOCK:
            lock.unlink()
    except OSError:
        pass
