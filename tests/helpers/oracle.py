"""One dense formula per algorithm, written from the algorithms' definitions and from nothing in the package.

Every function takes the trainable tensors of one module by name and the base weight, in float64, and returns W' - W.
The loops and index arithmetic are naive on purpose: they are what every form, merge and file is compared to. The
formulas are differentiable, so that they are the reference for gradients as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What the formulas need besides tensors: rank, alpha, the options given, and the layer's groups."""

    rank: int
    alpha: float
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: int = 1

    @property
    def scale(self) -> float:
        alpha = self.alpha or self.rank
        return alpha / (math.sqrt(self.rank) if self.options.get("rs_lora") else self.rank)


def _tucker(core: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """up (out, p), core (p, q, *k), down (q, in): a sum over both ranks, one kernel position at a time."""
    p, q = core.shape[:2]
    taps = core.reshape(p, q, -1)
    parts = [up @ taps[:, :, tap] @ down for tap in range(taps.shape[2])]
    return torch.stack(parts, -1).reshape(up.shape[0], down.shape[1], *core.shape[2:])


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def _gain(t: Tensors) -> Tensor | float:
    return t.get("scalar", 1.0)


def locon(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    up, down = _flat(t["lora_up.weight"]), _flat(t["lora_down.weight"])
    core = t.get("lora_mid.weight")
    dense = (up @ down).reshape(weight.shape) if core is None else _tucker(core, up, down)
    return dense * _gain(t) * s.scale * m


def dylora(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    dense = torch.zeros_like(_flat(weight))
    block = 0
    while f"up_list.{block}" in t:
        dense = dense + t[f"up_list.{block}"] @ t[f"down_list.{block}"]
        block += 1
    return dense.reshape(weight.shape) * _gain(t) * s.scale * m


def loha(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    sides = []
    for side in (1, 2):
        a, b, core = t[f"hada_w{side}_a"], t[f"hada_w{side}_b"], t.get(f"hada_t{side}")
        sides.append((a @ b).reshape(weight.shape) if core is None else _tucker(core, a.t(), b))
    return sides[0] * sides[1] * _gain(t) * s.scale * m


def lokr(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    left = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]
    window = weight.shape[2:]
    if "lokr_w2" in t:
        right = t["lokr_w2"]
    elif "lokr_t2" in t:
        right = _tucker(t["lokr_t2"], t["lokr_w2_a"].t(), t["lokr_w2_b"])
    else:
        flat = t["lokr_w2_a"] @ t["lokr_w2_b"]
        right = flat.reshape(flat.shape[0], -1, *window)
    taps = right.reshape(*right.shape[:2], -1)
    dense = torch.stack([torch.kron(left, taps[:, :, tap]) for tap in range(taps.shape[2])], -1)
    whole = "lokr_w1" in t and "lokr_w2" in t
    return dense.reshape(weight.shape) * _gain(t) * (1.0 if whole else s.scale) * m


def _cayley(q: Tensor, bound: float) -> Tensor:
    """(I + Q)(I - Q)^-1 for a stack of skew matrices whose joint norm is limited to ``bound`` where positive."""
    norm = q.pow(2).sum().sqrt()
    if bound > 0 and float(norm.detach()) > bound:
        q = q * (bound / norm)
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    return torch.stack([(eye + item) @ torch.linalg.inv(eye - item) for item in q.reshape(-1, *q.shape[-2:])])


def _towards(r: Tensor, m: float) -> Tensor:
    return m * r + (1 - m) * torch.eye(r.shape[-1], dtype=r.dtype)


def _rescaled(t: Tensors, turned: Tensor, m: float) -> Tensor:
    if "rescale" not in t:
        return turned
    return (1 + m * (t["rescale"].reshape(-1) - 1))[:, None] * turned


def diag_oft(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    blocks = t["oft_blocks"]
    bound = float(s.options.get("constraint", 0)) * weight.shape[0]
    turn = torch.block_diag(*_towards(_cayley(blocks - blocks.transpose(1, 2), bound), m))
    turned = _rescaled(t, turn.t() @ _flat(weight), m)
    return turned.reshape(weight.shape) - weight


def oft(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    packed = t["oft_R.weight"]
    size = s.rank
    q = torch.zeros(packed.shape[0], size, size, dtype=packed.dtype)
    place = 0
    for row in range(size):
        for col in range(row + 1, size):
            one = torch.zeros(size, size, dtype=packed.dtype)
            one[row, col], one[col, row] = 1.0, -1.0
            q = q + packed[:, place, None, None] * one
            place += 1
    per_group = weight.shape[1]
    turn = torch.block_diag(*_towards(_cayley(q, float(s.options.get("constraint", 0)) * per_group * s.groups), m))
    rows = weight.shape[0] // s.groups
    parts = []
    for group in range(s.groups):
        span = slice(group * per_group, (group + 1) * per_group)
        own = weight[group * rows : (group + 1) * rows]
        parts.append(torch.einsum("oi...,ji->oj...", own, turn[span, span]))
    return torch.cat(parts) - weight


def boft(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    blocks = t["oft_blocks"]
    stages, num, size, _ = blocks.shape
    q = blocks - blocks.transpose(-1, -2)
    turns = _cayley(q, float(s.options.get("constraint", 0)) * weight.shape[0]).reshape(blocks.shape)
    out = weight.shape[0]
    matrix = _flat(weight)
    for stage in range(stages):
        reach = 2**stage * size // 2
        order = [(i // (2 * reach)) * 2 * reach + (i % 2) * reach + (i % (2 * reach)) // 2 for i in range(out)]
        shuffle = torch.zeros(out, out, dtype=weight.dtype)
        for place, source in enumerate(order):
            shuffle[place, source] = 1.0
        turn = torch.block_diag(*_towards(turns[stage], m))
        matrix = shuffle.t() @ turn @ shuffle @ matrix
    assert num * size == out
    return _rescaled(t, matrix, m).reshape(weight.shape) - weight


def ia3(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    vector = t["weight"].reshape(-1)
    if not s.options.get("train_on_input"):
        return torch.einsum("o,o...->o...", m * vector, weight)
    rows, per_group = weight.shape[0] // s.groups, weight.shape[1]
    parts = [
        torch.einsum(
            "i,oi...->oi...", m * vector[g * per_group : (g + 1) * per_group], weight[g * rows : (g + 1) * rows]
        )
        for g in range(s.groups)
    ]
    return torch.cat(parts)


def glora(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    a1, a2, b1 = (_flat(t[f"{name}.weight"]) for name in ("a1", "a2", "b1"))
    b2 = _flat(t["b2.weight"])
    prologue = torch.einsum("oi...,ij->oj...", weight, a1 @ a2)
    epilogue = (b1 @ b2).reshape(weight.shape) if "bm.weight" not in t else _tucker(t["bm.weight"], b1, b2)
    return (prologue + epilogue) * _gain(t) * s.scale * m


def full(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    return t["weight"].reshape(weight.shape) * m


def tlora(t: Tensors, weight: Tensor, s: Setting, m: float) -> Tensor:
    def matrix(p: Tensor, values: Tensor, q: Tensor) -> Tensor:
        return _flat(p) @ torch.diag(values.reshape(-1)) @ _flat(q)

    now = matrix(t["p_layer.weight"], t["lambda_layer"], t["q_layer.weight"])
    start = matrix(t["base_p"], t["base_lambda"], t["base_q"])
    return (now - start).reshape(weight.shape) * s.scale * m


FORMULAS: dict[str, Callable[[Tensors, Tensor, Setting, float], Tensor]] = {
    "locon": locon,
    "dylora": dylora,
    "loha": loha,
    "lokr": lokr,
    "diag-oft": diag_oft,
    "oft": oft,
    "boft": boft,
    "ia3": ia3,
    "glora": glora,
    "full": full,
    "tlora": tlora,
}


def _decomposed(t: Tensors, weight: Tensor, change: Tensor, s: Setting, m: float) -> Tensor:
    """W + m (g (W + dW) - W) - W with g = magnitude / |W + dW| over all axes but the magnitude's own."""
    whole = weight + change
    axis = 0 if s.options.get("wd_on_out", True) else 1
    others = [dim for dim in range(weight.dim()) if dim != axis]
    norm = whole.pow(2).sum(others, keepdim=True).sqrt()
    if s.options.get("detach_norm"):
        norm = norm.detach()
    return m * (t["dora_scale"].reshape(norm.shape) / norm * whole - weight)


def tensors_of(adapter: nn.Module) -> dict[str, Tensor]:
    """Parameters and the frozen starting values of a module, by name."""
    kept = {name: value for name, value in adapter.named_buffers() if name.startswith("base_")}
    return {**kept, **dict(adapter.named_parameters())}


def delta(adapter: Any, weight: Tensor, setting: Setting, m: float) -> tuple[Tensor, Tensor | None]:
    """(W' - W, b' - b or None) of an adapter at strength m. An algorithm without a formula answers for itself."""
    t = tensors_of(adapter)
    formula = FORMULAS.get(adapter.name)
    if formula is None:
        return adapter.get_diff_weight(m)
    bias = m * t["bias"] if adapter.name == "full" and "bias" in t else None
    if setting.options.get("weight_decompose"):
        return _decomposed(t, weight, formula(t, weight, setting, 1.0), setting, m), bias
    return formula(t, weight, setting, m), bias


def through(layer: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """``layer``'s own class run on another weight and bias."""
    own = getattr(layer, "bias", None)
    state = {"weight": weight}
    if own is not None:
        state["bias"] = torch.zeros_like(own) if bias is None else bias
    return functional_call(layer, state, (x,))


def relative(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """|got - want| / |want| over all entries, or the plain distance where nothing is wanted."""
    distance = float((got.double() - want.double()).norm())
    size = max(float(want.double().norm()), floor)
    return distance / size if size else distance
