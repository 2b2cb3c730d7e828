"""The adapter module: one algorithm's parameters on one layer.

An algorithm subclasses :class:`Adapter` and says which delta its parameters denote (``build_delta``); everything else,
forward in every form, dropout, strength, decomposition, stacking, merging, checkpoints, is here and in this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import backends
from ..bases import Base, base_for
from ..core import policy
from ..core.errors import OptionError, TargetError
from ..core.geometry import LayerOp
from ..core.precision import compute_dtype
from ..core.problem import Plan, Problem
from ..core.tracing import constant_when_traced
from ..deltas import Call, Decomposed, Delta
from ..primitives import Kernels, kernel_table
from ..primitives.norms import weight_norm
from . import stacking
from .masks import keep_mask, keep_scalar
from .merging import Mergeable
from .options import check_options, know_options
from .planner import NOMINAL_ROWS, Needs, bucket, plan, problem_for
from .state import StatefulModule, as_float

_OPS = {0: F.linear, 1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_REFERENCE = kernel_table()


class Adapter(Mergeable, StatefulModule):
    """Base class of every linear and convolutional algorithm.

    lora_name: unique name, also the prefix of its keys. org_module: the layer (held, not registered). multiplier:
    strength. bypass_mode: True or False force the bypass or the merged form, None leaves it to the planner.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str] = ""
    support_module: ClassVar[set[str]] = {"linear", "conv1d", "conv2d", "conv3d"}
    weight_list: ClassVar[list[str]] = []
    weight_list_det: ClassVar[list[str]] = []
    options: ClassVar[frozenset[str]] = frozenset()
    """Option names beyond the common ones that change this algorithm's result."""
    dtype_tensor: Tensor
    rank_axis: ClassVar[bool] = False
    """True where rank_dropout masks the rank axis, False where it masks rows of the delta."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        know_options(cls)

    def __init__(
        self,
        lora_name: str,
        org_module: nn.Module,
        multiplier: float = 1.0,
        dropout: float = 0.0,
        rank_dropout: float = 0.0,
        module_dropout: float = 0.0,
        rank_dropout_scale: bool = False,
        bypass_mode: bool | None = None,
        **extra: Any,
    ) -> None:
        super().__init__()
        self.lora_name = lora_name
        self.not_supported = False
        self.peft_wrapper, org_module = _unwrap_peft(org_module)
        self._describe_base(org_module)
        check_options(type(self), extra)
        self.dropout = _probability("dropout", dropout, lora_name)
        self.rank_dropout = _probability("rank_dropout", rank_dropout, lora_name)
        self.module_dropout = _probability("module_dropout", module_dropout, lora_name)
        self.rank_dropout_scale = bool(rank_dropout_scale)
        self.bypass_mode = None if bypass_mode is None else bool(bypass_mode)
        self.wd, self.wd_on_out, self.detach_norm = False, True, False
        self.register_buffer("dtype_tensor", torch.tensor(0.0), persistent=False)
        self._multiplier = float(multiplier)
        self._strength_tensor = torch.tensor(self._multiplier, dtype=torch.float64)
        self._plans: dict[Any, Plan] = {}
        self._traced_kernels: Kernels = _REFERENCE
        self.org_module = [org_module]
        self.org_forward = org_module.forward

    def _describe_base(self, module: nn.Module) -> None:
        base = base_for(module)
        kind = "unknown" if base is None else f"conv{len(base.op.kernel)}d" if base.op.is_conv else "linear"
        if base is None or kind not in self.support_module:
            raise TargetError(
                f"layer '{self.lora_name}': {type(module).__name__} cannot carry {self.name}; "
                f"it sits on: {', '.join(sorted(self.support_module))}"
            )
        self.base: Base = base
        self.geometry: LayerOp = base.op
        self.module, self.module_type, self.is_quant = type(module), kind, base.kind == "fp8"
        self.shape = base.op.weight_shape
        self.dim = base.op.out
        self.op = _OPS[len(base.op.kernel)]
        names = ("stride", "padding", "dilation", "groups")
        self.kw_dict = {name: getattr(module, name) for name in names} if base.op.is_conv else {}

    # -- what an algorithm provides --------------------------------------------------------------------------------

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        """The delta these parameters denote, with the masks of this call folded in."""
        raise TypeError(f"{type(self).__name__} does not say which delta it denotes")

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> Adapter:
        """A module built to hold a file's tensors, by key without the layer's prefix."""
        raise TypeError(f"{cls.__name__} does not say how it is read from a file")

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        """(parameter, value where the delta vanishes) pairs: moving all of them there in step takes the delta to 0."""
        raise TypeError(f"{type(self).__name__} does not say how its delta shrinks")

    # -- decomposition ---------------------------------------------------------------------------------------------

    def decompose(self, weight_decompose: bool, wd_on_out: bool = True, detach_norm: bool = False) -> None:
        """Add a DoRA magnitude, one per output row or per input column, initialised to the base weight's norms."""
        self.wd, self.wd_on_out, self.detach_norm = bool(weight_decompose), bool(wd_on_out), bool(detach_norm)
        if self.wd:
            self.dora_scale = nn.Parameter(self._base_norm())

    def magnitude_state(self) -> dict[str, Tensor]:
        """The magnitude as saved, where there is one."""
        return {"dora_scale": self.dora_scale} if self.wd else {}

    def _base_norm(self) -> Tensor:
        norm = weight_norm(self.base.weight().detach(), 0 if self.wd_on_out else 1)
        norm = norm.to(device="cpu", dtype=torch.float32)
        return norm.reshape(self._magnitude_shape(self.wd_on_out))

    def _magnitude_shape(self, on_out: bool) -> tuple[int, ...]:
        ones = (1,) * (len(self.shape) - 2)
        return (self.shape[0], 1, *ones) if on_out else (1, self.shape[1], *ones)

    # -- strength --------------------------------------------------------------------------------------------------

    @property
    def multiplier(self) -> float:
        """Strength m: 0 is the base, 1 the adapted layer, any float in between or beyond."""
        return self._multiplier

    @multiplier.setter
    def multiplier(self, value: float) -> None:
        self._multiplier = as_float(value)
        self._strength_tensor.fill_(self._multiplier)

    def _strength(self, x: Tensor) -> Any:
        """A float in eager mode; a 0-d tensor where a compiled or captured graph must not freeze it."""
        strength: Any = self._multiplier
        if torch.compiler.is_compiling():
            wide = x.dtype == torch.float64
            strength = self._strength_tensor if wide else self._strength_tensor.to(torch.float32)
        if self.module_dropout and self.training:
            strength = keep_scalar(self.module_dropout, x) * strength
        return strength

    # -- the delta of a call ---------------------------------------------------------------------------------------

    def delta(self, masks: bool = False) -> Delta:
        """The delta now; ``masks`` draws this call's rank dropout."""
        rank_mask, row_mask = self._draw_masks() if masks else (None, None)
        return self.decomposed(self.build_delta(rank_mask, row_mask))

    def decomposed(self, inner: Delta) -> Delta:
        """``inner`` under this module's magnitude, where it has one."""
        if not self.wd:
            return inner
        return Decomposed(inner, self.dora_scale, 0 if self.wd_on_out else 1, self.detach_norm)

    def _draw_masks(self) -> tuple[Tensor | None, Tensor | None]:
        if not (self.rank_dropout and self.training):
            return None, None
        count = int(getattr(self, "lora_dim", 0)) if self.rank_axis else self.dim
        mask = keep_mask(count, self.rank_dropout, self.rank_dropout_scale, next(self.parameters()))
        return (mask, None) if self.rank_axis else (None, mask)

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The adapted layer's output; on a stacked or foreign base, its output plus this adapter's delta."""
        if self.merged_strength is not None or self._idle():
            return self.org_forward(x, *args, **kwargs)
        delta = self.delta(masks=True)
        owned = self._owns_forward() and not args and not kwargs
        form, kernels = self._form_of_call(x, delta, owned)
        if owned:
            return self._run_owned(form, kernels, delta, x)
        return self._run_beside(form, kernels, delta, x, self.org_forward(x, *args, **kwargs))

    def _idle(self) -> bool:
        """Strength 0 in eval mode: the base itself.

        In training mode the layer runs whole even without gradients: a checkpoint's first pass draws what its
        recompute draws.
        """
        if torch.compiler.is_compiling():
            return False
        return self._multiplier == 0 and not self.training

    def _owns_forward(self) -> bool:
        """Whether the forward below this adapter is the layer's own, so that one product can do both."""
        return self._over_own_forward and self.base.owned

    @property
    def org_forward(self) -> Any:
        """The forward below this adapter: the layer's own, or that of what sits between."""
        return self._org_forward

    @org_forward.setter
    def org_forward(self, forward: Any) -> None:
        # Decided when it changes: a traced graph compares bound methods by identity and would never say yes.
        self._org_forward = forward
        self._over_own_forward = getattr(forward, "__func__", None) is type(self.org_module[0]).forward

    def _call(self, kernels: Any, delta: Delta, x: Tensor, strength: Any) -> Call:
        bias = self.base.bias()
        extra = delta.dense_bias(strength)
        if extra is not None:
            bias = extra if bias is None else (bias.to(extra.dtype) + extra).to(bias.dtype)
        p = self.dropout if self.training else 0.0
        return Call(kernels, self.geometry, x, self.base.weight(), bias, p)

    def _run_owned(self, form: str, kernels: Kernels, delta: Delta, x: Tensor) -> Tensor:
        strength = self._strength(x)
        call = self._call(kernels, delta, x, strength)
        if form == "bypass":
            return delta.bypass(call, strength)
        assert call.weight is not None
        if form == "merged":
            dtype = call.weight.dtype
            merged = delta.merged_to(call.kernels, call.weight, self.geometry, strength, dtype)
            return self.geometry.apply(x, merged, call.bias)
        base = self.geometry.apply(x, call.weight, call.bias)
        return base + self._dense_branch(call, delta, strength).to(base.dtype)

    def _run_beside(self, form: str, kernels: Kernels, delta: Delta, x: Tensor, out: Tensor) -> Tensor:
        strength = self._strength(x)
        weight = self.base.weight() if delta.needs_weight else None
        call = Call(kernels, self.geometry, x, weight, None, self.dropout if self.training else 0.0)
        if form == "bypass":
            added = delta.contribution(call, strength, call.base() if delta.multiplicative else None)
        else:
            added = self._dense_branch(call, delta, strength)
        extra = delta.dense_bias(strength)
        if extra is not None:
            added = added + self.geometry.channels(extra).to(added.dtype)
        return out + added.to(out.dtype)

    def _dense_branch(self, call: Call, delta: Delta, strength: Any) -> Tensor:
        """x through the dense delta, with dropout on what comes out."""
        dense = delta.dense(call.weight, self.geometry, strength)
        work = compute_dtype(call.x)
        return call.drop(self.geometry.apply(call.x.to(work), dense.to(work)))

    # -- planning --------------------------------------------------------------------------------------------------

    def _form_of_call(self, x: Tensor, delta: Delta, owned: bool) -> tuple[str, Kernels]:
        """The form to run and the kernels to run it with."""
        if torch.compiler.is_compiling():
            mode = "dropout" if self.dropout and self.training else "plain"
            dtype = str(compute_dtype(x))
            form = self._traced_form(self.training, owned, dtype, mode, self.bypass_mode, self._variant())
            return form, self._traced_kernels
        chosen = self._plan_call(x, delta, owned)
        return chosen.form, chosen.kernels

    def _plan_call(self, x: Tensor, delta: Delta, owned: bool) -> Plan:
        """The plan of this call. Training mode decides, not the gradient mode: a checkpoint runs one form twice."""
        rows = bucket(self.geometry.rows(x))
        requested = policy.requested_backend()
        modes = (owned, self.training, bool(self.dropout), self.bypass_mode, self._variant())
        key = (rows, compute_dtype(x), x.device, requested, backends.changes(), modes)
        found = self._plans.get(key)
        if found is None:
            problem = Problem(self.geometry, rows, compute_dtype(x), x.device, self.training)
            found = self._plans[key] = plan(delta, problem, self._needs(owned), requested)
        return found

    def _variant(self) -> Any:
        """Whatever else changes which forms are legal; part of the plan's key."""
        return None

    def _needs(self, owned: bool) -> Needs:
        forced = {None: None, True: "bypass", False: "merged"}[self.bypass_mode]
        return Needs(branch_only=not owned, dropout=bool(self.dropout) and self.training, forced=forced)

    @constant_when_traced
    def _traced_form(self, training: bool, owned: bool, dtype: str, *_: Any) -> str:
        """The form of a compiled graph, its kernels left in ``_traced_kernels``: planned while tracing, once, for a
        nominal row count that no call changes.

        The arguments are what the plan depends on; a graph is traced anew where one of them changes. The kernels are
        handed over by an attribute of the layer: a trace keeps its own copy of any table that it has looked into.
        """
        was, self.training = self.training, training
        found = self.nominal_plan(owned=owned, dtype=getattr(torch, dtype.removeprefix("torch.")))
        self.training = was
        self._traced_kernels = found.kernels
        return found.form

    def nominal_plan(
        self, rows: int = NOMINAL_ROWS, owned: bool | None = None, dtype: torch.dtype | None = None
    ) -> Plan:
        """The plan of the bucket ``rows`` rows fall in, with saved bytes for ``rows``, as ``explain`` reports it."""
        weight = self.base.module.weight
        if dtype is None:
            dtype = weight.dtype if isinstance(weight, Tensor) and weight.dtype.itemsize > 1 else torch.float32
        problem = problem_for(self.geometry, rows, dtype, weight.device, self.training)  # type: ignore[arg-type]
        beside = not (self._owns_forward() if owned is None else owned)
        found = plan(self.delta(), problem, self._needs(not beside), policy.requested_backend())
        if found.form != "bypass":
            return found
        return replace(found, cost=replace(found.cost, saved=found.cost.saved * rows / problem.rows))

    # -- attach and detach -----------------------------------------------------------------------------------------

    def apply_to(self, **_: Any) -> None:
        """Put this adapter on its layer (outermost); applying twice is harmless. Moves it to the layer's device."""
        weight = self.base.module.weight
        if isinstance(weight, Tensor) and weight.device.type != "meta" and weight.device != self.device:
            self.to(weight.device)
        stacking.attach(self.org_module[0], self)

    def restore(self) -> None:
        """Take this adapter off, wherever it sits in the stack."""
        stacking.detach(self.org_module[0], self)

    # -- weights ---------------------------------------------------------------------------------------------------

    def get_diff_weight(
        self, multiplier: float = 1.0, shape: Any = None, device: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """(W' - W, b' - b or None) at strength ``multiplier``, float32 or better, without random masks."""
        delta = self.delta()
        weight = self._weight_for(delta)
        dense = delta.dense(weight, self.geometry, multiplier)
        bias = delta.dense_bias(multiplier)
        dense = dense if shape is None else dense.reshape(shape)
        return dense.to(device=device), None if bias is None else bias.to(device=device)

    def get_merged_weight(
        self, multiplier: float = 1.0, shape: Any = None, device: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """(W', b' or None where the bias is left alone), float32 or better."""
        weight = self.base.weight().to(device=self.device)
        delta = self.delta()
        merged = delta.merged(_REFERENCE, weight, self.geometry, multiplier)
        extra = delta.dense_bias(multiplier)
        bias = self.base.bias()
        if extra is not None and bias is not None:
            extra = bias.to(extra) + extra
        merged = merged if shape is None else merged.reshape(shape)
        return merged.to(device=device), None if extra is None else extra.to(device=device)

    def _weight_for(self, delta: Delta) -> Tensor | None:
        return self.base.weight().to(device=self.device) if delta.needs_weight else None

    def _subtract(self, strength: float) -> None:
        """Undo a merge without a snapshot; exact up to one rounding, for deltas that do not read the base."""
        delta = self.delta()
        if delta.needs_weight:
            raise OptionError(
                f"layer '{self.lora_name}': {self.name} was merged without a snapshot and its delta depends on the "
                "base weight; merge with precise=True (or onfly_merge) to be able to undo it"
            )
        dense, extra = self.get_diff_weight(strength)
        weight = self.base.weight().to(device=dense.device, dtype=dense.dtype) - dense
        bias = self.base.bias()
        self.base.write(weight, None if extra is None or bias is None else bias.to(extra) - extra)

    def get_weight(self, shape: Any = None) -> Tensor:
        """The dense delta at strength 1."""
        return self.get_diff_weight(1.0, shape)[0]

    def bypass_forward_diff(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """(W' - W) x at strength ``scale`` by the bypass form, without bias; masks and dropout as in training."""
        delta = self.delta(masks=True)
        call = Call(_REFERENCE, self.geometry, x, self._weight_for(delta), None, self.dropout if self.training else 0.0)
        return delta.contribution(call, scale, call.base() if delta.multiplicative else None)

    def bypass_forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """The layer below plus :meth:`bypass_forward_diff`."""
        out = self.org_forward(x)
        return out + self.bypass_forward_diff(x, scale).to(out.dtype)

    @property
    def org_weight(self) -> Tensor:
        """The base weight, dense."""
        return self.base.weight()

    @org_weight.setter
    def org_weight(self, value: Tensor) -> None:
        self.base.write(value, None)

    # -- parametrization -------------------------------------------------------------------------------------------

    @classmethod
    def parametrize(cls, org_module: nn.Module, attr: str, *args: Any, **kwargs: Any) -> Adapter:
        """Register the merged weight as a parametrization of ``org_module.attr`` (2-D to 5-D)."""
        target = getattr(org_module, attr)
        adapter = cls("", _proxy(target), *args, **kwargs)
        adapter.forward = adapter.parametrize_forward  # type: ignore[method-assign, assignment]
        adapter.to(target)
        nn.utils.parametrize.register_parametrization(org_module, attr, adapter)
        return adapter

    def parametrize_forward(self, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        """W -> W' in W's dtype."""
        shaped = weight.reshape(self.shape)
        merged = self.delta(masks=True).merged(_REFERENCE, shaped, self.geometry, self._strength(weight))
        return merged.reshape(weight.shape).to(weight.dtype)

    # -- max norm --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply_max_norm(self, max_norm: float, device: Any = None) -> tuple[bool, float]:
        """Limit |W' - W|_F to ``max_norm``; (whether it was scaled, the norm it has now)."""
        norm = self._delta_norm()
        if norm <= max_norm:
            return False, norm
        ends = [(item, item.clone(), rest) for item, rest in self.shrink_parameters()]
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            self._move(ends, middle)
            low, high = (middle, high) if self._delta_norm() <= max_norm else (low, middle)
        self._move(ends, low)
        return True, self._delta_norm()

    def _delta_norm(self) -> float:
        dense, bias = self.get_diff_weight(1.0)
        squares = dense.square().sum() + (0 if bias is None else bias.square().sum())
        return float(squares.sqrt())

    @staticmethod
    def _move(ends: Sequence[tuple[Tensor, Tensor, Tensor | float]], share: float) -> None:
        for item, full, rest in ends:
            item.copy_(rest + (full - rest) * share)

    def _shrink_magnitude(self) -> list[tuple[Tensor, Tensor | float]]:
        return [(self.dora_scale, self._base_norm().to(self.dora_scale))] if self.wd else []

    # -- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def algo_check(cls, state_dict: dict[str, Tensor], lora_name: str) -> bool:
        """Whether a file holds this algorithm's keys for ``lora_name``."""
        return any(f"{lora_name}.{key}" in state_dict for key in cls.weight_list_det)

    @classmethod
    def extract_state_dict(cls, state_dict: dict[str, Tensor], lora_name: str) -> list[Tensor | None]:
        """A file's tensors for one layer in the order of ``weight_list``."""
        return [state_dict.get(f"{lora_name}.{key}") for key in cls.weight_list]

    @classmethod
    def make_module_from_state_dict(cls, lora_name: str, orig_module: nn.Module, *weights: Tensor | None) -> Adapter:
        """The inverse of :meth:`extract_state_dict`: a module holding these tensors."""
        given = zip(cls.weight_list, weights, strict=False)
        tensors = {key: value for key, value in given if value is not None}
        adapter = cls.from_tensors(lora_name, orig_module, tensors)
        if any(value.dtype == torch.float64 for value in tensors.values()):
            adapter.to(torch.float64)
        adapter.load_state_dict(tensors, strict=False)
        return adapter

    def adopt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        magnitude = tensors.get("dora_scale")
        if magnitude is not None and self.wd:
            self._match_axis(magnitude)
        return tensors

    def other_shapes(self, key: str) -> tuple[tuple[int, ...], ...]:
        return (self._magnitude_shape(not self.wd_on_out),) if key == "dora_scale" else ()

    def _match_axis(self, magnitude: Tensor) -> None:
        """The axis is read from the shape of the stored magnitude; a square layer keeps the axis it was made with."""
        for on_out in (self.wd_on_out, not self.wd_on_out):
            if tuple(magnitude.shape) == self._magnitude_shape(on_out):
                if on_out != self.wd_on_out:
                    self.wd_on_out = on_out
                    self.dora_scale.data = magnitude.detach().to(self.dora_scale).clone()
                return

    # -- device and dtype ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.dtype_tensor.device

    @property
    def dtype(self) -> torch.dtype:
        return self.dtype_tensor.dtype

    def __getstate__(self) -> dict[str, Any]:
        """Without plans: they hold functions of this process, and are made anew."""
        return {**self.__dict__, "_plans": {}, "_traced_kernels": _REFERENCE}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        moved = fn(self._strength_tensor)
        wide = torch.float32 if moved.device.type == "mps" else torch.float64
        self._strength_tensor = torch.tensor(self._multiplier, dtype=wide, device=moved.device)
        self._plans.clear()
        return self


@contextmanager
def at_strength(adapter: Adapter, strength: float) -> Iterator[None]:
    """Run the block at another strength."""
    before = adapter.multiplier
    adapter.multiplier = strength
    try:
        yield
    finally:
        adapter.multiplier = before


def _probability(name: str, value: Any, layer: str) -> float:
    p = float(value or 0.0)
    if not 0.0 <= p <= 1.0:
        raise OptionError(f"layer '{layer}': {name}={value!r} is not a probability. Legal: 0 to 1.")
    return p


def _unwrap_peft(module: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """(PEFT wrapper or None, the layer inside)."""
    if hasattr(module, "get_base_layer") and hasattr(module, "base_layer"):
        return module, module.get_base_layer()  # type: ignore[operator]
    return None, module


def _proxy(target: Tensor) -> nn.Module:
    """A layer whose weight has the target's shape and holds its values."""
    out, inp, *kernel = target.shape
    if not kernel:
        layer: nn.Module = nn.Linear(inp, out, bias=False, device="meta")
    else:
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
        layer = conv(inp, out, tuple(kernel), bias=False, device="meta")  # type: ignore[arg-type]
    layer.weight = nn.Parameter(target.detach(), requires_grad=False)
    return layer
