"""What the user sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """The face of a run. ``state`` is one of: warming up, training, evaluating, sampling, saving, done."""

    def start(self, total: int, done: int = 0) -> None:
        """A run of ``total`` steps begins, ``done`` of them already taken."""
        ...

    def state(self, name: str) -> None:
        """The run is now in this state."""
        ...

    def step(self, step: int, loss: float, lr: float) -> None:
        """Step ``step`` (from 1) is taken."""
        ...

    def message(self, text: str) -> None:
        """A line worth keeping."""
        ...

    def close(self) -> None:
        """The run is over, well or not."""
        ...


class Silent:
    """Shows nothing; for tests and library use."""

    def start(self, total: int, done: int = 0) -> None: ...

    def state(self, name: str) -> None: ...

    def step(self, step: int, loss: float, lr: float) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class Speed:
    """Steps per second over the last steps: without the first (warm-up) one, and without what lies between steps."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self.durations: list[float] = []
        self.begun = time.perf_counter()

    def begin(self) -> None:
        """The next step begins now."""
        self.begun = time.perf_counter()

    def tick(self, step: int) -> None:
        """Step ``step`` is taken."""
        now = time.perf_counter()
        self.durations = [*self.durations, now - self.begun][-16:]
        self.begun, self.done = now, step

    @property
    def rate(self) -> float:
        counted = self.durations[1:] or self.durations
        return len(counted) / sum(counted) if sum(counted) > 0 else 0.0

    @property
    def eta(self) -> str:
        return clock((self.total - self.done) / self.rate) if self.rate else "--:--"


def clock(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Plain:
    """One line now and then; for files, pipes and CI."""

    def __init__(self, stream: TextIO | None = None, every: float = 2.0) -> None:
        self.stream = stream or sys.stdout
        self.every = every
        self.last = float("-inf")
        self.current = ""

    def start(self, total: int, done: int = 0) -> None:
        self.speed = Speed(total, done)

    def state(self, name: str) -> None:
        self.speed.begin()
        if name != self.current and name in ("warming up", "evaluating", "sampling", "saving"):
            self.message(f"[{name}]")
        self.current = name

    def step(self, step: int, loss: float, lr: float) -> None:
        self.speed.tick(step)
        now = time.perf_counter()
        if now - self.last < self.every and step not in (1, self.speed.total):
            return
        self.last = now
        rate = f"{self.speed.rate:.3g} it/s"
        self.message(f"step {step}/{self.speed.total}  loss {loss:.4f}  lr {lr:.2e}  {rate}  eta {self.speed.eta}")

    def message(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None: ...


class Rich:
    """A live bar: step, loss, it/s, ETA, state."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = console
        self.bar = Progress(
            TextColumn("[bold]{task.fields[state]:<10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} it/s"),
            TextColumn("eta {task.fields[eta]}"),
            console=console,
        )

    def start(self, total: int, done: int = 0) -> None:
        self.speed = Speed(total, done)
        self.row = self.bar.add_task(
            "", total=total, completed=done, state="warming up", loss="-", rate="-", eta="--:--"
        )
        self.bar.start()

    def state(self, name: str) -> None:
        self.speed.begin()
        self.bar.update(self.row, state=name, refresh=True)

    def step(self, step: int, loss: float, lr: float) -> None:
        self.speed.tick(step)
        self.bar.update(self.row, completed=step, loss=f"{loss:.4f}", rate=f"{self.speed.rate:.3g}", eta=self.speed.eta)

    def message(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


def make_progress(stream: TextIO | None = None) -> Progress:
    """The live bar on a terminal, plain lines elsewhere."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return Plain(stream)
    from rich.console import Console

    return Rich(Console(file=stream))
