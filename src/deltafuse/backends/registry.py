"""Backends: who can run a primitive, and who was chosen.

A backend implements primitives by name. ``auto`` gives each primitive of a form to the first competing backend, in
order, that can run it; a backend asked for by name runs or raises. Adding one is a folder here and one call of
:func:`register_backend`, from inside or outside this package.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core import policy
from ..core.errors import BackendError
from ..core.messages import say_once
from ..core.problem import Problem
from ..core.verdict import Verdict
from ..primitives import Kernels, kernel_table

BUILT_IN = ("torch", "compile", "triton")
PLANNED = {
    "tilelang": "this version ships no TileLang kernels",
}


class Backend(ABC):
    """name: what users type. order: lower is tried first. summary: one line for the doctor."""

    name: str
    order: int
    summary: str
    fused = False
    """Whether one pass over a tensor does what takes PyTorch several: the planner counts traffic accordingly."""

    @abstractmethod
    def available(self, device: torch.device | None = None) -> Verdict:
        """Whether this backend can run at all here, on ``device`` where given."""

    @abstractmethod
    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        """Whether it can run ``primitive`` for ``problem``."""

    @abstractmethod
    def implementation(self, primitive: str) -> Callable[..., Any]:
        """The callable with the reference's signature."""

    def competes(self, primitive: str, problem: Problem) -> Verdict:
        """Whether ``auto`` may take it for ``primitive`` of ``problem``: the place of measurements."""
        return Verdict(True, "available")


Choice = tuple[tuple[str, str], ...]
"""(primitive, backend) pairs: who runs each primitive of a form."""


@dataclass(frozen=True)
class Selection:
    """Who runs a form's primitives, in a word (``triton``, ``triton + torch``), why, and primitive by primitive."""

    backend: str
    reason: str
    choice: Choice

    @property
    def fused(self) -> bool:
        """Whether fused backends run all of it."""
        return bool(self.choice) and all(_backends[backend].fused for _, backend in self.choice)

    @property
    def kernels(self) -> Kernels:
        return kernels_for(self.choice)


_backends: dict[str, Backend] = {}
_tables: dict[Choice, Kernels] = {}
_changes = 0


def changes() -> int:
    """How often the list of backends has changed: part of the key of every cached plan."""
    return _changes


def _changed() -> None:
    global _changes
    _changes += 1
    _tables.clear()


def register_backend(backend: Backend) -> Backend:
    """Add ``backend`` (or replace the one of the same name)."""
    _backends[backend.name] = backend
    _changed()
    policy.know_backend(backend.name)
    return backend


def unregister_backend(name: str) -> None:
    """Remove a backend registered from outside."""
    _backends.pop(name, None)
    _changed()
    if name not in BUILT_IN and name not in PLANNED:
        policy.forget_backend(name)


def backends() -> Mapping[str, Backend]:
    """Registered backends by name, in the order ``auto`` tries them."""
    return dict(sorted(_backends.items(), key=lambda item: item[1].order))


def available_backends(device: torch.device | str | None = None) -> dict[str, Verdict]:
    """Every known backend name -> whether it can run here, and why or why not."""
    where = None if device is None else torch.device(device)
    known = {name: backend.available(where) for name, backend in backends().items()}
    absent = {name: Verdict(False, reason) for name, reason in PLANNED.items() if name not in known}
    return {**known, **absent}


def select(names: tuple[str, ...], problem: Problem, requested: str) -> Selection:
    """The kernel table for ``names``: ``requested`` runs or raises, ``auto`` takes the first that can."""
    if requested == policy.AUTO:
        return _automatic(names, problem)
    backend = require_backend(requested, problem.device)
    if not names:
        return Selection("torch", "one PyTorch operation: nothing for a backend to replace", ())
    for name in names:
        verdict = backend.verdict(name, problem)
        if not verdict:
            raise BackendError(f"backend '{requested}' cannot run {name} for {problem.op.describe()}: {verdict.reason}")
    return Selection(requested, "asked for by name", tuple((name, requested) for name in names))


def require_backend(name: str, device: torch.device | None = None) -> Backend:
    """The named backend, or a BackendError with its reason and what is available."""
    policy.check_backend(name)
    backend = _backends.get(name)
    verdict = backend.available(device) if backend else Verdict(False, PLANNED.get(name, "not registered"))
    if backend is None or not verdict:
        usable = ", ".join(key for key, item in available_backends(device).items() if item)
        raise BackendError(f"backend '{name}' was asked for and cannot run: {verdict.reason}. Available: {usable}.")
    return backend


def _automatic(names: tuple[str, ...], problem: Problem) -> Selection:
    """Each primitive goes to the first backend that competes for the problem and can run it."""
    choice: list[tuple[str, str]] = []
    refusals: dict[str, None] = {}
    for name in names:
        for backend in backends().values():
            refusal = _refusal(backend, name, problem)
            if refusal is None:
                choice.append((name, backend.name))
                break
            refusals[f"{backend.name}: {refusal}"] = None
        else:
            raise BackendError(f"no backend can run {name} for {problem.op.describe()}: {'; '.join(refusals)}")
    used = list(dict.fromkeys(backend for _, backend in choice))
    return Selection(" + ".join(used) or "torch", _chosen(used, list(refusals)), tuple(choice))


def _refusal(backend: Backend, name: str, problem: Problem) -> str | None:
    """Why ``backend`` is passed over, or None. A backend that competes and then cannot run says so once."""
    for verdict in (backend.available(problem.device), backend.competes(name, problem)):
        if not verdict:
            return verdict.reason
    verdict = backend.verdict(name, problem)
    if verdict:
        return None
    message = f"{backend.name} cannot run {name} here ({verdict.reason}); the next backend runs it"
    if policy.strict():
        raise BackendError(message)
    say_once(message)
    return verdict.reason


def _chosen(used: list[str], refusals: list[str]) -> str:
    if refusals or not used:
        return f"auto ({'; '.join(refusals)})" if refusals else "auto: one PyTorch operation"
    return f"auto: {_backends[used[0]].summary}"


def kernels_for(choice: Choice) -> Kernels:
    """The kernel table of a choice; what it leaves out runs the reference."""
    if choice not in _tables:
        _tables[choice] = kernel_table({name: _backends[backend].implementation(name) for name, backend in choice})
    return _tables[choice]


def load_built_in() -> None:
    """Import the folders of this package's own backends; each registers itself."""
    for name in (*BUILT_IN, *PLANNED):
        policy.know_backend(name)
    for name in BUILT_IN:
        importlib.import_module(f".{name}", __package__)
