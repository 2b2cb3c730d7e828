"""Backends: who can run a primitive, and who was chosen.

A backend implements primitives by name. ``auto`` takes the first competing backend, in order, that can run every
primitive of a form; a backend asked for by name runs or raises. Adding one is a folder here and one call of
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

BUILT_IN = ("torch", "compile")
PLANNED = {
    "triton": "this version ships no Triton kernels",
    "tilelang": "this version ships no TileLang kernels",
}


class Backend(ABC):
    """name: what users type. order: lower is tried first. summary: one line for the doctor."""

    name: str
    order: int
    summary: str

    @abstractmethod
    def available(self, device: torch.device | None = None) -> Verdict:
        """Whether this backend can run at all here, on ``device`` where given."""

    @abstractmethod
    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        """Whether it can run ``primitive`` for ``problem``."""

    @abstractmethod
    def implementation(self, primitive: str) -> Callable[..., Any]:
        """The callable with the reference's signature."""

    def competes(self, problem: Problem) -> Verdict:
        """Whether ``auto`` may take it for ``problem``."""
        return Verdict(True, "available")


@dataclass(frozen=True)
class Selection:
    """The backend chosen for a set of primitives, its kernel table and the reason."""

    backend: str
    kernels: Kernels
    reason: str


_backends: dict[str, Backend] = {}
_tables: dict[tuple[str, tuple[str, ...]], Kernels] = {}
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
        return Selection("torch", kernel_table(), "one PyTorch operation: nothing for a backend to replace")
    for name in names:
        verdict = backend.verdict(name, problem)
        if not verdict:
            raise BackendError(f"backend '{requested}' cannot run {name} for {problem.op.describe()}: {verdict.reason}")
    return Selection(requested, _table(backend, names), "asked for by name")


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
    refusals: list[str] = []
    for backend in backends().values():
        refusal = _refusal(backend, names, problem)
        if refusal is None:
            return Selection(backend.name, _table(backend, names), _chosen(backend, refusals))
        refusals.append(f"{backend.name}: {refusal}")
    raise BackendError(f"no backend can run {', '.join(names)} for {problem.op.describe()}: {'; '.join(refusals)}")


def _refusal(backend: Backend, names: tuple[str, ...], problem: Problem) -> str | None:
    """Why ``backend`` is passed over, or None. A backend that competes and then cannot run says so once."""
    for verdict in (backend.available(problem.device), backend.competes(problem)):
        if not verdict:
            return verdict.reason
    for name in names:
        verdict = backend.verdict(name, problem)
        if not verdict:
            message = f"{backend.name} cannot run {name} here ({verdict.reason}); the next backend runs it"
            if policy.strict():
                raise BackendError(message)
            say_once(message)
            return verdict.reason
    return None


def _chosen(backend: Backend, refusals: list[str]) -> str:
    return f"auto ({'; '.join(refusals)})" if refusals else f"auto: {backend.summary}"


def _table(backend: Backend, names: tuple[str, ...]) -> Kernels:
    key = (backend.name, names)
    if key not in _tables:
        _tables[key] = kernel_table({name: backend.implementation(name) for name in names})
    return _tables[key]


def load_built_in() -> None:
    """Import the folders of this package's own backends; each registers itself."""
    for name in (*BUILT_IN, *PLANNED):
        policy.know_backend(name)
    for name in BUILT_IN:
        importlib.import_module(f".{name}", __package__)
