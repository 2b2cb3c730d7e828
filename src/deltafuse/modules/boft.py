"""The LyCORIS name of :mod:`deltafuse.algorithms.boft`."""

from ..algorithms.boft import ButterflyOFTModule

__all__ = ["ButterflyOFTModule"]
