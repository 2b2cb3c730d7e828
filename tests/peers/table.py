"""One table of what is compared with lycoris-lora: algorithm, layer, options, and the rule where the two differ.

The constructor grid of the API suite is the list of rows; each row names, per view, the rule of semantics.md by which
deltafuse gives another number on purpose. ``None`` means: equal, and the tests hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lycoris_api.cases import CLASS_NAMES, all_cases, peer_fault
from lycoris_api.support import Case

VIEWS = ("start", "forward", "strength", "bypass", "bypass-strength", "reads-ours", "reads-theirs")


@dataclass(frozen=True)
class Row:
    """A case and, per view, the rule that makes the two packages differ (absent: they agree)."""

    case: Case
    rules: tuple[tuple[str, int], ...]

    @property
    def id(self) -> str:
        return self.case.id

    @property
    def class_name(self) -> str:
        return CLASS_NAMES[self.case.algo]

    def rule(self, view: str) -> int | None:
        return dict(self.rules).get(view)


def _start_rule(case: Case) -> int | None:
    """Where the fresh state_dict is not the same tensor for tensor."""
    if case.algo == "full":
        return 43  # before apply_to lycoris-lora writes -W
    if case.options.get("rs_lora") and case.algo == "glora":
        return 2  # raw alpha, so a plain reader is off by sqrt(rank)
    if case.options.get("rs_lora") and case.options.get("full_matrix"):
        return 3
    if case.algo == "dylora" and case.layer.startswith("conv"):
        return 40  # a flat up factor that no convolution reader takes
    return None


def _ours_rule(case: Case) -> int | None:
    """Where lycoris-lora cannot rebuild a module from a file, whoever wrote it."""
    if case.algo == "dylora" and case.layer.startswith("conv"):
        return None
    return peer_fault(case, "reload", 1.0)


def row(case: Case) -> Row:
    rules = {
        "start": _start_rule(case),
        "forward": peer_fault(case, "forward", 1.0),
        "strength": peer_fault(case, "forward", 0.3),
        "bypass": peer_fault(case, "bypass", 1.0),
        "bypass-strength": peer_fault(case, "bypass", 0.3),
        "reads-ours": _ours_rule(case),
    }
    if case.options.get("rescaled"):
        rules |= {"strength": 5, "bypass-strength": 5}  # the rescale has to fade with the strength
    return Row(case, tuple((view, rule) for view, rule in rules.items() if rule is not None))


TABLE: list[Row] = [row(case) for case in all_cases()]
