"""Baking a delta into the base weight, and taking it out again.

merge_to writes W' for good, computed in float32 or better from unrounded factors and rounded once. While merged, the
adapter's own forward passes through, so a hooked layer never shows its delta twice. A second merge at the same
strength is a no-op, one at minus that strength undoes the first, any other is an error. With ``precise`` the base is
kept in its stored dtype on the CPU, so undoing is bit-exact; ``onfly_merge`` always does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import MergeError
from ..core.messages import say_once

if TYPE_CHECKING:
    from ..bases import Base


@dataclass
class Snapshot:
    """The base as it was: CPU copies in the stored dtype; ``bias`` None where the layer had none."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, base: Base) -> Snapshot:
        bias = base.bias()
        return cls(_copy(base.weight()), None if bias is None else _copy(bias))

    def put_back(self, base: Base) -> None:
        base.write(self.weight, self.bias)
        if self.bias is None:
            base.module.register_parameter("bias", None)


class Mergeable:
    """Mixin of adapter modules: everything that writes into the base."""

    base: Base
    lora_name: str
    not_supported: bool
    merged_strength: float | None = None
    _snapshot: Snapshot | None = None

    def get_merged_weight(
        self, multiplier: float = 1.0, shape: Any = None, device: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        raise TypeError("provided by the adapter")

    @torch.no_grad()
    def merge_to(self, multiplier: float = 1.0, *, precise: bool = False, check: bool = True) -> None:
        """Write W' at strength ``multiplier`` into the base; see the module's rules for repeated merges."""
        if self.not_supported or self._already(float(multiplier)):
            return
        verdict = self.base.mergeable()
        if not verdict:
            raise MergeError(f"layer '{self.lora_name}': {verdict.reason}")
        weight, bias = self.get_merged_weight(float(multiplier))
        if check:
            self.check_finite(weight, bias)
        self._snapshot = Snapshot.of(self.base) if precise else None
        self.base.write(weight, bias)
        self.merged_strength = float(multiplier)

    def _already(self, strength: float) -> bool:
        """Handle a merge onto a merged layer; True where nothing more is to be done."""
        if self.merged_strength is None:
            return False
        if strength == self.merged_strength:
            say_once(f"layer '{self.lora_name}' is merged at strength {strength:g} already; nothing was added")
            return True
        if strength == -self.merged_strength:
            self.unmerge()
            return True
        raise MergeError(
            f"layer '{self.lora_name}' is merged at strength {self.merged_strength:g}; "
            f"unmerge it (merge at {-self.merged_strength:g}, or unmerge()) before merging at {strength:g}"
        )

    @torch.no_grad()
    def unmerge(self) -> None:
        """Undo a merge: bit-exact from a snapshot, else by subtracting the delta with one rounding."""
        if self.merged_strength is None:
            return
        if self._snapshot is not None:
            self._snapshot.put_back(self.base)
        else:
            self._subtract(self.merged_strength)
        self._snapshot, self.merged_strength = None, None

    def _subtract(self, strength: float) -> None:
        raise TypeError("provided by the adapter")

    def check_finite(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Raise where a merged tensor holds NaN or Inf in the dtype it is stored in, before anything is written."""
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and not torch.isfinite(tensor.to(self.base.weight().dtype)).all():
                raise MergeError(
                    f"layer '{self.lora_name}': the merged {name} holds NaN or Inf; nothing was written. "
                    "Check the adapter's tensors and the strength."
                )

    @torch.no_grad()
    def onfly_merge(self, multiplier: float = 1.0) -> None:
        """Merge with a snapshot of the base, for :meth:`onfly_restore`."""
        self.merge_to(multiplier, precise=True)

    @torch.no_grad()
    def onfly_restore(self) -> None:
        """Undo :meth:`onfly_merge`, bit-exact."""
        self.unmerge()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
