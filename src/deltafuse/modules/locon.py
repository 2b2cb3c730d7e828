"""The LyCORIS name of :mod:`deltafuse.algorithms.lora`."""

from ..algorithms.lora import LoConModule

__all__ = ["LoConModule"]
