"""Marks for torch.compile that cost no import of the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """Run ``function`` while tracing and keep its result as a constant of the graph, guarded by its arguments.

    The same mark as ``torch.compiler.assume_constant_result`` sets, which would import the compiler (about a second).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
