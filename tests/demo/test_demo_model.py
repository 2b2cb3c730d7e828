"""The denoiser, its schedule and its shipped weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deltafuse.core.errors import CheckpointError, OptionError
from deltafuse.demo.base import BASE_WEIGHTS, base_facts, load_base
from deltafuse.demo.data import check_digit, load_digits
from deltafuse.demo.diffusion import denoising_loss, evaluate, random_times, sample, signal_and_noise
from deltafuse.demo.model import IMAGE_SIZE, NULL_LABEL, DigitDenoiser
from deltafuse.demo.recipes import ADAPTED_BLOCKS

pytest.importorskip("sklearn")


def test_forward_backward_shapes_and_gradients():
    torch.manual_seed(0)
    model = DigitDenoiser()
    images, labels = torch.randn(5, 1, IMAGE_SIZE, IMAGE_SIZE), torch.tensor([0, 3, 7, 9, NULL_LABEL])
    prediction = model(images, torch.rand(5), labels)
    assert prediction.shape == images.shape
    prediction.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_condition_and_time_matter():
    torch.manual_seed(0)
    model = DigitDenoiser().eval()
    x, t = torch.randn(1, 1, 8, 8), torch.tensor([0.5])
    outputs = [
        model(x, t, torch.tensor([1])),
        model(x, t, torch.tensor([2])),
        model(x, torch.tensor([0.9]), torch.tensor([1])),
    ]
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_layer_kinds_and_widths():
    """Linear, 1x1 and 3x3 convolution and both norms are there; adapted widths are powers of two."""
    model = DigitDenoiser()
    kernels = {module.kernel_size for module in model.modules() if isinstance(module, nn.Conv2d)}
    assert kernels == {(1, 1), (3, 3)}
    kinds = {type(module) for module in model.modules()}
    assert {nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.Embedding} <= kinds
    for block in model.modules():
        if type(block).__name__ in ADAPTED_BLOCKS:
            for module in block.modules():
                if isinstance(module, nn.Linear | nn.Conv2d):
                    for dimension in module.weight.shape[:2]:
                        assert dimension & (dimension - 1) == 0, module


def test_schedule_keeps_variance():
    signal, sigma = signal_and_noise(torch.linspace(0, 1, 9))
    torch.testing.assert_close(signal**2 + sigma**2, torch.ones_like(signal))
    assert signal[0] == 1
    assert sigma[-1] == 1


def test_random_times_fill_every_slot():
    times = random_times(50, torch.Generator().manual_seed(3))
    assert sorted((times * 50).long().tolist()) == list(range(50))


def test_sampler_is_exact_for_a_perfect_model():
    """With the true velocity of one image, DDIM walks back to that image from any noise, and twice to the same."""
    target = torch.rand(1, 1, 8, 8) * 2 - 1

    def perfect(x, t, labels):
        signal, sigma = signal_and_noise(t)
        noise = (x - signal * target) / sigma
        return signal * noise - sigma * target

    noise = torch.randn(3, 1, 8, 8)
    images = sample(perfect, torch.zeros(3, dtype=torch.long), noise, steps=7)
    torch.testing.assert_close(images, target.expand(3, -1, -1, -1), atol=1e-5, rtol=0)
    assert torch.equal(images, sample(perfect, torch.zeros(3, dtype=torch.long), noise, steps=7))


def test_loss_of_a_perfect_model_is_zero():
    x0, noise, t = torch.rand(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.rand(4)
    signal, sigma = signal_and_noise(t)
    loss = denoising_loss(lambda *_: signal * noise - sigma * x0, x0, torch.zeros(4, dtype=torch.long), t, noise)
    assert loss == 0


def test_data_split_is_fixed_and_disjoint():
    train, held_out = load_digits()
    again, _ = load_digits()
    assert torch.equal(train.images, again.images)
    assert len(train) + len(held_out) == 1797
    assert float(train.images.min()) == -1.0
    assert float(train.images.max()) == 1.0
    for digit in range(10):
        assert len(train.only(digit)) > 100
        assert len(held_out.only(digit)) > 20
        assert digit not in train.without(digit).labels


@pytest.mark.parametrize("digit", [-1, 10])
def test_digit_out_of_range(digit):
    with pytest.raises(OptionError, match=str(digit)):
        check_digit(digit)


def test_weights_are_small_and_describe_themselves():
    assert BASE_WEIGHTS.stat().st_size < 4_000_000
    facts = base_facts()
    assert facts.left_out == 7
    assert facts.steps > 1000
    assert facts.loss < 0.3


def test_missing_weights_name_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.safetensors"):
        load_base(tmp_path / "absent.safetensors")


def test_base_is_frozen_and_loading_leaves_random_state_alone():
    before = torch.get_rng_state()
    model = load_base()
    assert torch.equal(before, torch.get_rng_state())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not model.training


def test_base_knows_nine_digits_and_not_the_tenth():
    facts = base_facts()
    _, held_out = load_digits()
    model = load_base()
    known, unknown = held_out.without(facts.left_out), held_out.only(facts.left_out)
    known_loss = evaluate(model, known.images, known.labels, rounds=2)
    unknown_loss = evaluate(model, unknown.images, unknown.labels, rounds=2)
    assert known_loss < 0.3
    assert unknown_loss > 1.3 * known_loss
