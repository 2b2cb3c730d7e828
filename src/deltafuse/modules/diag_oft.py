"""The LyCORIS name of :mod:`deltafuse.algorithms.oft`."""

from ..algorithms.oft import DiagOFTModule

__all__ = ["DiagOFTModule"]
