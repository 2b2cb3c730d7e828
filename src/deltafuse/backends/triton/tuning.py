"""Which configuration a kernel launches with: shipped table, the user's results, heuristics, or a measurement.

A launch asks its :class:`Tunable` with a key (device, dtype, row bucket, sizes, flags). A hit is one dict lookup. A
miss goes through, in order, the user's store (``<cache>/tune/<card>.json``), the table shipped for the card
(``tables/<card>.json``) and the heuristic, and is remembered for the process. ``DELTAFUSE_TUNE`` decides what more may
happen (:func:`deltafuse.core.policy.tune_mode`): only ``lazy`` ever times anything.

Timing runs on scratch copies of the launch's tensors, with as many rows as the middle of the bucket, so that a result
does not depend on which row count came first, and live tensors are only read. Nothing is timed during the capture of a
CUDA graph or in deterministic mode. Every result is written at once.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core import policy
from ...core.messages import logger, say_once
from ...core.timing import device_seconds
from .launch import forget as settle_anew
from .store import Entry, Store, card_key

Key = tuple[Any, ...]
"""(device, dtype, row bucket, sizes and flags ...); the first three are the same for every kernel."""
TABLES = Path(__file__).parent / "tables"
FIRST_ROUNDS, ROUNDS = 3, 9
_HOPELESS = 1.3
"""A candidate this far behind after the first rounds is not timed further."""
_MARGIN = 0.98
"""The heuristic's choice stays unless another one takes at most this part of its time."""

measure = device_seconds
"""(calls, rounds, device) -> samples of each call; tests put a fake clock here."""


def middle(bucket: int) -> int:
    """The row count that stands for a bucket of ``rows.bit_length()``."""
    return max(1, (3 << bucket) >> 2)


@dataclass(frozen=True)
class Outcome:
    """One tuned key: what won, and the seconds of the winner and of the heuristic's choice."""

    kernel: str
    key: str
    config: Any
    seconds: float
    default: Any
    default_seconds: float


@dataclass
class Tunable:
    """One launch function.

    version: raised whenever the kernel changes so that old results no longer apply. config: dataclass of
    configurations. default(key): the heuristic. candidates(key): what is worth timing. row_args: positions of tensors
    whose first axis is rows; a trial gives them the middle row count. unset: positions that a trial passes as None
    (what depends on the exact row count and costs nothing). stretch(args, rows): makes a trial's copies have ``rows``
    rows where that takes more.
    """

    name: str
    version: int
    config: type
    default: Callable[[Key], Any]
    candidates: Callable[[Key], Sequence[Any]]
    row_args: tuple[int, ...] = (0,)
    unset: tuple[int, ...] = ()
    stretch: Callable[[tuple[Any, ...], int], tuple[Any, ...]] | None = None
    known: dict[Key, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _tunables[self.name] = self

    def config_for(self, key: Key, launch: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The configuration for ``key``; ``launch(*args, config=...)`` is what a trial would time."""
        found = self.known.get(key)
        return found if found is not None else self._miss(key, launch, args)

    def _miss(self, key: Key, launch: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        mode = _forced.mode or policy.tune_mode()
        device: torch.device = key[0]
        if mode == "lazy" and (_capturing(device) or torch.are_deterministic_algorithms_enabled()):
            return self._recorded(key) or self.default(key)
        with _lock:
            if key in self.known:  # another thread was faster
                return self.known[key]
            found = None if mode == "off" or (mode == "lazy" and _forced.again) else self._recorded(key)
            if found is None and mode == "lazy":
                found = _tune(self, key, launch, args)
            self.known[key] = self.default(key) if found is None else found
            return self.known[key]

    def _recorded(self, key: Key) -> Any:
        """From the user's store, else from the shipped table. A table serves every Triton version."""
        text, mine = key_text(key), {"version": self.version}
        entry = user_store(key[0]).find(self.name, text, {**mine, "triton": triton_version()})
        entry = entry or shipped_table(key[0]).find(self.name, text, mine)
        try:
            return None if entry is None else self.config(**entry["config"])
        except TypeError:  # fields of another version
            return None


_tunables: dict[str, Tunable] = {}
_lock = threading.RLock()


@dataclass
class _Forced:
    mode: str | None = None
    again: bool = False
    listener: Callable[[Outcome], None] | None = None


_forced = _Forced()


@contextmanager
def forced(mode: str, again: bool = False, listener: Callable[[Outcome], None] | None = None) -> Iterator[None]:
    """Run the block in ``mode`` whatever the environment says; process-wide. Remembered choices are forgotten, before
    and after. again: time known keys anew. listener: told of every outcome."""
    previous = (_forced.mode, _forced.again, _forced.listener)
    forget()
    _forced.mode, _forced.again, _forced.listener = mode, again, listener
    try:
        yield
    finally:
        _forced.mode, _forced.again, _forced.listener = previous
        forget()


@contextmanager
def without_timing() -> Iterator[None]:
    """Run the block with recorded and heuristic configurations alone; what was remembered stays."""
    previous, _forced.mode = _forced.mode, "table"
    kept = {name: dict(item.known) for name, item in _tunables.items()}
    try:
        yield
    finally:
        _forced.mode = previous
        for name, item in _tunables.items():
            item.known = kept.get(name, {})


def tunables() -> dict[str, Tunable]:
    """Every tunable launch of the modules imported so far."""
    return dict(_tunables)


def forget() -> None:
    """Forget every remembered choice and opened file: the next launch looks anew."""
    for item in _tunables.values():
        item.known.clear()
    settle_anew()
    user_store.cache_clear()
    shipped_table.cache_clear()


def key_text(key: Key) -> str:
    """A key as it stands in files: everything but the device."""
    return ",".join(_plain(part) for part in key[1:])


def _plain(part: Any) -> str:
    return str(int(part)) if isinstance(part, bool) else str(part).removeprefix("torch.")


def card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@lru_cache(maxsize=1)
def triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return str(getattr(sys.modules.get("triton"), "__version__", "unknown"))


@lru_cache(maxsize=16)
def user_store(device: torch.device) -> Store:
    """This user's results for the card behind ``device``."""
    card = card_name(device)
    return Store(policy.cache_dir() / "tune" / f"{card_key(card)}.json", card)


@lru_cache(maxsize=16)
def shipped_table(device: torch.device) -> Store:
    """What this package knows about the card behind ``device``; an unknown card has an empty table."""
    card = card_name(device)
    return Store(TABLES / f"{card_key(card)}.json", card)


# -- timing -----------------------------------------------------------------------------------------------------------


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _tune(item: Tunable, key: Key, launch: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Time the candidates and keep the winner; None where there is nothing to choose from or no memory to do it in."""
    device: torch.device = key[0]
    text = key_text(key)
    if key[2] == 0:  # no rows, nothing to time
        return None
    try:
        with torch.no_grad(), _on(device), _shown(f"tuning {item.name} [{text}]", device):
            outcome = _contest(item, key, launch, _scratch(item, args, middle(key[2])))
    except torch.OutOfMemoryError:
        say_once(f"{item.name} is not tuned for [{text}]: no memory for scratch copies; heuristics decide")
        return None
    if outcome is None:
        return None
    user_store(device).add(item.name, text, entry_of(item, outcome))
    if _forced.listener is not None:
        _forced.listener(outcome)
    return outcome.config


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def entry_of(item: Tunable, outcome: Outcome) -> Entry:
    """``outcome`` as it is written."""
    times = {"us": round(1e6 * outcome.seconds, 2), "default_us": round(1e6 * outcome.default_seconds, 2)}
    return {"config": asdict(outcome.config), "version": item.version, "triton": triton_version(), **times}


def _contest(item: Tunable, key: Key, launch: Callable[..., Any], args: tuple[Any, ...]) -> Outcome | None:
    default = item.default(key)
    configs = list(dict.fromkeys([default, *item.candidates(key)]))
    running = {config: _bound(launch, args, config) for config in configs}
    running = {config: call for config, call in running.items() if _runs(item, config, call)}
    if default not in running:
        return None
    samples: dict[Any, list[float]] = {config: [] for config in running}
    for rounds in (FIRST_ROUNDS, ROUNDS):
        for config, found in zip(running, measure(list(running.values()), rounds, key[0]), strict=True):
            samples[config] += found
        medians = {config: statistics.median(samples[config]) for config in running}
        best = min(medians, key=lambda config: medians[config])
        running = {c: call for c, call in running.items() if c == default or medians[c] <= _HOPELESS * medians[best]}
    if medians[best] > _MARGIN * medians[default]:
        best = default
    return Outcome(item.name, key_text(key), best, medians[best], default, medians[default])


def _bound(launch: Callable[..., Any], args: tuple[Any, ...], config: Any) -> Callable[[], Any]:
    return lambda: launch(*args, config=config)


def _runs(item: Tunable, config: Any, call: Callable[[], Any]) -> bool:
    """Compile and warm up; a configuration that a card cannot take is left out."""
    try:
        call()
        call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.debug("%s: %s is left out: %s", item.name, config, error)
        return False
    return True


def _scratch(item: Tunable, args: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """The arguments of a trial: copies of every tensor, those over rows with ``rows`` of them."""

    made = tuple(
        None if position in item.unset else _copied(arg, rows if position in item.row_args else None)
        for position, arg in enumerate(args)
    )
    return made if item.stretch is None else item.stretch(made, rows)


def _copied(arg: Any, rows: int | None) -> Any:
    """``arg`` with every tensor in it copied."""
    if isinstance(arg, Tensor):
        return stretched(arg.detach(), rows if arg.dim() else None)
    if is_dataclass(arg) and not isinstance(arg, type):
        return replace(arg, **{item.name: _copied(getattr(arg, item.name), None) for item in fields(arg)})
    return type(arg)(_copied(item, None) for item in arg) if type(arg) in (tuple, list) else arg


def stretched(live: Tensor, rows: int | None) -> Tensor:
    """``live``'s values, repeated or cut to ``rows``, in memory of their own with the same axis order."""
    count = live.shape[0] if live.dim() and rows is None else rows
    if live.dim() < 2:
        return live.clone() if rows is None else live[_repeat(live, rows)]
    shape = (count or 0, *live.shape[1:])
    order = sorted(range(live.dim()), key=lambda axis: (live.stride(axis), axis == 0))
    strides, step = [0] * live.dim(), 1
    for axis in order:
        strides[axis], step = step, step * max(1, shape[axis])
    made = torch.empty_strided(shape, strides, dtype=live.dtype, device=live.device)
    return made.copy_(live if rows is None else live[_repeat(live, rows)])


def _repeat(live: Tensor, rows: int) -> Tensor:
    return torch.arange(rows, device=live.device) % max(1, live.shape[0])


# -- what is said -----------------------------------------------------------------------------------------------------


@contextmanager
def _shown(text: str, device: torch.device) -> Iterator[None]:
    """Show ``text`` in the innermost open tqdm bar while the block runs; without a bar, one line for the process."""
    bar = _innermost_bar()
    if bar is None:
        if _forced.listener is None:
            say_once(f"{text}; each kernel and shape is timed once, results are kept in '{user_store(device).path}'")
        yield
        return
    before = bar.postfix
    bar.set_postfix_str(text)
    try:
        yield
    finally:
        bar.postfix = before
        bar.refresh()


def _innermost_bar() -> Any:
    """The open tqdm bar that was started last, where the program uses tqdm at all."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    bars = [bar for bar in getattr(tqdm, "_instances", ()) if not getattr(bar, "disable", True)]
    return max(bars, key=lambda bar: (abs(bar.pos), bar.start_t), default=None)
