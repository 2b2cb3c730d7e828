"""The algebra of weight deltas: what each algorithm's parameters denote, and every exact form of it."""

from .base import Call, Delta
from .decomposed import Decomposed
from .glora import Generalized
from .kron import Factor, Kron
from .lowrank import Hadamard, LowRank
from .rotation import Butterfly, InputRotation, Rotation
from .scaling import ChannelScale, Dense

__all__ = [
    "Butterfly",
    "Call",
    "ChannelScale",
    "Decomposed",
    "Delta",
    "Dense",
    "Factor",
    "Generalized",
    "Hadamard",
    "InputRotation",
    "Kron",
    "LowRank",
    "Rotation",
]
