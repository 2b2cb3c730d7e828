"""Which package answers to ``lycoris`` here, and how a test says that the two packages differ.

``LYCORIS_API_TARGET=peer`` runs the suite on the published lycoris-lora, anything else on deltafuse's alias.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .switch import AliasedLycoris, PublishedLycoris

TARGET = os.environ.get("LYCORIS_API_TARGET", "deltafuse")
if TARGET not in ("peer", "deltafuse"):
    raise ValueError(f"LYCORIS_API_TARGET is {TARGET!r}; legal values are 'peer' and 'deltafuse'")
ON_PEER = TARGET == "peer"


lycoris_name = PublishedLycoris() if ON_PEER else AliasedLycoris()


class NotAsExpected(AssertionError):
    """A difference that names the rule of semantics.md which decides it."""


def differs(rule: int, *, peer: Callable[[], Any], ours: Callable[[], Any]) -> Any:
    """Run the branch of the package under test; a failure names the rule that makes the two differ."""
    try:
        return peer() if ON_PEER else ours()
    except AssertionError as exc:
        raise NotAsExpected(f"semantics.md rule {rule}, on {TARGET}: {exc}") from exc


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius distance of the two over the norm of ``expected`` (infinite where shapes differ)."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    if not torch.isfinite(actual).all():
        return float("inf")
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def agrees(call: Callable[[], torch.Tensor], expected: torch.Tensor, *, tol: float = 2e-5, fault: int | None = None):
    """``call()`` equals ``expected`` to ``tol`` (relative Frobenius).

    ``fault`` is the rule of semantics.md that lycoris-lora breaks for this case: there the call has to raise or be
    far off, so that the list of faults stays true; on deltafuse it has to agree like every other case.
    """
    if not (ON_PEER and fault):
        error = relative_error(call(), expected)
        suffix = f" (semantics.md rule {fault})" if fault else ""
        assert error <= tol, f"relative error {error:.3g} > {tol:g}{suffix}"
        return
    try:
        error = relative_error(call(), expected)
    except Exception:  # the peer's crash is the documented difference
        return
    assert error > tol, f"lycoris-lora is right here (relative error {error:.3g}): rule {fault} need not be named"


def refused(call: Callable[[], Any], *, rule: int, match: str = "") -> None:
    """deltafuse raises an error whose text holds ``match``; lycoris-lora lets it pass (or fails without a name)."""
    if ON_PEER:
        return
    with pytest.raises(Exception) as caught:
        call()
    text = str(caught.value)
    assert match.lower() in text.lower(), f"semantics.md rule {rule}: the error {text!r} does not name {match!r}"
