"""deltafuse: exact, planned LoRA-family adapters."""
from ._version import __version__
