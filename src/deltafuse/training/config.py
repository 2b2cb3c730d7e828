"""Options of a training job: frozen, checked when made, the same in flags, TOML and YAML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import OptionError, unknown_name

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")
PRECISIONS = ("no", "bf16", "fp16")
CHECKPOINTING = ("none", "non-reentrant", "reentrant")
SAVE_DTYPES = ("fp32", "bf16", "fp16")
TASKS = ("text", "image")
DEVICES = ("auto", "cpu", "cuda")
BASE_DTYPES = ("auto", "fp32", "bf16", "fp16")


def _check_choice(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise OptionError(unknown_name("value", value, legal, where=f"of option '{name}'"))


def _check_range(name: str, value: float, low: float, *, exclusive: bool = False) -> None:
    wrong = not math.isfinite(value) or (value <= low if exclusive else value < low)
    if wrong:
        raise OptionError(f"option '{name}' is {value}; it must be {'above' if exclusive else 'at least'} {low:g}.")


def _option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with what the command line says about it."""
    return field(default=default, metadata={"help": help + (f": {', '.join(choices)}" if choices else "")})


@dataclass(frozen=True)
class TrainConfig:
    """Options of the loop. Counts are optimizer steps unless said otherwise."""

    steps: int = _option(200, "optimizer steps")
    lr: float = _option(1e-3, "learning rate")
    batch_size: int = _option(4, "samples per device and micro-batch")
    grad_accum: int = _option(1, "micro-batches per optimizer step")
    optimizer: str = _option("adamw", "adamw, sgd or any other name of torch.optim")
    weight_decay: float = _option(0.0, "weight decay of the adapter's parameters")
    schedule: str = _option("constant", "learning-rate schedule", SCHEDULES)
    warmup: int = _option(0, "steps over which the learning rate rises from near 0")
    max_grad_norm: float = _option(1.0, "clip the gradient's norm to this; 0: no clipping")
    scale_weight_norms: float = _option(0.0, "keep the norm of each layer's delta below this; 0: no limit")
    mixed_precision: str = _option("no", "autocast", PRECISIONS)
    gradient_checkpointing: str = _option("none", "recompute activations in backward to save memory", CHECKPOINTING)
    freeze_base: bool = _option(True, "take gradients off the base model")
    seed: int = _option(0, "seed of data order, noise and initial values")
    device: str = _option("auto", "where to run", DEVICES)
    eval_every: int = _option(0, "evaluate on held-out data every so many steps; 0: before and after only")
    eval_batches: int = _option(32, "held-out batches per evaluation; 0: all")
    save_every: int = _option(0, "save every so many steps; 0: at the end only")
    save_dtype: str = _option("fp32", "dtype of the adapter file", SAVE_DTYPES)
    tensorboard: bool = _option(False, "also write TensorBoard events")

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("batch_size", 1), ("grad_accum", 1), ("warmup", 0), ("eval_every", 0)):
            _check_range(name, getattr(self, name), low)
        for name in ("weight_decay", "max_grad_norm", "scale_weight_norms", "eval_batches", "save_every", "seed"):
            _check_range(name, getattr(self, name), 0)
        _check_range("lr", self.lr, 0, exclusive=True)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("mixed_precision", self.mixed_precision, PRECISIONS)
        _check_choice("gradient_checkpointing", self.gradient_checkpointing, CHECKPOINTING)
        _check_choice("save_dtype", self.save_dtype, SAVE_DTYPES)
        _check_choice("device", self.device, DEVICES)
        if self.schedule != "constant" and self.warmup >= self.steps:
            raise OptionError(f"option 'warmup' is {self.warmup}; it must be below 'steps' ({self.steps}).")
        if self.schedule == "constant" and self.warmup:
            raise OptionError(
                "option 'warmup' has no effect with schedule 'constant'. "
                "Legal with a warm-up: constant_with_warmup, linear, cosine."
            )


@dataclass(frozen=True)
class AdapterConfig:
    """Which adapter goes on which layers."""

    algo: str = _option("lokr", "algorithm, e.g. lora, loha, lokr, diag-oft, boft, ia3, glora, dylora, full")
    rank: int = _option(16, "rank of linear layers and 1x1 convolutions (block size for rotations)")
    alpha: float | None = _option(None, "scale = alpha / rank; left out: alpha = rank")
    conv_rank: int | None = _option(None, "rank of larger convolutions; left out: as --rank")
    conv_alpha: float | None = _option(None, "alpha of larger convolutions; left out: as --alpha")
    preset: str | None = _option(None, "which layers: name of a preset or a TOML file; left out: those in the blocks")
    target: tuple[str, ...] = _option(
        (), "adapt layers of this name only: glob on dotted names, or re:REGEX; repeatable"
    )
    exclude: tuple[str, ...] = _option((), "leave layers of this name alone; repeatable")
    override: tuple[str, ...] = _option((), "for layers of a name: 'NAME=algo:lora,rank:8,alpha:4'; repeatable")
    option: tuple[str, ...] = _option((), "any further option of create_lycoris, e.g. dora_wd=true; repeatable")
    strength: float = _option(1.0, "factor on the adapter's effect while training")

    def __post_init__(self) -> None:
        _check_range("rank", self.rank, 1)
        for name in ("conv_rank", "alpha", "conv_alpha"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 1 if name == "conv_rank" else 0)
        if not math.isfinite(self.strength):
            raise OptionError(f"option 'strength' is {self.strength}; it must be finite.")


@dataclass(frozen=True)
class JobConfig:
    """Everything ``deltafuse train`` is told."""

    task: str = _option("text", "kind of job", TASKS)
    model: str = _option("", "text: model directory, .gguf file or hub id; image: diffusers directory")
    data: tuple[str, ...] = _option((), "text: files, directories or globs; image: a folder of images; repeatable")
    out: str = _option("", "directory for the adapter, the numbers and the picture")
    seq_len: int = _option(256, "text: tokens per block")
    held_out: float = _option(0.1, "fraction of the data kept for evaluation; 0: none")
    held_out_data: tuple[str, ...] = _option((), "evaluate on these data instead of a fraction of --data; repeatable")
    resolution: int = _option(0, "image: pixels per side; 0: the model's own size")
    base_dtype: str = _option("auto", "dtype of the frozen base", BASE_DTYPES)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _check_choice("task", self.task, TASKS)
        _check_choice("base_dtype", self.base_dtype, BASE_DTYPES)
        _check_range("seq_len", self.seq_len, 2)
        _check_range("resolution", self.resolution, 0)
        if not 0 <= self.held_out < 1:
            raise OptionError(f"option 'held_out' is {self.held_out}; it must be at least 0 and below 1.")


GROUPS = {"adapter": AdapterConfig, "train": TrainConfig}


def option_fields() -> dict[str, dataclasses.Field[Any]]:
    """Flat name -> dataclass field, over the job and its two groups, in the order of --help."""
    fields = {item.name: item for item in dataclasses.fields(JobConfig) if item.name not in GROUPS}
    for group in GROUPS.values():
        fields.update({item.name: item for item in dataclasses.fields(group)})
    return fields


def job_from_flat(values: Mapping[str, Any]) -> JobConfig:
    """A :class:`JobConfig` from flat names, as in a config file; OptionError for unknown names and bad values."""
    legal = option_fields()
    clean: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in legal:
            raise OptionError(unknown_name("option", key, legal))
        clean[name] = _coerce(name, value, str(legal[name].type))
    groups = {}
    for group, kind in GROUPS.items():
        names = {item.name for item in dataclasses.fields(kind)}
        groups[group] = kind(**{name: clean.pop(name) for name in list(clean) if name in names})
    return JobConfig(**clean, **groups)


def job_to_flat(job: JobConfig) -> dict[str, Any]:
    """The inverse of :func:`job_from_flat`; None values are left out, tuples become lists."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(job):
        value = getattr(job, item.name)
        flat.update(dataclasses.asdict(value) if item.name in GROUPS else {item.name: value})
    return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items() if v is not None}


def _coerce(name: str, value: Any, kind: str) -> Any:
    """``value`` as the field's annotated ``kind``; strings in lists, whole floats as int, ints as float."""
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        return _string_tuple(name, value)
    base = kind.partition(" ")[0]
    if base == "bool" and isinstance(value, bool):
        return value
    if base == "str" and isinstance(value, str):
        return value
    if base in ("int", "float") and not isinstance(value, bool):
        number = _number(value)
        if number is not None and (base == "float" or number == int(number)):
            return int(number) if base == "int" else number
    raise OptionError(f"option '{name}' is {value!r} ({type(value).__name__}); it must be {base}.")


def _number(value: Any) -> float | None:
    """YAML 1.1 reads ``1e-3`` as a string, so numeric strings count."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _string_tuple(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
        return tuple(items)
    raise OptionError(f"option '{name}' is {value!r}; it must be a list of strings.")
