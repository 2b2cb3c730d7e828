"""How the demo trains each algorithm: rank, alpha, learning rate and options that suit its small model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

# Only these blocks are adapted: the outermost convolutions have one image channel, which leaves rotations no block.
ADAPTED_BLOCKS = ("Conditioning", "ResidualBlock", "TransformerBlock")


@dataclass(frozen=True)
class Recipe:
    """Settings of one run; the adapter's scale is alpha / rank."""

    rank: int = 8
    alpha: float = 4.0
    lr: float = 2e-3
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def with_changes(self, rank: int | None, alpha: float | None, lr: float | None, options: dict[str, Any]) -> Recipe:
        """A copy with what the user set; a new rank alone keeps the scale."""
        new_rank = self.rank if rank is None else rank
        new_alpha = self.alpha * new_rank / self.rank if alpha is None else alpha
        return replace(
            self,
            rank=new_rank,
            alpha=new_alpha,
            lr=self.lr if lr is None else lr,
            options={**self.options, **options},
        )


_RECIPES = {
    "lokr": Recipe(),
}


def recipe_for(algo: str) -> Recipe:
    """The recipe of ``algo``; an algorithm added from outside gets the common one."""
    return _RECIPES.get(algo, Recipe())
