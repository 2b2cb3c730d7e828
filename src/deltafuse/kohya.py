"""Networks for trainers in the style of kohya's sd-scripts: a UNet (or transformer) and text encoders in one network.

``network_module = deltafuse.kohya`` (or ``lycoris.kohya`` behind the alias). Layers are named ``lora_unet_<path>``,
``lora_te_<path>`` for a single text encoder and ``lora_te1_``, ``lora_te2_``... for a list of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ._kohya_groups import Groups, parameter_groups, rates_per_encoder
from ._kohya_rules import TEXT_KEYS, UNET_KEYS, KohyaRules, Part, holder_of, parts_of
from .algorithms.norm import NormModule
from .config import FULL_TEXT_ENCODER_MODULES, FULL_UNET_MODULES, FULL_UNET_NAMES
from .core.errors import CheckpointError
from .logging import logger
from .network import LycorisNetwork, Rules, behind, files, lora_name, no_match
from .network.create import network_arguments
from .network.network import mark_inputs
from .network.options import check_used, read_options
from .utils.general import str_bool
from .utils.hashes import safetensors_data_hash
from .utils.merging import adapter_from_tensors
from .utils.preset import resolve_preset

LORAPLUS_OPTIONS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
KOHYA_OPTIONS = frozenset({*LORAPLUS_OPTIONS, "neuron_dropout", "train_t5xxl"})
_DROPOUTS = ("dropout", "rank_dropout", "module_dropout", "rank_dropout_scale")
_SHARED = {
    "enable_conv": "ENABLE_CONV",
    "module_algo_map": "MODULE_ALGO_MAP",
    "name_algo_map": "NAME_ALGO_MAP",
    "use_fnmatch": "USE_FNMATCH",
    "exclude_name": "TARGET_EXCLUDE_NAME",
}


def create_network(
    multiplier: float,
    network_dim: int | None,
    network_alpha: Any,
    vae: Any,
    text_encoder: Any,
    unet: nn.Module,
    warn_on_unmatched: bool = True,
    **kwargs: Any,
) -> LycorisNetworkKohya:
    """A network on a UNet and its text encoder(s), from options as a trainer passes them (strings included).

    text_encoder: a model, a list of models, or None. Options are those of ``create_lycoris`` and, for LoRA+,
    loraplus_lr_ratio, loraplus_unet_lr_ratio, loraplus_text_encoder_lr_ratio; train_t5xxl adds T5's layers to the
    targets; neuron_dropout is what ``dropout`` falls back to. ``vae`` is not used.
    """
    arguments, rest = network_arguments(network_dim, network_alpha, kwargs, KOHYA_OPTIONS)
    if "neuron_dropout" in rest:
        arguments.setdefault("dropout", float(rest["neuron_dropout"]))
    rules = LycorisNetworkKohya.default_kohya_rules()
    if "preset" in rest:
        rules = rules.with_preset(resolve_preset(rest["preset"]))
    if arguments["network_module"] == "ia3" and rest.get("preset") != "ia3":
        logger.info("algorithm ia3 is meant for the preset 'ia3'")
    network = LycorisNetworkKohya(
        text_encoder,
        unet,
        multiplier=multiplier,
        train_t5xxl=str_bool(rest.get("train_t5xxl", False)),
        warn_on_unmatched=warn_on_unmatched,
        rules=rules,
        **arguments,
    )
    network.use_loraplus(rest)
    return network


def create_network_from_weights(
    multiplier: float,
    file: Any,
    vae: Any,
    text_encoder: Any,
    unet: nn.Module,
    weights_sd: dict[str, Tensor] | None = None,
    for_inference: bool = False,
    **kwargs: Any,
) -> tuple[LycorisNetworkKohya, dict[str, Tensor]]:
    """(network, tensors) of an adapter file; algorithm, rank and alpha of every layer are read from its tensors.

    Dropouts and LoRA+ ratios among the options act; those that the file decides (algo, dims, preset) give way to it.
    Layers of models that were not given are left out by name; ``strict=False`` lets other strangers pass too.

    Raises:
        CheckpointError: the file is unreadable, fits no layer, or names layers the given models lack.
    """
    strict = str_bool(kwargs.pop("strict", True))
    options = read_options(kwargs, KOHYA_OPTIONS)
    tensors, metadata = (weights_sd, {}) if weights_sd is not None else files.read_file(file)
    if isinstance(text_encoder, list | tuple) and len(text_encoder) == 1 and _has_unnumbered_encoder(tensors):
        text_encoder = text_encoder[0]
    network = LycorisNetworkKohya(text_encoder, unet, multiplier=multiplier, init_only=True)
    network.read_tensors(tensors, str(file or "weights_sd"), strict=strict)
    network._kept = (files.split_kept(tensors)[1], metadata)
    for adapter in network.loras:
        for name in _DROPOUTS:
            if name in options:
                setattr(adapter, name, options[name])
    network.use_loraplus(options)
    if for_inference:
        network.eval()
    return network, tensors


def _has_unnumbered_encoder(tensors: Mapping[str, Tensor]) -> bool:
    return any(key.startswith(f"{LycorisNetworkKohya.LORA_PREFIX_TEXT_ENCODER}_") for key in tensors)


class LycorisNetworkKohya(LycorisNetwork):
    """Adapters on a UNet and text encoders. Rules and presets belong to the instance.

    The class attributes are the defaults that networks start from; :meth:`apply_preset` changes them on request, a
    preset given to :func:`create_network` never does. ``unet_loras`` and ``text_encoder_loras`` hold the adapters.
    """

    ENABLE_CONV: ClassVar[bool] = True
    UNET_TARGET_REPLACE_MODULE: ClassVar[list[str]] = list(FULL_UNET_MODULES)
    UNET_TARGET_REPLACE_NAME: ClassVar[list[str]] = list(FULL_UNET_NAMES)
    TEXT_ENCODER_TARGET_REPLACE_MODULE: ClassVar[list[str]] = list(FULL_TEXT_ENCODER_MODULES)
    TEXT_ENCODER_TARGET_REPLACE_NAME: ClassVar[list[str]] = []
    LORA_PREFIX_UNET: ClassVar[str] = "lora_unet"
    LORA_PREFIX_TEXT_ENCODER: ClassVar[str] = "lora_te"
    MODULE_ALGO_MAP: ClassVar[dict[str, Any]] = {}
    NAME_ALGO_MAP: ClassVar[dict[str, Any]] = {}
    USE_FNMATCH: ClassVar[bool] = False
    TARGET_EXCLUDE_NAME: ClassVar[list[str]] = []

    # -- rules -----------------------------------------------------------------------------------------------------

    @classmethod
    def default_kohya_rules(cls) -> KohyaRules:
        """The class attributes as rules."""
        shared: dict[str, Any] = {field: getattr(cls, attribute) for field, attribute in _SHARED.items()}
        shared["exclude_name"] = tuple(shared["exclude_name"])
        unet = Rules(
            target_module=tuple(cls.UNET_TARGET_REPLACE_MODULE),
            target_name=tuple(cls.UNET_TARGET_REPLACE_NAME),
            prefix=cls.LORA_PREFIX_UNET,
            **shared,
        )
        text = Rules(
            target_module=tuple(cls.TEXT_ENCODER_TARGET_REPLACE_MODULE),
            target_name=tuple(cls.TEXT_ENCODER_TARGET_REPLACE_NAME),
            prefix=cls.LORA_PREFIX_TEXT_ENCODER,
            **shared,
        )
        return KohyaRules(unet, text)

    @classmethod
    def apply_preset(cls, preset: Mapping[str, Any]) -> type[LycorisNetworkKohya]:
        """Set the defaults that networks created from now on start from; :meth:`reset_preset` undoes it."""
        cls._set_defaults(cls, cls.default_kohya_rules().with_preset(preset))
        return cls

    @classmethod
    def reset_preset(cls) -> None:
        """Back to the built-in defaults."""
        unet = Rules(target_module=tuple(FULL_UNET_MODULES), target_name=tuple(FULL_UNET_NAMES), prefix="lora_unet")
        text = Rules(target_module=tuple(FULL_TEXT_ENCODER_MODULES), prefix="lora_te")
        cls._set_defaults(cls, KohyaRules(unet, text))

    @staticmethod
    def _set_defaults(owner: Any, rules: KohyaRules) -> None:
        """Write ``rules`` to the attributes of the class, or of one network, which shadow the class's."""
        values = {attribute: getattr(rules.unet, field) for field, attribute in _SHARED.items()}
        for keys, part in ((UNET_KEYS, rules.unet), (TEXT_KEYS, rules.text_encoder)):
            for key, field in keys.items():
                values[key.upper().replace("TARGET", "TARGET_REPLACE")] = getattr(part, field)
        for attribute, value in values.items():
            setattr(owner, attribute, list(value) if isinstance(value, tuple) else value)

    # -- creation --------------------------------------------------------------------------------------------------

    def __init__(
        self,
        text_encoder: Any,
        unet: nn.Module | None,
        multiplier: float = 1.0,
        lora_dim: int = 4,
        conv_lora_dim: int = 4,
        alpha: Any = 1,
        conv_alpha: Any = 1,
        use_tucker: bool = False,
        dropout: float = 0,
        rank_dropout: float = 0,
        module_dropout: float = 0,
        network_module: Any = "locon",
        norm_modules: Any = NormModule,
        train_norm: bool = False,
        train_t5xxl: bool = False,
        warn_on_unmatched: bool = True,
        train_llm_adapter: bool = False,
        rules: KohyaRules | None = None,
        init_only: bool = False,
        **kwargs: Any,
    ) -> None:
        chosen = rules or type(self).default_kohya_rules()
        chosen = chosen.with_t5() if train_t5xxl else chosen
        models = parts_of(text_encoder, unet, chosen)
        super().__init__(
            holder_of(models),
            multiplier,
            lora_dim,
            conv_lora_dim,
            alpha,
            conv_alpha,
            use_tucker,
            dropout,
            rank_dropout,
            module_dropout,
            network_module,
            norm_modules,
            train_norm,
            init_only=True,
            train_llm_adapter=train_llm_adapter,
            rules=chosen.unet,
            **kwargs,
        )
        self.parts, self.kohya_rules, self.train_t5xxl = models, chosen, bool(train_t5xxl)
        self._set_defaults(self, chosen)
        self.text_encoder_loras: list[Any] = []
        self.unet_loras: list[Any] = []
        self.loraplus_lr_ratio: float | None = None
        self.loraplus_unet_lr_ratio: float | None = None
        self.loraplus_text_encoder_lr_ratio: float | None = None
        self._source: Any = None
        if not init_only:
            self._create_parts(warn_on_unmatched)

    def _create_parts(self, warn_on_unmatched: bool) -> None:
        self._match(warn_on_unmatched)
        if not self.loras:
            part = self.parts[-1]
            raise no_match(part.model, part.rules, part.classes(self.train_llm_adapter))
        check_used(self.options, frozenset().union(*(type(item).options for item in self.loras)))
        counts = f"{len(self.text_encoder_loras)} in text encoders, {len(self.unet_loras)} in the UNet"
        logger.info(f"{len(self.loras)} modules ({counts}): {self.algo_table}")

    def _match(self, warn_on_unmatched: bool) -> None:
        for part in self.parts:
            found = part.targets(self.train_llm_adapter)
            self._adopt(part, self.build(found.targets.values(), behind.read_directly(part.model)))
            missing = sorted(set(part.rules.target_module) - found.classes - _COMMON_CLASSES)
            if part.rules.target_module:
                missing += sorted(set(part.rules.target_name) - found.patterns - set(FULL_UNET_NAMES))
            if warn_on_unmatched and missing:
                logger.warning("%s: no module matched these targets: %s", part.prefix, ", ".join(missing))

    def _adopt(self, part: Part, adapters: list[Any]) -> None:
        self.adopt_modules(adapters)
        (self.unet_loras if part.is_unet else self.text_encoder_loras).extend(adapters)

    # -- in force --------------------------------------------------------------------------------------------------

    def apply_to(  # type: ignore[override]
        self,
        text_encoder: Any = None,
        unet: Any = None,
        apply_text_encoder: bool = True,
        apply_unet: bool = True,
    ) -> None:
        """Put the adapters on the models the network was created on, or on some of them only.

        Adapters that are not applied leave the network: they are neither trained nor saved.
        """
        self._keep(bool(apply_text_encoder), bool(apply_unet))
        super().apply_to()

    def _keep(self, text_encoder: bool, unet: bool) -> None:
        dropped = [*([] if text_encoder else self.text_encoder_loras), *([] if unet else self.unet_loras)]
        for adapter in dropped:
            adapter.restore()
            del self._modules[adapter.lora_name]
            self.algo_table[type(adapter).__name__] -= 1
        self.text_encoder_loras = self.text_encoder_loras if text_encoder else []
        self.unet_loras = self.unet_loras if unet else []
        self.loras = [*self.text_encoder_loras, *self.unet_loras]

    def merge_to(  # type: ignore[override]
        self,
        text_encoder: Any = None,
        unet: Any = None,
        weights_sd: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        *,
        precise: bool = False,
        check: bool = True,
    ) -> None:
        """Bake the deltas in at this network's strength; with ``weights_sd``, of the models it names only.

        ``weights_sd`` is loaded first where the network was not made from it. Deltas are computed on ``device`` (the
        adapters' where None); weights keep their dtype and place, so ``dtype`` changes nothing. As on other networks a
        number as the only argument is the strength.
        """
        if isinstance(text_encoder, int | float):
            super().merge_to(text_encoder, precise=precise, check=check)
            return
        if weights_sd is not None:
            self._take(weights_sd)
        if device is not None:
            self.to(device)
        super().merge_to(self.multiplier, precise=precise, check=check)

    def _take(self, weights_sd: Mapping[str, Tensor]) -> None:
        names = {key.partition(".")[0] for key in weights_sd}
        in_unet = any(self._is_unet_name(name) for name in names)
        in_text = any(name.startswith(self.LORA_PREFIX_TEXT_ENCODER) for name in names)
        self._keep(in_text, in_unet)
        if weights_sd is not self._source:
            self.load_tensors(weights_sd, {}, "weights_sd")

    def _is_unet_name(self, name: str) -> bool:
        return name.startswith(f"{self.LORA_PREFIX_UNET}_")

    def onfly_merge(self, weight: float = 1.0) -> None:
        """Merge reversibly, with copies of the base on the CPU."""
        self.merge_to(weight, precise=True)

    def backup_weights(self) -> None:
        """Nothing to do: :meth:`pre_calculation` keeps the copies that :meth:`restore_weights` puts back."""

    def pre_calculation(self) -> None:
        """Merge reversibly at this network's strength, for faster inference."""
        self.onfly_merge(self.multiplier)

    def restore_weights(self) -> None:
        """Undo :meth:`pre_calculation`, bit-exact."""
        self.onfly_restore()

    # -- files -----------------------------------------------------------------------------------------------------

    def read_tensors(self, tensors: Mapping[str, Tensor], source: str, *, strict: bool = True) -> None:
        """Build the adapters a file's tensors describe; see :func:`create_network_from_weights`."""
        groups: dict[str, dict[str, Tensor]] = {}
        for key, value in files.split_kept(tensors)[0].items():
            name, _, rest = key.partition(".")
            groups.setdefault(name, {})[rest] = value
        layers = {
            lora_name(part.prefix, path): (part, module)
            for part in self.parts
            for path, module in part.model.named_modules()
        }
        self._refuse_strangers([name for name in groups if name not in layers], groups, layers, source, strict)
        for name, own in groups.items():
            if name in layers:
                part, module = layers[name]
                self._adopt(part, [adapter_from_tensors(own, name, module)])
        self.loras = [*self.text_encoder_loras, *self.unet_loras]
        self.set_multiplier(self.multiplier)
        self._source = tensors
        logger.info(f"{len(self.loras)} modules read from {source}")

    def _refuse_strangers(self, strangers: list[str], groups: Any, layers: Any, source: str, strict: bool) -> None:
        if not groups:
            raise CheckpointError(f"{source} holds no adapter tensors")
        ours = [name for name in strangers if any(name.startswith(f"{part.prefix}_") for part in self.parts)]
        if len(strangers) == len(groups) or (strict and ours):
            raise files.unmatched(ours or strangers, self.LORA_PREFIX_UNET, layers, source)
        if strangers:
            shown = ", ".join(sorted(strangers)[:6])
            logger.warning(f"{source}: {len(strangers)} entries left out, their model was not given: {shown}")

    def save_weights(self, file: Any, dtype: torch.dtype | None = None, metadata: Any = None) -> None:
        """Write an adapter file with metadata; safetensors files also carry ``sshs_model_hash`` of their data."""
        kept, known = self._kept
        self._kept = (kept, {key: value for key, value in known.items() if not key.startswith("sshs_")})
        entries = dict(metadata or {})
        if os.fspath(file).endswith(".safetensors"):
            tensors = {**files.prepare(self.state_dict(), dtype), **kept}
            entries["sshs_model_hash"] = safetensors_data_hash(tensors)
        super().save_weights(file, dtype, entries)

    # -- training --------------------------------------------------------------------------------------------------

    def use_loraplus(self, options: Mapping[str, Any]) -> None:
        """Set the LoRA+ ratios found among ``options``, if any."""
        ratios = [options.get(name) for name in LORAPLUS_OPTIONS]
        if any(ratio is not None for ratio in ratios):
            self.set_loraplus_lr_ratio(*(None if ratio is None else float(ratio) for ratio in ratios))

    def set_loraplus_lr_ratio(
        self,
        loraplus_lr_ratio: float | None,
        loraplus_unet_lr_ratio: float | None,
        loraplus_text_encoder_lr_ratio: float | None,
    ) -> None:
        """How many times faster the up factors learn: in general, in the UNet, in the text encoders."""
        self.loraplus_lr_ratio = loraplus_lr_ratio
        self.loraplus_unet_lr_ratio = loraplus_unet_lr_ratio
        self.loraplus_text_encoder_lr_ratio = loraplus_text_encoder_lr_ratio
        unet, text = loraplus_unet_lr_ratio or loraplus_lr_ratio, loraplus_text_encoder_lr_ratio or loraplus_lr_ratio
        logger.info(f"LoRA+ learning rate ratio: UNet {unet}, text encoders {text}")

    def prepare_optimizer_params(  # type: ignore[override]
        self, text_encoder_lr: Any = None, unet_lr: float | None = 1e-4, learning_rate: float | None = None
    ) -> Groups:
        """(parameter groups, descriptions): "textencoder", "unet", each with a "plus" group under LoRA+.

        A rate of None falls back to ``learning_rate``; a rate of 0 leaves that model's adapters out. A list of text
        encoder rates gives each encoder its own groups.
        """
        if isinstance(text_encoder_lr, list | tuple):
            return self.prepare_optimizer_params_with_multiple_te_lrs(text_encoder_lr, unet_lr, learning_rate)
        self.requires_grad_(True)
        rate = learning_rate if text_encoder_lr is None else text_encoder_lr
        text = parameter_groups(self.text_encoder_loras, "textencoder", rate, self._text_ratio())
        return _joined(text, self._unet_groups(unet_lr, learning_rate))

    def prepare_optimizer_params_with_multiple_te_lrs(
        self, text_encoder_lr: Any, unet_lr: float | None, learning_rate: float | None
    ) -> Groups:
        """As :meth:`prepare_optimizer_params` with one rate per text encoder: "textencoder 1", "textencoder 2"..."""
        self.requires_grad_(True)
        encoders = [part for part in self.parts if not part.is_unet]
        rates = rates_per_encoder(text_encoder_lr, len(encoders), learning_rate)
        found: list[Groups] = []
        for index, (part, rate) in enumerate(zip(encoders, rates, strict=True)):
            own = [item for item in self.text_encoder_loras if item.lora_name.startswith(f"{part.prefix}_")]
            rate = learning_rate if rate is None else rate
            found.append(parameter_groups(own, f"textencoder {index + 1}", rate, self._text_ratio()))
        return _joined(*found, self._unet_groups(unet_lr, learning_rate))

    def _text_ratio(self) -> float | None:
        return self.loraplus_text_encoder_lr_ratio or self.loraplus_lr_ratio

    def _unet_groups(self, unet_lr: float | None, learning_rate: float | None) -> Groups:
        rate = learning_rate if unet_lr is None else unet_lr
        return parameter_groups(self.unet_loras, "unet", rate, self.loraplus_unet_lr_ratio or self.loraplus_lr_ratio)

    def on_step_start(self, *_: Any) -> None:
        """Called by trainers before each step; nothing here depends on it."""

    def enable_gradient_checkpointing(self) -> None:
        """As on other networks, with the inputs of each model marked."""
        if not getattr(self, "_marks", None):
            super().enable_gradient_checkpointing()
            self._marks += [part.model.register_forward_pre_hook(mark_inputs, with_kwargs=True) for part in self.parts]


_COMMON_CLASSES = frozenset({*FULL_UNET_MODULES, *FULL_TEXT_ENCODER_MODULES})


def _joined(*groups: Groups) -> Groups:
    return [item for found, _ in groups for item in found], [text for _, found in groups for text in found]
