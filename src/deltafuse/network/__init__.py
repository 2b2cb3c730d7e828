"""Networks of adapters: matching, attaching, merging, files, reports."""

from .matching import Target, find_targets, lora_name, no_match
from .network import LycorisNetwork
from .report import Report, Row, explain
from .rules import Rules

__all__ = ["LycorisNetwork", "Report", "Row", "Rules", "Target", "explain", "find_targets", "lora_name", "no_match"]
