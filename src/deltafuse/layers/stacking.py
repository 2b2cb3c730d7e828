"""Putting an adapter on a layer and taking it off again, in any order.

A layer keeps the list of its adapters in ``_lycoris_wrappers``. Each holds the forward that was there before it, so
the chain runs outermost first and each adds its own delta, computed from the raw weight. Taking one off relinks its
neighbours. The attribute names are those other tools look for.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

WRAPPERS = "_lycoris_wrappers"
ORIGINAL = "_lycoris_original_forward"


class Wrapper(Protocol):
    """What the chain needs of an adapter."""

    org_forward: Any

    def forward(self, x: Any) -> Any: ...


def wrappers(module: nn.Module) -> list[Any]:
    """Adapters on ``module``, innermost first."""
    return list(module.__dict__.get(WRAPPERS, ()))


def attach(module: nn.Module, adapter: Wrapper) -> None:
    """Make ``adapter`` the outermost one; attaching twice is harmless."""
    chain = wrappers(module)
    if any(item is adapter for item in chain):
        return
    if not chain:
        module.__dict__[ORIGINAL] = module.__dict__.get("forward")
    adapter.org_forward = module.forward
    module.__dict__[WRAPPERS] = [*chain, adapter]
    module.forward = adapter.forward  # type: ignore[method-assign]


def detach(module: nn.Module, adapter: Wrapper) -> None:
    """Take ``adapter`` off; nothing happens where it is not on."""
    chain = wrappers(module)
    place = next((index for index, item in enumerate(chain) if item is adapter), None)
    if place is None:
        return
    chain.pop(place)
    if place < len(chain):
        chain[place].org_forward = adapter.org_forward
    elif chain:
        module.forward = chain[-1].forward
    else:
        _put_back(module)
    if chain:
        module.__dict__[WRAPPERS] = chain


def _put_back(module: nn.Module) -> None:
    """The forward as it was before the first adapter: the class's own unless something else had replaced it."""
    original = module.__dict__.pop(ORIGINAL, None)
    module.__dict__.pop(WRAPPERS, None)
    if original is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = original  # type: ignore[method-assign]
