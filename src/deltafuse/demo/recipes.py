"""How the demo trains each algorithm: rank, alpha, learning rate and options that suit its small model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..algorithms.registry import get_algorithm

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


# Learning rates are the largest that trained smoothly here. Rotations and scalings start flat and take larger ones.
_RECIPES = {
    "lokr": Recipe(lr=1e-2),
    "locon": Recipe(lr=5e-3),
    "loha": Recipe(lr=8e-3),
    "glora": Recipe(lr=3e-3),
    "dylora": Recipe(lr=8e-3),
    "tlora": Recipe(lr=5e-3),
    "full": Recipe(lr=5e-4),
    "diag-oft": Recipe(lr=4e-3),
    "oft": Recipe(lr=8e-3),
    "boft": Recipe(lr=2e-3),
    "ia3": Recipe(lr=5e-2),
    "norm": Recipe(lr=3e-2),
}


def recipe_for(algo: str) -> Recipe:
    """The recipe of ``algo`` or one of its aliases; an algorithm added from outside gets the common one.

    Raises OptionError with the nearest name for an algorithm that nobody registered.
    """
    return _RECIPES.get(get_algorithm(algo).name, Recipe())
