"""Backends implement primitives: one folder each. Importing this package registers the built-in ones."""

from .registry import (
    Backend,
    Selection,
    available_backends,
    backends,
    changes,
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
    "register_backend",
    "require_backend",
    "select",
    "unregister_backend",
]
