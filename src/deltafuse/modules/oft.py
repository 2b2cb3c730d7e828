"""Input-side OFT, under :mod:`deltafuse.algorithms.oft`."""

from ..algorithms.oft import InputOFTModule

__all__ = ["InputOFTModule"]
