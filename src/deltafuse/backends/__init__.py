"""Backends implement primitives: one folder each. Importing this package registers the built-in ones."""

from .registry import (
    Backend,
    Selection,
    available_backends,
    backends,
    changes,
    kernels_for,
    load_built_in,
    register_backend,
    require_backend,
    select,
    unregister_backend,
)

load_built_in()

__all__ = [
    "Backend",
    "Selection",
    "available_backends",
    "backends",
    "changes",
    "kernels_for",
    "register_backend",
    "require_backend",
    "select",
    "unregister_backend",
]
