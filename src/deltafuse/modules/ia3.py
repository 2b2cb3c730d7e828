"""The LyCORIS name of :mod:`deltafuse.algorithms.ia3`."""

from ..algorithms.ia3 import IA3Module

__all__ = ["IA3Module"]
