"""A yes or no that always says why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Outcome of a question such as "can this backend run that call": truthy when ``ok``."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok
