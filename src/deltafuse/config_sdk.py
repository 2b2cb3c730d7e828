"""Presets and per-module overrides as data: what can be said, and a clear error for what cannot.

A preset chooses which modules of a model are adapted (by class name and by module path) and may give some of them
another algorithm or other options. :class:`PresetConfig` is its typed form, :class:`AlgoOverride` one such exception,
:class:`AlgoSpec` what an algorithm can be told.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .core.errors import OptionError, nearest

VALID_PRESET_KEYS: tuple[str, ...] = (
    "enable_conv",
    "target_module",
    "target_name",
    "module_algo_map",
    "name_algo_map",
    "lora_prefix",
    "use_fnmatch",
    "unet_target_module",
    "unet_target_name",
    "text_encoder_target_module",
    "text_encoder_target_name",
    "exclude_name",
)

_MAP_KEYS = ("module_algo_map", "name_algo_map")
_FLAG_KEYS = ("enable_conv", "use_fnmatch")
_TEXT_KEYS = ("lora_prefix",)


class PresetValidationError(OptionError):
    """A preset, override or algorithm name that has no legal reading (a ``ValueError``)."""


@dataclass(frozen=True)
class AlgoSpec:
    """What one algorithm is and which options it understands."""

    name: str
    description: str
    supported_args: tuple[str, ...] = ()
    required_args: tuple[str, ...] = ()
    notes: str | None = None

    def supports(self, arg: str) -> bool:
        """True where ``arg`` is an option of this algorithm (documented aliases included)."""
        return arg in self.supported_args


_SIZE = ("dim", "alpha")
_DROPOUT = ("dropout", "rank_dropout", "module_dropout", "rank_dropout_scale")
_DORA = ("weight_decompose", "dora_wd", "wd_on_out", "wd_on_output", "detach_norm")
_COMMON = (*_DROPOUT, "bypass_mode", *_DORA)
_TUCKER = ("use_tucker", "use_cp", "use_conv_cp", "disable_conv_cp")
_CONSTRAINT = ("constraint", "constrain")
_RANKED = (*_SIZE, *_COMMON, "rs_lora")
_LORA = (*_RANKED, *_TUCKER, "use_scalar")

_SPECS = (
    AlgoSpec("lora", "Low-rank adapter (LoRA): the delta is up @ down, for linear and convolution layers.", _LORA),
    AlgoSpec("locon", "Another name for lora, the one used where convolutions are trained too.", _LORA),
    AlgoSpec(
        "loha",
        "LoHa: the elementwise product of two low-rank matrices, rank up to dim squared.",
        _LORA,
        notes="A high dim makes the product large: lower the learning rate with it.",
    ),
    AlgoSpec(
        "lokr",
        "LoKr: the Kronecker product of two small factors, either of which may be low-rank.",
        (*_LORA, "factor", "decompose_both", "full_matrix", "unbalanced_factorization"),
        notes="A dim of at least half the larger factor keeps that factor full; with both full, alpha is ignored.",
    ),
    AlgoSpec(
        "dylora",
        "DyLoRA: a LoRA trained block by block, usable at every rank up to dim.",
        (*_RANKED, "block_size", "use_scalar"),
    ),
    AlgoSpec("glora", "GLoRA: one low-rank map on the layer's input and one beside the layer.", _LORA),
    AlgoSpec(
        "full",
        "Full fine-tuning: the weight's and the bias's differences are the parameters.",
        (*_SIZE, *_COMMON),
        notes="As large as the layers it trains; dim and alpha are accepted and have no effect.",
    ),
    AlgoSpec(
        "diag-oft",
        "OFT on the output side: a block-diagonal rotation of each layer's output channels.",
        ("dim", *_COMMON, *_CONSTRAINT, "rescaled"),
        notes="dim chooses the number of blocks; constraint bounds the rotation and takes the place of alpha in files.",
    ),
    AlgoSpec(
        "oft",
        "OFT on the input side: a block-diagonal rotation of each layer's input channels.",
        ("dim", *_COMMON, *_CONSTRAINT),
        notes="dim is the block size and must divide the input channels; the form PEFT and OneTrainer train.",
    ),
    AlgoSpec(
        "boft",
        "BOFT: a butterfly of block rotations of each layer's output channels.",
        ("dim", *_COMMON, *_CONSTRAINT, "rescaled"),
        notes="The number of blocks must be a power of two: a dimension without such a split is refused by name.",
    ),
    AlgoSpec(
        "ia3",
        "(IA)^3: one learned factor per output or input channel.",
        (*_COMMON, "train_on_input"),
        notes="Made for the preset 'ia3', which picks the layers and the side of each.",
    ),
    AlgoSpec(
        "tlora",
        "T-LoRA: a LoRA started from singular vectors, its rank masked by the diffusion timestep.",
        (*_RANKED, "sig_type", "use_data_init", "mask_group_id"),
        notes="sig_type is 'principal', 'last' or 'middle'; call set_timestep_mask() before each forward.",
    ),
)
_OTHER_NAMES = {"input-oft": "oft", "oft-in": "oft", "t-lora": "tlora"}

ALGO_REGISTRY: dict[str, AlgoSpec] = {spec.name: spec for spec in _SPECS}


def _algo_key(name: object) -> str:
    """The registry's spelling of ``name``: any case, "_" or "-" as separator."""
    folded = str(name).strip().lower().replace("_", "-")
    return _OTHER_NAMES.get(folded, folded)


def describe_algo(name: str) -> AlgoSpec:
    """The :class:`AlgoSpec` of ``name``; :class:`PresetValidationError` with the nearest name where there is none."""
    key = _algo_key(name)
    if key not in ALGO_REGISTRY:
        raise PresetValidationError(_unknown("algorithm", name, ALGO_REGISTRY))
    return ALGO_REGISTRY[key]


def list_algorithms() -> Iterable[AlgoSpec]:
    """All algorithms, in registry order."""
    return ALGO_REGISTRY.values()


@dataclass
class AlgoOverride:
    """Another algorithm and other options for some modules; without ``algo`` the network's algorithm stays."""

    algo: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> AlgoOverride:
        """Split ``{"algo": ..., option: value}`` into the two fields; the mapping itself is left as it is."""
        data = copy.deepcopy(dict(mapping))
        return cls(algo=data.pop("algo", None), options=data)

    def to_dict(self) -> dict[str, Any]:
        """The mapping :meth:`from_mapping` reads."""
        result = copy.deepcopy(self.options)
        if self.algo is not None:
            result["algo"] = self.algo
        return result

    def validate(self) -> None:
        """Raise :class:`PresetValidationError` for an unknown algorithm or an option it does not have.

        Without an algorithm an option passes when at least one algorithm has it.
        """
        if self.algo is None:
            legal = {arg for spec in ALGO_REGISTRY.values() for arg in spec.supported_args}
            owner = "of any algorithm"
        else:
            legal = set(describe_algo(self.algo).supported_args)
            owner = f"of algorithm '{self.algo}'"
        for key in self.options:
            if key not in legal:
                raise PresetValidationError(_unknown(f"option {owner}:", key, legal))


@dataclass
class PresetConfig:
    """Which modules are adapted, and with what. A field left None keeps the network's own default."""

    enable_conv: bool | None = None
    target_module: list[str] | None = None
    target_name: list[str] | None = None
    module_algo_map: dict[str, AlgoOverride] = field(default_factory=dict)
    name_algo_map: dict[str, AlgoOverride] = field(default_factory=dict)
    lora_prefix: str | None = None
    use_fnmatch: bool | None = None
    unet_target_module: list[str] | None = None
    unet_target_name: list[str] | None = None
    text_encoder_target_module: list[str] | None = None
    text_encoder_target_name: list[str] | None = None
    exclude_name: list[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, strict: bool = False) -> PresetConfig:
        """Read a preset mapping. Unknown keys and values of the wrong kind raise :class:`PresetValidationError`;
        with ``strict`` the overrides' algorithms and options are checked too."""
        for key in data:
            if key not in VALID_PRESET_KEYS:
                raise PresetValidationError(_unknown("preset key", key, VALID_PRESET_KEYS))
        fields = {key: _read_value(key, data[key], strict) for key in VALID_PRESET_KEYS if key in data}
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The mapping :meth:`from_dict` reads: only what is set, nothing shared with this object."""
        data: dict[str, Any] = {}
        for key in VALID_PRESET_KEYS:
            value = getattr(self, key)
            if key in _MAP_KEYS:
                if value:
                    data[key] = {name: override.to_dict() for name, override in value.items()}
            elif value is not None:
                data[key] = copy.deepcopy(value)
        data.update(copy.deepcopy(self.extra))
        return data

    def list_algorithms(self) -> Iterable[str]:
        """The algorithms its overrides name, in order, repeats included."""
        for override in [*self.module_algo_map.values(), *self.name_algo_map.values()]:
            if override.algo:
                yield override.algo


def _unknown(kind: str, name: object, legal: Iterable[str]) -> str:
    names = sorted(legal)
    close = nearest(str(name), names)
    hint = f" Did you mean '{close}'?" if close else ""
    return f"unknown {kind} '{name}'.{hint} Legal: {', '.join(names) or 'none'}."


def _read_value(key: str, value: Any, strict: bool) -> Any:
    """One preset entry in its typed form; a wrong kind is an error that names the key."""
    if key in _MAP_KEYS:
        return _read_overrides(key, value, strict)
    if value is None:
        return None
    if key in _FLAG_KEYS:
        if not isinstance(value, bool):
            raise PresetValidationError(f"preset key '{key}' takes true or false, got {value!r}")
        return value
    if key in _TEXT_KEYS:
        if not isinstance(value, str):
            raise PresetValidationError(f"preset key '{key}' takes a string, got {value!r}")
        return value
    # A bare string would be searched letter by letter ("Linear" contains "in"), so only real sequences pass.
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise PresetValidationError(f"preset key '{key}' takes a list of strings, got {value!r}")
    names = list(value)
    for item in names:
        if not isinstance(item, str):
            raise PresetValidationError(f"preset key '{key}' takes a list of strings, it holds {item!r}")
    return names


def _read_overrides(key: str, value: Any, strict: bool) -> dict[str, AlgoOverride]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PresetValidationError(f"preset key '{key}' takes a table of overrides, got {value!r}")
    overrides = {}
    for name, entry in value.items():
        if isinstance(entry, AlgoOverride):
            override = copy.deepcopy(entry)
        elif entry is None or isinstance(entry, Mapping):
            override = AlgoOverride.from_mapping(entry or {})
        else:
            raise PresetValidationError(f"preset key '{key}', entry '{name}' takes a table of options, got {entry!r}")
        if strict:
            override.validate()
        overrides[str(name)] = override
    return overrides
