"""Same start for a seed, same keys, same numbers and interchangeable files, row by row of the table."""

from __future__ import annotations

import lycoris.modules as theirs
import pytest
import torch

import deltafuse.modules as ours
from lycoris_api.support import LAYERS
from lycoris_api.target import relative_error

from .pair import NAME, build, delta, filled, randomised, tensors
from .table import TABLE, Row

assert theirs is not ours
STRENGTHS = (0.3, -1.0, 2.0)
TOLERANCE = 2e-5


def rows(view: str, *more: str) -> list:
    """The rows where the two packages agree in ``view`` (and in ``more``)."""
    agreeing = [row for row in TABLE if all(row.rule(name) is None for name in (view, *more))]
    return [pytest.param(row, id=row.id) for row in agreeing]


def differing(view: str) -> list:
    return [pytest.param(row, id=f"{row.id}-rule-{row.rule(view)}") for row in TABLE if row.rule(view) is not None]


@pytest.mark.parametrize("row", rows("start"))
def test_same_start_for_a_seed(row: Row):
    """Bit for bit the same keys, shapes and values."""
    mine = tensors(build(ours, row.class_name, row.case)[0], row.case.algo)
    peer = tensors(build(theirs, row.class_name, row.case)[0], row.case.algo)
    extra = set(mine) - set(peer)
    assert not extra or row.case.algo == "tlora", f"keys lycoris-lora has not: {sorted(extra)}"
    assert not set(peer) - set(mine)
    for key, value in peer.items():
        if key == "dora_scale":  # computed from the weight, not drawn: the last bit may differ
            torch.testing.assert_close(mine[key], value, rtol=3e-7, atol=0)
            continue
        assert torch.equal(mine[key].to(value.dtype), value), (
            f"{key}: {mine[key].flatten()[:4]} != {value.flatten()[:4]}"
        )
        assert mine[key].dtype == value.dtype or key == "alpha", key


@pytest.mark.parametrize("row", rows("start"))
def test_same_random_numbers_are_drawn(row: Row):
    """What comes after the constructor sees the same generator state, so whole networks start alike."""
    build(ours, row.class_name, row.case)
    after = torch.rand(3)
    build(theirs, row.class_name, row.case)
    assert torch.equal(after, torch.rand(3))


def compare(row: Row, strengths: tuple[float, ...], **more) -> None:
    case, x = row.case, LAYERS[row.case.layer].input()
    peer, peer_layer, state = randomised(theirs, row.class_name, case, **more)
    mine, layer = filled(ours, row.class_name, case, state, **more)
    for strength in strengths:
        error = relative_error(delta(mine, layer, x, strength), delta(peer, peer_layer, x, strength))
        assert error < TOLERANCE, f"strength {strength}: relative error {error:.3g}"


@pytest.mark.parametrize("row", rows("forward"))
def test_same_forward(row: Row):
    compare(row, (1.0,))


@pytest.mark.parametrize("row", rows("strength"))
def test_same_forward_at_other_strengths(row: Row):
    compare(row, STRENGTHS)


@pytest.mark.parametrize("row", [row for row in rows("bypass") if row.values[0].case.algo != "full"])
def test_same_bypass(row: Row):
    compare(row, (1.0,), bypass_mode=True)


@pytest.mark.parametrize("row", [row for row in rows("bypass-strength") if row.values[0].case.algo != "full"])
def test_same_bypass_at_other_strengths(row: Row):
    compare(row, STRENGTHS, bypass_mode=True)


@pytest.mark.parametrize("row", [row for row in rows("forward") if row.values[0].case.layer in ("linear", "conv2d")])
def test_same_gradients(row: Row):
    """The input and every parameter get the same gradient (both differentiate through the DoRA norm)."""
    case = row.case
    peer, _, state = randomised(theirs, row.class_name, case)
    mine, _ = filled(ours, row.class_name, case, state)
    grads = {}
    for name, module in (("peer", peer), ("mine", mine)):
        x = LAYERS[case.layer].input().requires_grad_()
        module.multiplier = 1.0
        y = module(x)
        (y * torch.sin(torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape))).sum().backward()
        grads[name] = {key: value.grad for key, value in module.named_parameters()} | {"x": x.grad}
    if "scalar" in grads["peer"]:  # a loaded scalar is folded: the two hold it at different places
        grads = {name: {"x": value["x"]} for name, value in grads.items()}
    assert grads["mine"].keys() == grads["peer"].keys()
    for key, value in grads["peer"].items():
        assert relative_error(grads["mine"][key], value) < 1e-4, key


@pytest.mark.parametrize("row", [row for row in rows("reads-theirs") if row.values[0].case.algo != "tlora"])
def test_its_files_load_here(row: Row):
    """get_module and make_module of deltafuse rebuild what lycoris-lora trained."""
    case, x = row.case, LAYERS[row.case.layer].input()
    peer, peer_layer, state = randomised(theirs, row.class_name, case)
    file = {f"{NAME}.{key}": value for key, value in state.items()}
    layer = LAYERS[case.layer].build()
    kind, params = ours.get_module(file, NAME)
    mine = ours.make_module(kind, params, NAME, layer).eval()
    if row.rule("forward") is None:
        expected = delta(peer, peer_layer, x)
        assert relative_error(delta(mine, layer, x), expected) < TOLERANCE
    again = tensors(mine, case.algo)
    for key, value in state.items():
        if key == "alpha" and (row.rule("start") or row.rule("forward") or case.options.get("full_matrix")):
            continue  # two full matrices have no rank, so their alpha says nothing (rule 3)
        assert torch.equal(again[key].reshape(value.shape), value), key


@pytest.mark.parametrize("row", rows("reads-ours", "forward"))
def test_our_files_load_there(row: Row):
    case, x = row.case, LAYERS[row.case.layer].input()
    mine, layer, state = randomised(ours, row.class_name, case)
    file = {f"{NAME}.{key}": value for key, value in state.items()}
    peer_layer = LAYERS[case.layer].build()
    kind, params = theirs.get_module(file, NAME)
    peer = theirs.make_module(kind, params, NAME, peer_layer).eval()
    assert relative_error(delta(peer, peer_layer, x), delta(mine, layer, x)) < TOLERANCE


@pytest.mark.parametrize("row", differing("forward"))
def test_forward_differs_by_rule(row: Row):
    """The rows that name a rule do differ: a row that no longer does has to leave the table."""
    case, x = row.case, LAYERS[row.case.layer].input()
    peer, peer_layer, state = randomised(theirs, row.class_name, case)
    mine, layer = filled(ours, row.class_name, case, state)
    assert relative_error(delta(mine, layer, x), delta(peer, peer_layer, x)) > 1e-3, f"rule {row.rule('forward')}"
