"""The LyCORIS name of :mod:`deltafuse.algorithms.lokr`."""

from ..algorithms.lokr import LokrModule

__all__ = ["LokrModule"]
