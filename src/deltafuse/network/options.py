"""Options of a network as users write them: names and aliases checked, strings read, idle ones told from ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import OptionError, unknown_name
from ..core.messages import say_once
from ..core.parse import as_bool, as_int, as_number
from ..layers.options import COMMON, known_options

ALIASES = {
    "dora_wd": "weight_decompose",
    "wd_on_output": "wd_on_out",
    "constrain": "constraint",
    "use_cp": "use_tucker",
    "use_conv_cp": "use_tucker",
}
DEPRECATED = ("use_cp", "use_conv_cp", "disable_conv_cp", "constrain")
NETWORK_OPTIONS = frozenset(
    {"algo", "preset", "conv_dim", "conv_alpha", "train_norm", "train_llm_adapter", "warn_on_unmatched"}
)
DEFAULTS: dict[str, Any] = {
    "factor": -1,
    "block_size": 4,
    "wd_on_out": True,
    "sig_type": "principal",
    "use_data_init": True,
    "mask_group_id": 0,
    "constraint": 0.0,
    "bypass_mode": None,
}
_BOOLEAN = (
    "use_tucker",
    "use_scalar",
    "rank_dropout_scale",
    "weight_decompose",
    "wd_on_out",
    "detach_norm",
    "rs_lora",
    "decompose_both",
    "full_matrix",
    "unbalanced_factorization",
    "rescaled",
    "train_on_input",
    "use_data_init",
    "train_norm",
    "train_llm_adapter",
)
_INTEGER = ("factor", "block_size", "mask_group_id", "conv_dim")
_NUMBER = ("constraint", "dropout", "rank_dropout", "module_dropout", "conv_alpha")
_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_BOOLEAN, as_bool),
    **dict.fromkeys(_INTEGER, as_int),
    **dict.fromkeys(_NUMBER, as_number),
    "bypass_mode": lambda name, value: None if value in (None, "", "None", "none", "auto") else as_bool(name, value),
}
_INTERNAL = {"org_module", "lora_name", "lora_dim", "alpha", "multiplier", "layout", "new_bias"}


def legal_options(extra: frozenset[str] = frozenset()) -> frozenset[str]:
    """Every name a network accepts, aliases included."""
    own = (known_options() - _INTERNAL) | NETWORK_OPTIONS | extra
    return own | frozenset(ALIASES) | {"disable_conv_cp"}


def read_options(given: Mapping[str, Any], extra: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Canonical names and typed values; an unknown name is an error with the nearest one. None means not given."""
    legal = legal_options(extra)
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key not in legal:
            raise OptionError(unknown_name("option", key, legal, "of a network"))
        if key in DEPRECATED:
            say_once(f"option {key} is an old name; use {'use_tucker' if 'cp' in key else 'constraint'}")
        if key == "disable_conv_cp":
            key, value = "use_tucker", not as_bool(key, value)
        key = ALIASES.get(key, key)
        if value is not None:
            options[key] = _READERS[key](key, value) if key in _READERS else value
    return options


def check_used(options: Mapping[str, Any], used: frozenset[str]) -> None:
    """Refuse an option that asks for something no layer of this network does."""
    for key, value in options.items():
        if key in NETWORK_OPTIONS or key in COMMON or key in used:
            continue
        if value == DEFAULTS.get(key, False) or value is None:
            continue
        raise OptionError(
            f"option {key}={value!r} has no effect: no layer of this network uses an algorithm that takes it. "
            f"Options in use here: {', '.join(sorted(used)) or 'none beyond the common ones'}."
        )
