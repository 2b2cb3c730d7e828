"""What the suites vary: layers, ranks, options. Algorithms come from the registry; the table holds only exceptions.

An algorithm that is not listed gets rank 2 and one variant for each option it declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deltafuse.algorithms import algorithms, get_algorithm
from helpers.oracle import Setting

ALPHA = 5.0
STRENGTHS = (-1.0, 0.0, 0.3, 1.0, 2.0)
DOUBLE = torch.float64


@dataclass(frozen=True)
class Layer:
    """A layer's factory and the shape of an input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def base(self, dtype: torch.dtype = DOUBLE) -> nn.Module:
        return self.make().to(dtype).requires_grad_(False)

    def x(self, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
        return torch.randn(self.shape, dtype=DOUBLE).to(dtype)


LAYERS = {
    "linear": Layer(lambda: nn.Linear(12, 24), (3, 5, 12)),
    "linear_no_bias": Layer(lambda: nn.Linear(12, 24, bias=False), (5, 12)),
    "linear_odd": Layer(lambda: nn.Linear(15, 9), (2, 3, 15)),
    "linear_square": Layer(lambda: nn.Linear(12, 12), (5, 12)),
    "linear_wide": Layer(lambda: nn.Linear(30, 36), (2, 4, 30)),
    "conv1d_wide": Layer(lambda: nn.Conv1d(30, 36, 3, padding=1, stride=2), (2, 30, 5)),
    "linear_prime": Layer(lambda: nn.Linear(7, 14), (4, 7)),
    "conv1d": Layer(lambda: nn.Conv1d(12, 24, 3, padding=1), (3, 12, 9)),
    "conv1d_same_even": Layer(lambda: nn.Conv1d(6, 12, 4, padding="same"), (2, 6, 11)),
    "conv1d_circular": Layer(lambda: nn.Conv1d(6, 12, 3, padding=2, padding_mode="circular"), (2, 6, 7)),
    "conv2d": Layer(lambda: nn.Conv2d(12, 24, (3, 2), padding=(1, 0), stride=2, dilation=(1, 2)), (3, 12, 7, 8)),
    "conv2d_1x1": Layer(lambda: nn.Conv2d(12, 24, 1, bias=False), (2, 12, 4, 5)),
    "conv2d_1x1_strided": Layer(lambda: nn.Conv2d(6, 12, 1, stride=(2, 3), padding=1), (2, 6, 5, 6)),
    "conv2d_reflect_same": Layer(
        lambda: nn.Conv2d(6, 12, (2, 4), padding="same", padding_mode="reflect"), (2, 6, 6, 7)
    ),
    "conv2d_replicate": Layer(lambda: nn.Conv2d(5, 10, 3, padding=2, padding_mode="replicate", stride=2), (2, 5, 6, 7)),
    "conv2d_groups": Layer(lambda: nn.Conv2d(12, 24, 3, padding=1, groups=2, dilation=2), (2, 12, 6, 5)),
    "conv2d_depthwise": Layer(lambda: nn.Conv2d(6, 12, 3, padding=1, groups=6), (2, 6, 5, 4)),
    "conv3d": Layer(lambda: nn.Conv3d(6, 12, (3, 2, 1), padding=(1, 1, 0)), (2, 6, 4, 3, 3)),
    "conv3d_groups": Layer(lambda: nn.Conv3d(12, 24, 2, stride=(1, 2, 1), groups=3), (2, 12, 3, 4, 3)),
}

MATERIAL = ("linear", "conv2d", "conv2d_groups")
"""Layers for suites that need few."""

OPTION_VALUES: dict[str, tuple[dict[str, Any], ...]] = {
    "use_scalar": ({"use_scalar": True},),
    "use_tucker": ({"use_tucker": True},),
    "rs_lora": ({"rs_lora": True},),
    "rescaled": ({"rescaled": True},),
    "constraint": ({"constraint": 0.01}, {"constraint": 1e3}),
    "decompose_both": ({"decompose_both": True}, {"decompose_both": True, "unbalanced_factorization": True}),
    "full_matrix": ({"full_matrix": True},),
    "factor": ({"factor": 2},),
    "unbalanced_factorization": ({"unbalanced_factorization": True, "factor": 3},),
    "train_on_input": ({"train_on_input": True},),
    "sig_type": ({"sig_type": "last"}, {"sig_type": "middle"}),
    "use_data_init": ({"use_data_init": False},),
    "weight_decompose": ({"weight_decompose": True}, {"weight_decompose": True, "wd_on_out": False}),
    "detach_norm": ({"weight_decompose": True, "detach_norm": True},),
}
PAIRS: tuple[dict[str, Any], ...] = (
    {"use_scalar": True, "use_tucker": True, "rs_lora": True},
    {"use_scalar": True, "use_tucker": True, "weight_decompose": True, "rs_lora": True},
    {"use_tucker": True, "weight_decompose": True, "wd_on_out": False, "detach_norm": True},
    {"use_tucker": True, "decompose_both": True, "use_scalar": True, "weight_decompose": True, "rs_lora": True},
    {"rescaled": True, "constraint": 0.02},
    {"rescaled": True, "weight_decompose": True, "wd_on_out": False},
    {"train_on_input": True, "weight_decompose": True},
    {"constraint": 0.02, "weight_decompose": True},
)


@dataclass(frozen=True)
class Spec:
    """Exceptions of one algorithm: its rank for a layer, options every module needs, forms a user can force."""

    rank: Callable[[tuple[int, int]], int] = lambda sides: 2
    always: dict[str, Any] = field(default_factory=dict)
    can_force: tuple[bool | None, ...] = (None, True, False)


def _divisor(side: int) -> int:
    return next((size for size in range(2, side + 1) if side % size == 0), 1)


def _even_block(side: int) -> int:
    """The smallest even block whose count is a power of two and greater than one where there is one."""
    legal = [size for size in range(2, side + 1, 2) if side % size == 0 and (side // size).bit_count() == 1]
    return legal[0] if legal else 0


SPECS = {
    "oft": Spec(rank=lambda sides: _divisor(sides[1])),
    "diag-oft": Spec(rank=lambda sides: 4),
    "boft": Spec(rank=lambda sides: _even_block(sides[0])),
    "dylora": Spec(rank=lambda sides: 6, always={"block_size": 2}),
    "loha": Spec(rank=lambda sides: 3),
    "tlora": Spec(rank=lambda sides: 3),
    "full": Spec(can_force=(None, False)),
}


def spec(name: str) -> Spec:
    return SPECS.get(name, Spec())


def weight_algorithms() -> list[str]:
    """Registered algorithms that sit on linear or convolutional layers."""
    return [name for name, info in algorithms().items() if "linear" in info.module_class.support_module]


def variants(name: str) -> Iterator[dict[str, Any]]:
    """Option sets of an algorithm: none, each declared option alone, and the pairs it takes all of."""
    legal = get_algorithm(name).module_class.options
    yield {}
    for option in sorted(legal & set(OPTION_VALUES)):
        yield from OPTION_VALUES[option]
    seen: list[dict[str, Any]] = []
    for pair in PAIRS:
        kept = {key: value for key, value in pair.items() if key in legal}
        if len(kept) > 1 and kept not in seen and set(kept) & set(OPTION_VALUES):
            seen.append(kept)
            yield kept


def sides(base: nn.Module) -> tuple[int, int]:
    """(output channels, input channels of one group) of a layer."""
    return base.weight.shape[0], base.weight.shape[1]


def legal_rank(name: str, base: nn.Module) -> int:
    """A rank the algorithm takes on ``base``, or 0 where it has none."""
    return spec(name).rank(sides(base))


def stir(adapter: nn.Module, size: float = 0.2) -> None:
    """Move every parameter off its start; magnitudes and rescales stay positive."""
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.dim() == 0:
                parameter.fill_(0.7)
            else:
                parameter.add_(torch.randn_like(parameter) * size)


def build(
    name: str,
    base: nn.Module,
    options: dict[str, Any] | None = None,
    multiplier: float = 1.0,
    alpha: Any = ALPHA,
    rank: int | None = None,
    stirred: bool = True,
    dtype: torch.dtype = DOUBLE,
    **extra: Any,
) -> Any:
    """A module of algorithm ``name`` on ``base``, off its starting point, in eval mode."""
    rank = legal_rank(name, base) if rank is None else rank
    keywords = {**spec(name).always, **(options or {}), **extra}
    cls = get_algorithm(name).module_class
    adapter = cls("layer", base, multiplier, lora_dim=rank, alpha=alpha, **keywords).to(dtype)
    if stirred:
        stir(adapter)
    return adapter.eval()


def setting(name: str, base: nn.Module, options: dict[str, Any], alpha: float = ALPHA) -> Setting:
    """What the oracle is told about a module made by :func:`build`."""
    given = {**spec(name).always, **options}
    return Setting(legal_rank(name, base), alpha, given, getattr(base, "groups", 1))
