"""Activation checkpointing of both kinds: same gradients, same masks, and adapters that train behind a frozen base."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deltafuse
from deltafuse.algorithms import algorithms

from .support import Adapted, assert_same, assert_trains, build, cases, kinds_of, step, takes

RANDOM = {"dropout": 0.4, "rank_dropout": 0.4, "module_dropout": 0.2}
REENTRANT = [True, False]
KIND_IDS = ["reentrant", "non-reentrant"]


def checkpointed(case: Adapted, reentrant: bool) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(case.model, x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", REENTRANT, ids=KIND_IDS)
@pytest.mark.parametrize(("name", "kind"), cases())
def test_same_gradients(name: str, kind: str, reentrant: bool) -> None:
    case = build(name, kind)
    x = case.kind.inputs(4)
    one, other = step(case, x, checkpointed(case, reentrant)), step(case, x)
    assert_trains(one)
    assert_same(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", REENTRANT, ids=KIND_IDS)
@pytest.mark.parametrize(("name", "kind"), cases())
def test_same_masks_in_the_recompute(name: str, kind: str, reentrant: bool) -> None:
    chosen = {key: p for key, p in RANDOM.items() if kind != "layernorm" or key != "dropout"}
    case = build(name, kind, stack=2, **chosen)
    x = case.kind.inputs(4)
    for seed in (1, 2, 3, 4):
        assert_same(step(case, x, checkpointed(case, reentrant), seed), step(case, x, None, seed), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", REENTRANT, ids=KIND_IDS)
@pytest.mark.parametrize("name", [name for name in algorithms() if takes(name, "weight_decompose")])
def test_same_gradients_decomposed(name: str, reentrant: bool) -> None:
    case = build(name, "linear", weight_decompose=True, dropout=0.3)
    x = case.kind.inputs(4)
    one, other = step(case, x, checkpointed(case, reentrant)), step(case, x)
    assert_same(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", REENTRANT, ids=KIND_IDS)
def test_dylora_trains_the_block_it_ran(reentrant: bool) -> None:
    case = build("dylora", "linear", block_size=1)
    x = case.kind.inputs(4)
    drawn = set()
    for seed in range(12):
        result = step(case, x, checkpointed(case, reentrant), seed)
        moved = tuple(bool(grad is not None and grad.abs().sum() > 0) for grad in result.grads)
        count = len(moved) // 2
        assert moved[:count] == moved[count:]
        assert sum(moved[:count]) == 1
        drawn.add(moved.index(True))
        assert_same(result, step(case, x, None, seed), rtol=1e-5, atol=1e-6)
    assert len(drawn) > 1


@pytest.mark.parametrize("reentrant", REENTRANT, ids=KIND_IDS)
def test_a_layer_at_strength_zero_draws_like_the_others(reentrant: bool) -> None:
    case = build("locon", "linear", stack=2, rank_dropout=0.5)
    case.adapters[1].multiplier = 0.0
    x = case.kind.inputs(4)
    for seed in range(4):
        assert_same(step(case, x, checkpointed(case, reentrant), seed), step(case, x, None, seed))


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.q_proj = nn.Linear(size, size)
        self.o_proj = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.o_proj(torch.tanh(self.q_proj(self.norm(hidden))))


class Stack(nn.Module):
    """An embedding (for token ids), blocks under reentrant checkpointing, a head."""

    def __init__(self, size: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(depth)])
        self.head = nn.Linear(size, 8)
        self.checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if x.is_floating_point() else self.embed(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True) if self.checkpointing else block(hidden)
        return self.head(hidden)


INPUTS = {
    "tokens": lambda: torch.randint(0, 20, (2, 6)),
    "floats": lambda: torch.randn(2, 6, 16),
}


def stack_gradients(model: Stack, network: deltafuse.LycorisNetwork, x: Tensor) -> dict[str, Tensor | None]:
    network.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    model(x).square().mean().backward()
    return {name: None if item.grad is None else item.grad.clone() for name, item in network.named_parameters()}


@pytest.mark.parametrize("inputs", list(INPUTS))
@pytest.mark.parametrize("name", [name for name in algorithms() if "linear" in kinds_of(name)])
def test_frozen_base_trains_under_reentrant_checkpointing(name: str, inputs: str) -> None:
    torch.manual_seed(0)
    model = Stack().requires_grad_(False)
    network = deltafuse.create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2, algo=name)
    network.apply_to()
    with torch.no_grad():
        for item in network.parameters():
            item.add_(0.1 * torch.randn_like(item))
    x = INPUTS[inputs]()
    model.checkpointing = False
    want = stack_gradients(model, network, x)
    model.checkpointing = True
    network.enable_gradient_checkpointing()
    got = stack_gradients(model, network, x)
    assert any("blocks" in key and grad is not None for key, grad in got.items())
    for key, grad in want.items():
        torch.testing.assert_close(got[key], grad, rtol=1e-4, atol=1e-6)
    assert all(item.grad is None for item in model.parameters())


def test_without_the_marks_blocks_train_nothing() -> None:
    """The symptom that ``enable_gradient_checkpointing`` is for."""
    torch.manual_seed(0)
    model = Stack().requires_grad_(False)
    network = deltafuse.create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2, algo="lora")
    network.apply_to()
    with pytest.warns(UserWarning, match="requires_grad"):
        got = stack_gradients(model, network, INPUTS["tokens"]())
    assert all(grad is None for key, grad in got.items() if "blocks" in key)


def test_marks_leave_inference_alone_and_come_once() -> None:
    model = Stack().requires_grad_(False)
    network = deltafuse.create_lycoris(model, 1.0, linear_dim=4, linear_alpha=2, algo="lora")
    network.apply_to()
    network.enable_gradient_checkpointing()
    network.enable_gradient_checkpointing()
    assert len(model.embed._forward_hooks) == 1
    model.checkpointing = False
    with torch.no_grad():
        assert not model(INPUTS["tokens"]()).requires_grad
