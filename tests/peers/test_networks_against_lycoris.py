"""Whole networks: the same modules, start and file from ``create_lycoris`` of both packages."""

from __future__ import annotations

import lycoris
import pytest
import torch
from safetensors.torch import load_file

import deltafuse
from lycoris_api.support import randomise, toy_input, toy_model
from lycoris_api.target import relative_error
from lycoris_api.toy_unet import models, te_input, unet_inputs

NETWORKS = {
    "lora": {"linear_dim": 3, "linear_alpha": 2.0},
    "lora-conv": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2.0, "conv_dim": 2, "conv_alpha": 5.0},
    "lora-tucker": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2.0, "use_tucker": True},
    "lora-dora": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2.0, "dora_wd": True},
    "lora-scalar": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2.0, "use_scalar": True},
    "lora-norm": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2.0, "train_norm": True},
    "loha": {"linear_dim": 3, "linear_alpha": 2.0},
    "lokr": {"linear_dim": 2, "linear_alpha": 3.0},
    "lokr-factor": {"algo": "lokr", "linear_dim": 1, "linear_alpha": 3.0, "factor": 3, "decompose_both": True},
    "glora": {"linear_dim": 3, "linear_alpha": 2.0},
    "diag-oft": {"linear_dim": 3, "linear_alpha": 2.0, "constraint": 0.1},
    "ia3": {"linear_dim": 3, "linear_alpha": 2.0},
    "full": {"linear_dim": 3, "linear_alpha": 2.0},
    "dylora": {"linear_dim": 6, "linear_alpha": 2.0, "block_size": 2},
}
NUMBERS_DIFFER = {"dylora": 1}
PEER_CANNOT_READ = {"ia3": 40, "dylora": 40}


@pytest.fixture(autouse=True)
def _peer_targets():
    lycoris.LycorisNetwork.apply_preset(
        {"enable_conv": True, "target_module": ["Linear", "Conv1d", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm"]}
    )


def network(package, name: str):
    options = {"algo": name.split("-")[0] if name.split("-")[0] != "diag" else "diag-oft"} | NETWORKS[name]
    model = toy_model()
    torch.manual_seed(4)
    net = package.create_lycoris(model, 1.0, **options)
    return net.eval(), model


def start(net, algo: str) -> dict[str, torch.Tensor]:
    net.apply_to()
    return {key: value.detach().clone() for key, value in net.state_dict().items()}


@pytest.mark.parametrize("name", list(NETWORKS))
def test_same_modules_and_start(name):
    mine, _ = network(deltafuse, name)
    peer, _ = network(lycoris, name)
    assert [adapter.lora_name for adapter in mine.loras] == [adapter.lora_name for adapter in peer.loras]
    assert [type(a).__name__ for a in mine.loras] == [type(a).__name__ for a in peer.loras]
    first, second = start(mine, name), start(peer, name)
    assert first.keys() == second.keys()
    for key, value in second.items():
        if name == "dylora" and first[key].shape != value.shape:
            continue  # rule 40
        tolerance = 3e-7 if key.endswith("dora_scale") else 0.0  # computed from the weight, not drawn
        torch.testing.assert_close(first[key], value, rtol=tolerance, atol=0.0, msg=key)


def trained(package, name: str, path: str):
    """A file with random, non-zero tensors and the output of the model it belongs to."""
    net, model = network(package, name)
    for index, adapter in enumerate(net.loras):
        randomise(adapter, 30 + index)
    net.apply_to()
    output = model(toy_input())
    net.save_weights(path, None, None)
    return output


@pytest.mark.parametrize("name", list(NETWORKS))
def test_its_files_load_here(name, tmp_path):
    path = str(tmp_path / "theirs.safetensors")
    expected = trained(lycoris, name, path)
    model = toy_model()
    net, tensors = deltafuse.create_lycoris_from_weights(1.0, path, model)
    net.eval()
    net.apply_to()
    assert set(tensors) == set(load_file(path))
    if name not in NUMBERS_DIFFER:
        base = toy_model()(toy_input())
        assert relative_error(model(toy_input()) - base, expected - base) < 5e-5


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in PEER_CANNOT_READ])
def test_our_files_load_there(name, tmp_path):
    path = str(tmp_path / "ours.safetensors")
    expected = trained(deltafuse, name, path)
    model = toy_model()
    net, _ = lycoris.create_lycoris_from_weights(1.0, path, model)
    net.eval()
    net.apply_to()
    base = toy_model()(toy_input())
    assert relative_error(model(toy_input()) - base, expected - base) < 5e-5


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in NUMBERS_DIFFER])
def test_load_weights_across(name, tmp_path):
    path = str(tmp_path / "theirs.safetensors")
    expected = trained(lycoris, name, path)
    net, model = network(deltafuse, name)
    net.apply_to()
    net.load_weights(path)
    assert relative_error(model(toy_input()), expected) < 2e-5


@pytest.mark.parametrize("name", ["lora", "lora-dora", "loha", "lokr", "glora", "diag-oft"])
def test_same_training_run(name):
    """Five SGD steps from the same start give the same losses."""
    losses = []
    for package in (deltafuse, lycoris):
        net, model = network(package, name)
        for index, adapter in enumerate(net.loras):
            randomise(adapter, 30 + index)
        net.apply_to()
        net.train()
        optimizer = torch.optim.SGD(net.prepare_optimizer_params(1e-2))
        seen = []
        for _ in range(5):
            loss = (model(toy_input()) - 0.5).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


# --------------------------------------------------------------------------------------------------------------- kohya
KOHYA = {
    "lora": {},
    "lora-conv": {"algo": "lora", "conv_dim": 2, "conv_alpha": 5.0, "use_tucker": True},
    "loha": {"algo": "loha"},
    "lokr": {"algo": "lokr", "factor": "4"},
    "diag-oft": {"algo": "diag-oft"},
    "lora-rs": {"algo": "lora", "rs_lora": True},
}


@pytest.fixture
def _peer_kohya_targets():
    reset = {"module_algo_map": {}, "name_algo_map": {}, "use_fnmatch": False, "exclude_name": []}
    lycoris.kohya.LycorisNetworkKohya.apply_preset({**lycoris.config.PRESET["full"], **reset})


def kohya_network(package, name: str, encoders: int):
    unet, te = models(encoders)
    torch.manual_seed(4)
    net = package.kohya.create_network(1.0, 3, 2.0, None, te, unet, **KOHYA[name])
    return net.eval(), unet, te


@pytest.mark.usefixtures("_peer_kohya_targets")
@pytest.mark.parametrize("name", list(KOHYA))
def test_kohya_networks_start_alike(name):
    states = []
    for package in (deltafuse, lycoris):
        net, unet, te = kohya_network(package, name, 2)
        net.apply_to(te, unet, True, True)
        states.append({key: value.detach().clone() for key, value in net.state_dict().items()})
    assert states[0].keys() == states[1].keys()
    for key, value in states[1].items():
        assert torch.equal(states[0][key], value), key


@pytest.mark.usefixtures("_peer_kohya_targets")
@pytest.mark.parametrize("name", list(KOHYA))
@pytest.mark.parametrize("writer", ["deltafuse", "lycoris"])
def test_kohya_files_cross(name, writer, tmp_path):
    first, second = (deltafuse, lycoris) if writer == "deltafuse" else (lycoris, deltafuse)
    net, unet, te = kohya_network(first, name, 1)
    for index, adapter in enumerate(net.loras):
        randomise(adapter, 30 + index)
    net.apply_to(te, unet, True, True)
    expected = [unet(*unet_inputs()), te(te_input())]
    path = str(tmp_path / "adapter.safetensors")
    net.save_weights(path, None, {})
    unet, te = models(1)
    base = [unet(*unet_inputs()), te(te_input())]
    reader, _ = second.kohya.create_network_from_weights(1.0, path, None, te, unet)
    reader.eval()
    reader.apply_to(te, unet, True, True)
    for output, wanted, start in zip([unet(*unet_inputs()), te(te_input())], expected, base, strict=True):
        assert relative_error(output - start, wanted - start) < 5e-5
