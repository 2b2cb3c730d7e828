"""A network: one adapter per matched layer of a model, and everything done to all of them at once.

Rules (targets, presets) belong to the instance. The class attributes hold the defaults that the next network starts
from; :meth:`LycorisNetwork.apply_preset` sets them on request, a preset given to a network never does. A subclass
with its own targets passes ``rules=`` or builds modules itself with :meth:`build` and :meth:`adopt_modules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..algorithms import get_algorithm
from ..algorithms.norm import NormModule
from ..bases import base_for
from ..bases.norms import norm_kind
from ..core.errors import CheckpointError, MergeError, OptionError
from ..core.messages import logger
from ..layers.options import COMMON
from . import behind, files, tied
from .matching import Matches, Target, find_targets, no_match
from .options import check_used, read_options
from .rules import DEFAULT_TARGETS, KEY_TO_FIELD, Rules

_ATTRIBUTES = {
    "enable_conv": "ENABLE_CONV",
    "target_module": "TARGET_REPLACE_MODULE",
    "target_name": "TARGET_REPLACE_NAME",
    "module_algo_map": "MODULE_ALGO_MAP",
    "name_algo_map": "NAME_ALGO_MAP",
    "prefix": "LORA_PREFIX",
    "use_fnmatch": "USE_FNMATCH",
    "exclude_name": "TARGET_EXCLUDE_NAME",
}


class LycorisNetwork(nn.Module):
    """Adapters on a model. Parameters and state dict are there at creation; ``apply_to`` puts the adapters in force.

    module: the model. lora_dim, alpha: rank and alpha of linear layers and 1x1 convolutions; conv_*: of larger
    kernels. network_module: an algorithm name or a module class. Further keywords go to the modules.
    """

    ENABLE_CONV: ClassVar[bool] = True
    TARGET_REPLACE_MODULE: ClassVar[list[str]] = list(DEFAULT_TARGETS)
    TARGET_REPLACE_NAME: ClassVar[list[str]] = []
    LORA_PREFIX: ClassVar[str] = "lycoris"
    MODULE_ALGO_MAP: ClassVar[dict[str, Any]] = {}
    NAME_ALGO_MAP: ClassVar[dict[str, Any]] = {}
    USE_FNMATCH: ClassVar[bool] = False
    TARGET_EXCLUDE_NAME: ClassVar[list[str]] = []

    @classmethod
    def apply_preset(cls, preset: Mapping[str, Any]) -> type[LycorisNetwork]:
        """Set the defaults that networks created from now on start from; :meth:`reset_preset` undoes it."""
        rules = cls.default_rules().with_preset(preset)
        for key in preset:
            field = KEY_TO_FIELD.get(key)
            if field is not None:
                value = getattr(rules, field)
                setattr(cls, _ATTRIBUTES[field], list(value) if isinstance(value, tuple) else value)
        return cls

    @classmethod
    def reset_preset(cls) -> None:
        """Back to the built-in defaults."""
        for field, attribute in _ATTRIBUTES.items():
            value = getattr(Rules(), field)
            setattr(cls, attribute, list(value) if isinstance(value, tuple) else value)

    @classmethod
    def default_rules(cls) -> Rules:
        """The class attributes as rules."""
        values: dict[str, Any] = {}
        for field, attribute in _ATTRIBUTES.items():
            value = getattr(cls, attribute)
            values[field] = tuple(value) if isinstance(value, list) else value
        return Rules(**values)

    def __init__(
        self,
        module: nn.Module,
        multiplier: float = 1.0,
        lora_dim: int = 4,
        conv_lora_dim: int = 4,
        alpha: Any = 1,
        conv_alpha: Any = 1,
        use_tucker: bool = False,
        dropout: float = 0.0,
        rank_dropout: float = 0.0,
        module_dropout: float = 0.0,
        network_module: Any = "locon",
        norm_modules: Any = NormModule,
        train_norm: bool = False,
        init_only: bool = False,
        warn_on_unmatched: bool = True,
        train_llm_adapter: bool = False,
        rules: Rules | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.root = [module]
        self.use_rules(rules or type(self).default_rules())
        self.multiplier = float(multiplier)
        self.lora_dim, self.conv_lora_dim = int(lora_dim), int(conv_lora_dim) if self.rules.enable_conv else 0
        self.alpha, self.conv_alpha = alpha, conv_alpha
        self.network_module, self.norm_modules = network_module, norm_modules
        self.train_norm, self.train_llm_adapter = bool(train_norm), bool(train_llm_adapter)
        common = {"dropout": dropout, "rank_dropout": rank_dropout, "module_dropout": module_dropout}
        self.options: dict[str, Any] = {**common, "use_tucker": use_tucker, **kwargs}
        self.use_tucker, self.dropout = bool(use_tucker), dropout
        self.rank_dropout, self.module_dropout = rank_dropout, module_dropout
        self.loras: list[Any] = []
        self.algo_table: dict[str, int] = {}
        self.skipped: list[str] = []
        self.weights_sd: dict[str, Tensor] | None = None
        self._kept: tuple[dict[str, Tensor], dict[str, str]] = ({}, {})
        self._closed: list[tuple[nn.Module, int]] = []
        if not init_only:
            self._create(module, warn_on_unmatched)

    # -- creation --------------------------------------------------------------------------------------------------

    def use_rules(self, rules: Rules) -> None:
        """Make ``rules`` this network's own; the attributes of the class are shadowed, not changed."""
        self.rules = rules
        for field, attribute in _ATTRIBUTES.items():
            value = getattr(rules, field)
            setattr(self, attribute, list(value) if isinstance(value, tuple) else value)

    def _target_classes(self, root: nn.Module) -> tuple[str, ...]:
        classes = dict.fromkeys((*self.rules.target_module, *self.rules.module_algo_map))
        if not self.train_llm_adapter:
            classes.pop("LLMAdapterTransformerBlock", None)
        if self._wants_norms() and "LayerNorm" in classes:
            names = {type(item).__name__ for item in root.modules() if norm_kind(item) is not None}
            classes.update(dict.fromkeys(sorted(names)))
        if "Linear" in classes and any(isinstance(item, nn.MultiheadAttention) for item in root.modules()):
            classes.setdefault("NonDynamicallyQuantizableLinear")  # its output projection, left out by name in build
        return tuple(classes)

    def _wants_norms(self) -> bool:
        return self.train_norm or self.network_module == "norm"

    def _create(self, root: nn.Module, warn_on_unmatched: bool) -> None:
        classes = self._target_classes(root)
        found = find_targets(root, self.rules, classes)
        self.adopt_modules(self.build(found.targets.values(), behind.read_directly(root)))
        if warn_on_unmatched:
            self._warn_unmatched(found)
        if not self.loras:
            raise no_match(root, self.rules, classes)
        used = frozenset().union(*(type(item).options for item in self.loras))
        check_used(self.options, used)
        logger.info(f"{len(self.loras)} modules: {self.algo_table}")

    def _warn_unmatched(self, found: Matches) -> None:
        asked = set(self.rules.target_name) | set(self.rules.name_algo_map)
        missing = {"classes": set(self.rules.module_algo_map) - found.classes, "names": asked - found.patterns}
        if tuple(self.rules.target_module) != DEFAULT_TARGETS:
            missing["classes"] |= set(self.rules.target_module) - found.classes
        for kind, names in missing.items():
            if names:
                logger.warning(f"no module matched these target {kind}: {', '.join(sorted(names))}")

    def build(self, targets: Iterable[Target], unreachable: Mapping[int, str] | None = None) -> list[Any]:
        """Adapter modules for targets, in order; layers that cannot carry one are passed over."""
        modules = []
        for target in targets:
            why = (unreachable or {}).get(id(target.module))
            adapter = None if why else self.build_one(target)
            if why and base_for(target.module) is not None:
                behind.skip_note(target.path, why)
                self.skipped.append(f"{target.path}: {why}")
            if adapter is not None and not adapter.not_supported:
                modules.append(adapter)
        return modules

    def build_one(self, target: Target) -> Any:
        """The adapter of one layer, or None where its kind or its dimension setting leaves it out."""
        config = dict(target.config)
        algorithm = config.pop("algo", self.network_module)
        cls = get_algorithm(algorithm).module_class if isinstance(algorithm, str) else algorithm
        is_norm = "Norm" in type(target.module).__name__ or norm_kind(target.module) is not None
        if is_norm and (self.train_norm or issubclass(cls, NormModule)):
            norm = self.norm_modules if self.train_norm else cls
            return norm(target.lora_name, target.module, self.multiplier, **self._norm_options())
        base = base_for(target.module)
        if base is None or is_norm or issubclass(cls, NormModule):
            return None
        rank, alpha = self._rank_and_alpha(base.op.window > 1, config)
        if not rank:
            return None
        options = self._options_for(cls, config)
        return cls(target.lora_name, target.module, self.multiplier, rank, alpha, **options)

    def _norm_options(self) -> dict[str, Any]:
        names = ("rank_dropout", "module_dropout", "rank_dropout_scale")
        return {name: self.options[name] for name in names if self.options.get(name)}

    def _rank_and_alpha(self, conv: bool, config: dict[str, Any]) -> tuple[int, Any]:
        rank = config.pop("dim", None) or (self.conv_lora_dim if conv else self.lora_dim)
        alpha = config.pop("alpha", None)
        default = self.conv_alpha if conv else self.alpha
        return int(rank or 0), default if alpha is None else alpha

    def _options_for(self, cls: Any, config: dict[str, Any]) -> dict[str, Any]:
        """Network options this class takes, under the layer's own overrides, which it must take."""
        nested = config.pop("options", None) or {}
        own = read_options({**config, **nested})
        refused = [key for key in own if key not in cls.options and key not in COMMON]
        if refused:
            raise OptionError(
                f"override {', '.join(refused)} has no effect on {cls.name}. "
                f"Legal: {', '.join(sorted(cls.options | COMMON))}."
            )
        shared = {key: value for key, value in self.options.items() if key in cls.options or key in COMMON}
        return {key: value for key, value in {**shared, **own}.items() if value is not None}

    def adopt_modules(self, modules: Iterable[Any]) -> None:
        """Make adapters part of this network: parameters, state dict and table."""
        for adapter in modules:
            if adapter.lora_name in self._modules:
                raise OptionError(f"two layers would share the name '{adapter.lora_name}'")
            self.loras.append(adapter)
            self.add_module(adapter.lora_name, adapter)
            kind = type(adapter).__name__
            self.algo_table[kind] = self.algo_table.get(kind, 0) + 1

    # -- matching, as other tools ask for it -----------------------------------------------------------------------

    def match_fn(self, pattern: str, name: str) -> bool:
        """Whether a target pattern fits a module path."""
        return self.rules.matches(pattern, name)

    def is_excluded(self, name: str, patterns: Any = None) -> bool:
        """Whether the preset keeps a module path out of scope."""
        if patterns is None:
            return self.rules.excluded(name)
        return bool(name) and self.rules.any_match(patterns, name)

    def find_conf_for_name(self, name: str) -> Any:
        """The per-name override of a module path, or None."""
        return self.rules.name_config(name)

    # -- in force ---------------------------------------------------------------------------------------------------

    def apply_to(self) -> None:
        """Put every adapter on its layer; applying twice is harmless."""
        for adapter in self.loras:
            adapter.apply_to()
            if adapter.lora_name not in self._modules:
                self.add_module(adapter.lora_name, adapter)
        if not self._closed:
            wrapped = {id(adapter.org_module[0]) for adapter in self.loras}
            self._closed = behind.close_fast_paths(self.root[0], wrapped)

    def restore(self) -> None:
        """Take every adapter off, in any order among stacked networks."""
        for adapter in self.loras:
            adapter.restore()
        behind.open_fast_paths(self._closed)
        self._closed = []

    def set_multiplier(self, multiplier: float) -> None:
        """Set the strength of every adapter."""
        self.multiplier = float(multiplier)
        for adapter in self.loras:
            adapter.multiplier = multiplier

    # -- merging ---------------------------------------------------------------------------------------------------

    def is_mergeable(self) -> bool:
        """Whether every target's stored weight can take a delta."""
        return all(adapter.base.mergeable() for adapter in self.loras if not adapter.not_supported)

    def merge_to(self, weight: float = 1.0, *, precise: bool = False, check: bool = True) -> None:
        """Bake the deltas in at strength ``weight``. All layers are checked before any is written."""
        adapters = [adapter for adapter in self.loras if not adapter.not_supported]
        self._refuse_unmergeable(adapters)
        if check:
            self._check_merge(adapters, float(weight))
        self._untie(adapters)
        for adapter in adapters:
            adapter.merge_to(weight, precise=precise, check=False)

    def _refuse_unmergeable(self, adapters: list[Any]) -> None:
        refused = [(adapter.lora_name, adapter.base.mergeable()) for adapter in adapters]
        bad = [f"'{name}' ({verdict.reason})" for name, verdict in refused if not verdict]
        if bad:
            raise MergeError(f"{len(bad)} layers cannot be merged, nothing was written: {', '.join(bad[:8])}")

    @torch.no_grad()
    def _check_merge(self, adapters: list[Any], weight: float) -> None:
        for adapter in adapters:
            if adapter.merged_strength is None:
                adapter.check_finite(*adapter.get_merged_weight(weight))

    def _untie(self, adapters: list[Any]) -> None:
        owned = tied.owners(self.root[0])
        for adapter in adapters:
            module = adapter.org_module[0]
            holders = owned.get(id(module.weight), [])
            if len(holders) > 1 and adapter.merged_strength is None:
                tied.untie(
                    module, [name for name in holders if not self._is_weight_of(name, module)], adapter.lora_name
                )

    def _is_weight_of(self, path: str, module: nn.Module) -> bool:
        parent = path.rpartition(".")[0]
        return self.root[0].get_submodule(parent) is module

    def onfly_merge(self, weight: float = 1.0) -> None:
        """Merge reversibly, with copies of the base on the CPU."""
        self.merge_to(weight, precise=True)

    def onfly_restore(self) -> None:
        """Undo :meth:`onfly_merge`, bit-exact."""
        for adapter in self.loras:
            if not adapter.not_supported:
                adapter.onfly_restore()

    # -- files -----------------------------------------------------------------------------------------------------

    def load_weights(self, file: Any) -> dict[str, list[str]]:
        """Load an adapter file, before or after ``apply_to``; lists of loaded, missing and unexpected keys."""
        tensors, metadata = files.read_file(file)
        self.weights_sd = tensors
        return self.load_tensors(tensors, metadata, str(file))

    def load_tensors(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], source: str) -> dict[str, Any]:
        """As :meth:`load_weights`, from tensors in memory."""
        own, kept = files.split_kept(tensors)
        names = {adapter.lora_name for adapter in self.loras}
        foreign = {key.partition(".")[0] for key in own} - names
        if own and len(foreign) == len({key.partition(".")[0] for key in own}):
            raise files.unmatched(foreign, self.rules.prefix, names, source)
        self._refuse_misfits(own)
        state = dict(own)
        missing, unexpected = self.load_state_dict(state, strict=False)
        self._kept = (dict(kept), dict(metadata))
        loaded = sorted(set(own) - set(unexpected))
        report = {"loaded keys": loaded, "missing keys": missing, "unexpected keys": unexpected}
        if unexpected:
            logger.warning(f"{source}: {len(unexpected)} keys match no layer: {', '.join(unexpected[:8])}")
        return {key: value for key, value in report.items() if value}

    def _refuse_misfits(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise for a tensor that fits no layer's shape before any layer is loaded."""
        groups: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, rest = key.partition(".")
            groups.setdefault(name, {})[rest] = value
        for adapter in self.loras:
            adapter.refuse_misfits(groups.get(adapter.lora_name, {}))

    def save_weights(self, file: Any, dtype: torch.dtype | None = None, metadata: Any = None) -> None:
        """Write an adapter file (safetensors, or a PyTorch file by its ending), atomically, with metadata."""
        kept, known = self._kept
        tensors = {**files.prepare(self.state_dict(), dtype), **kept}
        if not tensors:
            raise CheckpointError(f"'{file}' was not written: the network holds no adapter")
        files.write_file(file, tensors, {**known, **files.network_metadata(self.summary(), metadata)})

    def summary(self) -> dict[str, Any]:
        """Algorithm, rank, alpha and options, for metadata."""
        algorithm = self.network_module
        name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "name", str(algorithm))
        options = {key: value for key, value in self.options.items() if value not in (None, False, 0, 0.0)}
        options["algo"] = name
        layers = _brief({item.lora_name: _layer_note(item) for item in self.loras if not item.not_supported})
        return {"dim": self.lora_dim, "alpha": self.alpha, "options": options, "layers": layers}

    # -- training --------------------------------------------------------------------------------------------------

    def prepare_optimizer_params(self, lr: float | None) -> list[dict[str, Any]]:
        """One parameter group with all adapter parameters."""
        self.requires_grad_(True)
        group: dict[str, Any] = {"params": [item for adapter in self.loras for item in adapter.parameters()]}
        return [group if lr is None else {**group, "lr": lr}]

    def prepare_grad_etc(self, *_: Any) -> None:
        """Make the adapters trainable."""
        self.requires_grad_(True)

    def on_epoch_start(self, *_: Any) -> None:
        """Training mode."""
        self.train()

    def get_trainable_params(self, *_: Any) -> Any:
        """The adapters' parameters."""
        return self.parameters()

    def freeze_base(self) -> int:
        """Stop gradients into the base model; the number of parameters frozen."""
        own = {id(item) for item in self.parameters()}
        count = 0
        for item in self.root[0].parameters():
            if id(item) not in own and item.requires_grad:
                item.requires_grad_(False)
                count += item.numel()
        return count

    def enable_gradient_checkpointing(self) -> None:
        """Mark the model's inputs and embeddings as needing a gradient.

        Reentrant checkpointing trains nothing inside a block whose input needs no gradient; with a frozen base that
        would be every block.
        """
        if getattr(self, "_marks", None):
            return
        root = self.root[0]
        self._marks = [root.register_forward_pre_hook(mark_inputs, with_kwargs=True)]
        for module in root.modules():
            if isinstance(module, nn.Embedding):
                self._marks.append(module.register_forward_hook(_mark_output))

    def apply_max_norm_regularization(self, max_norm_value: float, device: Any = None) -> tuple[int, float, float]:
        """Limit every layer's |W' - W|_F; (layers scaled, mean norm, largest norm) after it."""
        results = [item.apply_max_norm(max_norm_value, device) for item in self.loras if not item.not_supported]
        norms = [float(norm) for _, norm in results]
        if not norms:
            return 0, 0.0, 0.0
        return sum(bool(scaled) for scaled, _ in results), sum(norms) / len(norms), max(norms)


def _brief(notes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The commonest note once, under "*", and the layers that differ from it."""
    if not notes:
        return {}
    listed = list(notes.values())
    common = max(listed, key=listed.count)
    return {"*": common, **{name: note for name, note in notes.items() if note != common}}


def _layer_note(adapter: Any) -> dict[str, Any]:
    note: dict[str, Any] = {"algo": adapter.name}
    if adapter.wd:
        note["dora_axis"] = "output" if adapter.wd_on_out else "input"
        note["detach_norm"] = adapter.detach_norm
    return note


def mark_inputs(_: nn.Module, args: Any, kwargs: Any) -> None:
    """Forward pre-hook: floating inputs that are leaves need a gradient from here on."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, Tensor) and item.is_floating_point() and item.is_leaf and torch.is_grad_enabled():
            item.requires_grad_(True)


def _mark_output(_: nn.Module, __: Any, output: Any) -> None:
    if isinstance(output, Tensor) and not output.requires_grad and torch.is_grad_enabled():
        output.requires_grad_(True)
