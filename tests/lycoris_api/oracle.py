"""W' of every algorithm in fp64, from the tensors a state_dict holds and the base weight alone.

Shapes follow the key table: O outputs, I inputs (per group), r rank, k kernel.
"""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


def merged_weight(algo: str, sd: Tensors, weight: torch.Tensor, strength: float, start: Tensors | None = None):
    """The adapted weight, fp64.

    ``start`` is the module's state at its creation (T-LoRA subtracts it).
    """
    sd = {key: value.detach().double() for key, value in sd.items()}
    weight = weight.detach().double()
    if algo in ("diag-oft", "boft"):
        return _rotated(algo, sd, weight, strength)
    if algo == "ia3":
        return _scaled(sd, weight, strength)
    delta = _delta(algo, sd, weight, start)
    assert delta.shape[0] == weight.shape[0], f"{delta.shape[0]} rows of a delta for {weight.shape[0]} outputs"
    delta = delta.reshape(weight.shape)
    if "dora_scale" in sd:
        return weight + strength * (_decomposed(weight + delta, sd["dora_scale"]) - weight)
    return weight + strength * delta


def _delta(algo: str, sd: Tensors, weight: torch.Tensor, start: Tensors | None) -> torch.Tensor:
    if algo == "glora":
        return _glora(sd, weight)
    if algo == "full":
        return sd["diff"]
    if algo == "tlora":
        first = {key: value.detach().double() for key, value in (start or {}).items()}
        return _tlora(sd) - _tlora({**first, "alpha": sd["alpha"]})
    return {"locon": _locon, "dylora": _locon, "loha": _loha, "lokr": _lokr}[algo](sd)


def _scale(sd: Tensors, rank: int) -> float:
    return float(sd["alpha"]) / rank if "alpha" in sd else 1.0


def _tucker(core: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.einsum("pq...,po,qi->oi...", core, left, right)


def _locon(sd: Tensors) -> torch.Tensor:
    up, down = sd["lora_up.weight"].flatten(1), sd["lora_down.weight"]
    rank = down.shape[0]
    if "lora_mid.weight" in sd:
        return _scale(sd, rank) * _tucker(sd["lora_mid.weight"], up.T, down.flatten(1))
    return _scale(sd, rank) * torch.einsum("or,ri...->oi...", up, down)


def _loha(sd: Tensors) -> torch.Tensor:
    rank = sd["hada_w1_b"].shape[0]
    if "hada_t1" in sd:
        halves = [_tucker(sd[f"hada_t{n}"], sd[f"hada_w{n}_a"], sd[f"hada_w{n}_b"]) for n in (1, 2)]
    else:
        halves = [sd[f"hada_w{n}_a"] @ sd[f"hada_w{n}_b"] for n in (1, 2)]
    return _scale(sd, rank) * halves[0] * halves[1]


def _lokr(sd: Tensors) -> torch.Tensor:
    rank = 0
    if "lokr_w1" in sd:
        first = sd["lokr_w1"]
    else:
        first, rank = sd["lokr_w1_a"] @ sd["lokr_w1_b"], sd["lokr_w1_b"].shape[0]
    if "lokr_w2" in sd:
        second = sd["lokr_w2"]
    elif "lokr_t2" in sd:
        second, rank = _tucker(sd["lokr_t2"], sd["lokr_w2_a"], sd["lokr_w2_b"]), sd["lokr_w2_b"].shape[0]
    else:
        second, rank = sd["lokr_w2_a"] @ sd["lokr_w2_b"], sd["lokr_w2_b"].shape[0]
    out = torch.einsum("ab,cd...->acbd...", first, second)
    out = out.flatten(0, 1).flatten(1, 2)
    return out * (_scale(sd, rank) if rank else 1.0)


def _glora(sd: Tensors, weight: torch.Tensor) -> torch.Tensor:
    a1, a2, b1 = (sd[f"{key}.weight"].flatten(1) for key in ("a1", "a2", "b1"))
    b2 = sd["b2.weight"]
    inner = torch.einsum("oi...,ir,rj->oj...", weight, a1, a2)
    if "bm.weight" in sd:
        outer = _tucker(sd["bm.weight"], b1.T, b2.flatten(1))
    else:
        outer = torch.einsum("or,ri...->oi...", b1, b2)
    return _scale(sd, a2.shape[0]) * (inner + outer)


def _tlora(sd: Tensors) -> torch.Tensor:
    q, p = sd["q_layer.weight"].flatten(1), sd["p_layer.weight"].flatten(1)
    return _scale(sd, q.shape[0]) * (p * sd["lambda_layer"]) @ q


def _decomposed(weight: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    axis = 0 if magnitude.shape[0] == weight.shape[0] and magnitude.shape[0] != 1 else 1
    dims = [dim for dim in range(weight.dim()) if dim != axis]
    norm = torch.linalg.vector_norm(weight, dim=dims, keepdim=True)
    return weight * magnitude.reshape([-1 if d == axis else 1 for d in range(weight.dim())]) / norm


def cayley(blocks: torch.Tensor, bound: float) -> torch.Tensor:
    """(I + q)(I - q)^-1 of q = b - b^T, with |q| over all blocks clipped to ``bound`` where that is positive."""
    skew = blocks - blocks.transpose(-1, -2)
    norm = skew.norm()
    if bound > 0 and norm > bound:
        skew = skew * (bound / norm)
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
    return (eye + skew) @ torch.linalg.inv(eye - skew)


def _rotated(algo: str, sd: Tensors, weight: torch.Tensor, strength: float) -> torch.Tensor:
    blocks, out = sd["oft_blocks"], weight.shape[0]
    rotation = cayley(blocks, float(sd["alpha"]) * out)
    eye = torch.eye(blocks.shape[-1], dtype=blocks.dtype)
    rotation = strength * rotation + (1 - strength) * eye
    flat = weight.reshape(out, -1)
    if algo == "diag-oft":
        num, size, _ = rotation.shape
        flat = (rotation.transpose(-1, -2) @ flat.reshape(num, size, -1)).reshape(out, -1)
    else:
        for stage, factor in enumerate(rotation):
            flat = _butterfly_stage(factor, flat, 2**stage * blocks.shape[-1] // 2)
    if "rescale" in sd:
        flat = flat * sd["rescale"].reshape(-1, 1)
    return flat.reshape(weight.shape)


def _butterfly_stage(factor: torch.Tensor, flat: torch.Tensor, stride: int) -> torch.Tensor:
    num, size, _ = factor.shape
    order = torch.arange(flat.shape[0]).reshape(-1, 2, stride).transpose(1, 2).reshape(-1)
    turned = (factor @ flat[order].reshape(num, size, -1)).reshape(flat.shape)
    result = torch.empty_like(flat)
    result[order] = turned
    return result


def _scaled(sd: Tensors, weight: torch.Tensor, strength: float) -> torch.Tensor:
    gain = 1 + strength * sd["weight"].flatten()
    shape = [1] * weight.dim()
    shape[1 if bool(sd["on_input"]) else 0] = -1
    return weight * gain.reshape(shape)
