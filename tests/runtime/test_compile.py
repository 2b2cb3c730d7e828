"""torch.compile(fullgraph=True): no graph break, eager's numbers and gradients, at most one recompile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import deltafuse
from deltafuse.algorithms import algorithms
from deltafuse.core.tracing import constant_when_traced
from deltafuse.modules.tlora import clear_timestep_mask, set_timestep_mask

from .support import Adapted, assert_same, assert_trains, build, cases, kinds_of, step, takes

ROWS = (3, 5, 8, 13, 11)
"""Below 16: PyTorch's own convolution on CPU puts a guard at a batch of 16, with or without an adapter."""
STRENGTHS = (0.0, -1.0, 0.3, 2.0, 1.0)
DROPOUTS = {"dropout": 0.4, "rank_dropout": 0.4, "module_dropout": 0.4}
DECOMPOSED = [(name, kind) for name, kind in cases() if takes(name, "weight_decompose")]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    clear_timestep_mask()
    yield
    clear_timestep_mask()
    torch._dynamo.reset()


def compiled(model: nn.Module, backend: str = "aot_eager", dynamic: bool | None = None) -> Any:
    """The compiled model; a graph break raises."""
    counters.clear()
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)


def graphs() -> int:
    """Graphs compiled since :func:`compiled`."""
    return counters["stats"]["unique_graphs"]


def agrees(case: Adapted, call: Callable[[Tensor], Tensor], rows: int) -> None:
    x = case.kind.inputs(rows)
    one, other = step(case, x, call), step(case, x)
    assert_trains(one)
    assert_same(one, other)


@pytest.mark.parametrize(("name", "kind"), cases())
def test_rows_and_strength_recompile_at_most_once(name: str, kind: str) -> None:
    case = build(name, kind)
    call = compiled(case.model, "eager" if kind == "conv2d" else "aot_eager")
    for rows in ROWS:
        agrees(case, call, rows)
    for strength in STRENGTHS:
        case.set_strength(strength)
        x = case.kind.inputs(7)
        assert_same(step(case, x, call), step(case, x))
    assert graphs() <= 2


@pytest.mark.parametrize("on_out", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize(("name", "kind"), DECOMPOSED)
def test_decomposed(name: str, kind: str, on_out: bool) -> None:
    case = build(name, kind, weight_decompose=True, wd_on_out=on_out, detach_norm=kind == "conv2d")
    backend = "aot_eager" if on_out == (kind == "conv2d") else "eager"
    call = compiled(case.model, backend)
    agrees(case, call, 6)
    case.set_strength(0.2)
    agrees(case, call, 6)
    assert graphs() == 1


@pytest.mark.parametrize(("name", "kind"), cases())
def test_dropouts_draw_what_eager_draws(name: str, kind: str) -> None:
    chosen = {key: p for key, p in DROPOUTS.items() if kind != "layernorm" or key != "dropout"}
    case = build(name, kind, **chosen)
    call = compiled(case.model, "eager" if kind == "linear" else "aot_eager")
    x = case.kind.inputs(6)
    for seed in (1, 2, 3):
        assert_same(step(case, x, call, seed), step(case, x, None, seed))
    assert graphs() == 1
    for adapter in case.adapters:
        adapter.eval()
    torch.testing.assert_close(call(x), case.model(x), rtol=1e-4, atol=1e-5)
    assert graphs() == 2


@pytest.mark.parametrize("name", [name for name in algorithms() if "linear" in kinds_of(name)])
def test_stacked(name: str) -> None:
    case = build(name, "linear", stack=2)
    call = compiled(case.model, "eager")
    agrees(case, call, 4)
    case.set_strength(-0.5)
    for rows in (9, 7, 12):
        agrees(case, call, rows)
    assert graphs() <= 2


@pytest.mark.parametrize("forced", [True, False], ids=["bypass", "merged"])
@pytest.mark.parametrize("name", ["locon", "lokr", "loha", "diag-oft", "oft", "ia3", "glora"])
def test_a_forced_form_is_traced(name: str, forced: bool) -> None:
    case = build(name, "linear", bypass_mode=forced)
    call = compiled(case.model, "eager")
    agrees(case, call, 5)
    case.adapters[0].bypass_mode = not forced
    agrees(case, call, 5)


def test_timestep_masks_change_without_a_recompile() -> None:
    case = build("tlora", "linear")
    call = compiled(case.model)
    for rows, rank in ((4, 2), (6, 3), (8, 1), (9, 4)):
        mask = (torch.arange(4) < rank).float()[None]
        set_timestep_mask(mask)
        equals_eager(case, call, rows)
    assert graphs() <= 2


def equals_eager(case: Adapted, call: Callable[[Tensor], Tensor], rows: int) -> None:
    x = case.kind.inputs(rows)
    assert_same(step(case, x, call), step(case, x))


def test_timestep_masks_of_each_sample() -> None:
    case = build("tlora", "linear")
    call = compiled(case.model)
    for batch in (2, 3, 5, 4):
        set_timestep_mask((torch.rand(batch, 4) < 0.5).float())
        equals_eager(case, call, batch)
    assert graphs() <= 2


def test_the_mark_is_the_one_of_pytorch() -> None:
    def one() -> int:
        return 1

    def other() -> int:
        return 1

    assert vars(constant_when_traced(one)) == vars(torch.compiler.assume_constant_result(other))


class Block(nn.Module):
    """Linear, convolution and norm in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.proj = nn.Linear(12, 16)
        self.conv = nn.Conv1d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.proj(self.norm(x)).transpose(1, 2))


@pytest.mark.parametrize(
    ("algo", "options"),
    [
        ("locon", {"dora_wd": True, "rank_dropout": 0.3}),
        ("lokr", {"dropout": 0.2, "train_norm": True}),
        ("diag-oft", {"constraint": 0.02}),
        pytest.param("loha", {}, marks=pytest.mark.slow),
        pytest.param("boft", {}, marks=pytest.mark.slow),
        pytest.param("dylora", {"block_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_inductor_on_networks(algo: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Block().requires_grad_(False)
    network = deltafuse.create_lycoris(model, 0.8, linear_dim=4, linear_alpha=2, algo=algo, **options)
    network.apply_to()
    for adapter in network.loras:
        with torch.no_grad():
            for item in adapter.parameters():
                item.add_(0.1 * torch.randn_like(item))
    random = {"dropout", "rank_dropout"} & set(options) or algo == "dylora"
    network.train(not random)
    call = torch.compile(model, fullgraph=True, dynamic=True)
    leaves = [item for item in network.parameters() if item.requires_grad]
    x = torch.randn(3, 5, 12)
    want, got = (torch.autograd.grad(run(x).square().mean(), leaves) for run in (model, call))
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)
    if random:
        network.train()
        loss = call(x).square().mean()
        loss.backward()
        assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


def test_mean_of_compiled_dropout_is_the_plain_output() -> None:
    case = build("locon", "linear", dropout=0.3, rank_dropout=0.3, rank_dropout_scale=True)
    call = compiled(case.model.layer, "aot_eager")
    x = case.kind.inputs(4)
    with torch.no_grad():
        mean = torch.stack([call(x) for _ in range(1500)]).mean(0)
        case.adapters[0].eval()
        plain = case.model.layer(x)
    torch.testing.assert_close(mean, plain, rtol=0.1, atol=0.1)
