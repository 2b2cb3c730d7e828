"""T-LoRA: dW = scale [P diag(lambda * mask) Q - P0 diag(lambda0 * mask) Q0], the mask set by the diffusion timestep.

Source: Soboleva et al. 2025, as in LyCORIS. P, lambda and Q start as singular vectors and values of the base weight
("principal", "last" or "middle") or of a random matrix; P0, lambda0, Q0 are their frozen starting values, so the delta
starts at zero. Keys: q_layer.weight (r, in[, *k]), p_layer.weight (out, r[, 1...]), lambda_layer (1, r), alpha, and the
starting values under base_q, base_p, base_lambda: without them a file only fits the weight it was made on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import OptionError, unknown_name
from ..core.precision import accumulate_dtype
from ..deltas import Delta, LowRank
from .common import Ranked, decompose_options
from .registry import register_algorithm

SigType = Literal["principal", "last", "middle"]
SIG_TYPES = ("principal", "last", "middle")

_masks: dict[int, Tensor] = {}


def set_timestep_mask(mask: Tensor, group_id: int = 0) -> None:
    """Set the rank mask T-LoRA layers use from now on: (1, rank) for all samples, or (batch, rank) for one each."""
    _masks[group_id] = mask


def get_timestep_mask(group_id: int = 0) -> Tensor | None:
    """The mask in force, or None: all ranks act."""
    return _masks.get(group_id)


def clear_timestep_mask(group_id: int = 0) -> None:
    """Let all ranks act again."""
    _masks.pop(group_id, None)


def compute_timestep_mask(
    timestep: int, max_timestep: int, max_rank: int, min_rank: int = 1, alpha: float = 1.0
) -> Tensor:
    """(1, max_rank) mask with few ranks at high noise: r = int(((T - t) / T)^alpha (max - min)) + min ones."""
    share = ((max_timestep - timestep) / max_timestep) ** alpha
    ranks = min(int(share * (max_rank - min_rank)) + min_rank, max_rank)
    return (torch.arange(max_rank) < ranks).to(torch.float32).unsqueeze(0)


@register_algorithm(detect_order=60)
class TLoraModule(Ranked):
    """Orthogonally initialised LoRA with timestep-dependent ranks."""

    name = "tlora"
    aliases = ("t-lora",)
    summary = "SVD-initialised LoRA with ranks masked by timestep"
    weight_list = [
        "q_layer.weight",
        "p_layer.weight",
        "lambda_layer",
        "alpha",
        "base_q",
        "base_p",
        "base_lambda",
        "dora_scale",
    ]
    weight_list_det = ["lambda_layer"]
    options = frozenset(
        {
            "sig_type",
            "use_data_init",
            "mask_group_id",
            "weight_decompose",
            "wd_on_out",
            "detach_norm",
            "rs_lora",
        }
    )
    rank_axis = True
    base_q: Tensor
    base_p: Tensor
    base_lambda: Tensor

    def __init__(
        self,
        lora_name: str,
        org_module: nn.Module,
        multiplier: float = 1.0,
        lora_dim: int = 4,
        alpha: Any = 1,
        dropout: float = 0.0,
        rank_dropout: float = 0.0,
        module_dropout: float = 0.0,
        rank_dropout_scale: bool = False,
        bypass_mode: bool | None = None,
        sig_type: SigType = "principal",
        use_data_init: bool = True,
        mask_group_id: int = 0,
        weight_decompose: bool = False,
        wd_on_out: bool = True,
        detach_norm: bool = False,
        rs_lora: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            lora_name,
            org_module,
            multiplier,
            dropout,
            rank_dropout,
            module_dropout,
            rank_dropout_scale,
            bypass_mode,
            **kwargs,
        )
        if sig_type not in SIG_TYPES:
            raise OptionError(unknown_name("sig_type", sig_type, SIG_TYPES, f"on layer '{lora_name}'"))
        self.isconv = self.geometry.is_conv
        self.sig_type, self.use_data_init, self.mask_group_id = sig_type, bool(use_data_init), int(mask_group_id)
        self.set_scale(lora_dim, alpha, rs_lora)
        self._build(self.lora_dim)
        self.decompose(weight_decompose, wd_on_out, detach_norm)

    def _build(self, rank: int) -> None:
        op = self.geometry
        if op.is_conv:
            conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(op.kernel)]
            self.q_layer: nn.Module = conv(op.group_inp, rank, op.kernel, bias=False)  # type: ignore[arg-type]
            self.p_layer: nn.Module = conv(rank, op.out, 1, bias=False)
        else:
            self.q_layer = nn.Linear(op.inp, rank, bias=False)
            self.p_layer = nn.Linear(rank, op.out, bias=False)
        self.lambda_layer = nn.Parameter(torch.ones(1, rank))
        q, p, values = self._singular(rank)
        starts = {"q": (self.q_layer.weight, q), "p": (self.p_layer.weight, p), "lambda": (self.lambda_layer, values)}
        for name, (parameter, value) in starts.items():
            start = value.reshape(parameter.shape).contiguous()  # type: ignore[arg-type]
            parameter.data = start
            self.register_buffer(f"base_{name}", start.clone())

    def _singular(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """(q (r, fan_in), p (out, r), values (r,)), padded with zeros where the matrix has fewer than r."""
        if self.use_data_init:
            matrix = self.base.weight().detach().to(device="cpu", dtype=torch.float32).flatten(1)
        else:
            matrix = torch.normal(mean=0.0, std=1 / rank, size=(self.geometry.out, self.geometry.fan_in))
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        start = {"principal": 0, "last": max(0, len(s) - rank), "middle": max(0, (len(s) - rank) // 2)}[self.sig_type]
        keep = slice(start, start + rank)
        q, p, values = vh[keep], u[:, keep], s[keep]
        short = rank - len(values)
        return F.pad(q, (0, 0, 0, short)), F.pad(p, (0, short)), F.pad(values, (0, short), value=1e-6)

    def _timestep_mask(self, like: Tensor) -> Tensor | None:
        """(r,) or (batch, r): the mask in force, cut or filled with ones to this layer's rank."""
        mask = get_timestep_mask(self.mask_group_id)
        if mask is None:
            return None
        mask = mask.to(like)[..., : self.lora_dim]
        mask = F.pad(mask, (0, self.lora_dim - mask.shape[-1]), value=1.0)
        return mask[0] if mask.dim() == 2 and mask.shape[0] == 1 else mask

    def _variant(self) -> Any:
        """Whether each sample has its own mask."""
        mask = get_timestep_mask(self.mask_group_id)
        return "per sample" if mask is not None and mask.dim() == 2 and mask.shape[0] > 1 else None

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        q: Any = self.q_layer.weight
        p: Any = self.p_layer.weight
        mask = self._timestep_mask(self.lambda_layer)
        if rank_mask is not None:
            mask = rank_mask if mask is None else mask * rank_mask
        down, up = self._factors(q.flatten(1), p.flatten(1))
        mask = None if mask is None else torch.cat([mask, mask], -1)
        return LowRank(down, up, self.scale, None, None, mask, row_mask)

    def _factors(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """(down, up) of (P lambda - P0 lambda0) Q + P0 lambda0 (Q - Q0).

        Only parameters are subtracted from their own starting values, so a small delta keeps its relative accuracy.
        """
        work = accumulate_dtype(q, p)
        q, start_q = q.to(work), self.base_q.flatten(1).to(work)
        start_p, start = self.base_p.flatten(1).to(work), self.base_lambda.to(work)
        values = self.lambda_layer.to(work)
        moved = (p.to(work) - start_p) * values + start_p * (values - start)
        return torch.cat([q, q - start_q]), torch.cat([moved, start_p * start], 1)

    def orthogonality_regularization(self) -> tuple[Tensor, Tensor]:
        """(|P^T P - I|^2, |Q Q^T - I|^2): penalties that keep the factors orthogonal."""
        q: Any = self.q_layer.weight
        p: Any = self.p_layer.weight
        q, p = q.flatten(1), p.flatten(1)
        eye = torch.eye(self.lora_dim, dtype=q.dtype, device=q.device)
        return (p.t() @ p - eye).square().sum(), (q @ q.t() - eye).square().sum()

    def custom_state_dict(self) -> dict[str, Tensor]:
        return {
            **self.magnitude_state(),
            "q_layer.weight": self.q_layer.weight,  # type: ignore[dict-item]
            "p_layer.weight": self.p_layer.weight,  # type: ignore[dict-item]
            "lambda_layer": self.lambda_layer,
            "alpha": self.alpha_tensor(),
            "base_q": self.base_q,
            "base_p": self.base_p,
            "base_lambda": self.base_lambda,
        }

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> TLoraModule:
        rank = tensors["q_layer.weight"].shape[0]
        options = decompose_options(tensors)
        return cls(lora_name, org_module, lora_dim=rank, alpha=tensors.get("alpha"), **options)

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        q: Any = self.q_layer.weight
        p: Any = self.p_layer.weight
        return [
            (q.data, self.base_q.view_as(q).to(q.dtype)),
            (p.data, self.base_p.view_as(p).to(p.dtype)),
            (self.lambda_layer.data, self.base_lambda.to(self.lambda_layer.dtype)),
            *self._shrink_magnitude(),
        ]
