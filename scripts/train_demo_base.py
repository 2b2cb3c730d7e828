"""Train the base of ``deltafuse demo``: nine of the ten digits, a fixed seed, two CPU threads, a few minutes.

python scripts/train_demo_base.py                # writes src/deltafuse/demo/weights/digits_base.safetensors
python scripts/train_demo_base.py --preview base.png   # also draws samples of each class
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from deltafuse.demo.base import BASE_WEIGHTS, load_base
from deltafuse.demo.data import Digits, check_digit, load_digits
from deltafuse.demo.diffusion import denoising_loss, evaluate, random_times, sample
from deltafuse.demo.model import IMAGE_SIZE, NULL_LABEL, DigitDenoiser

NO_CLASS_PROBABILITY = 0.1
EMA_DECAY = 0.998


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left-out", type=int, default=7, help="the digit that the base never sees")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=BASE_WEIGHTS)
    parser.add_argument("--preview", type=Path, help="draw samples of every class into this picture")
    return parser.parse_args()


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over 100 steps, then a cosine to zero."""
    return min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))


def training_batch(data: Digits, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images, some with their label dropped: the model also learns digits of no class."""
    picked = torch.randint(len(data), (size,))
    labels = data.labels[picked].clone()
    labels[torch.rand(size) < NO_CLASS_PROBABILITY] = NULL_LABEL
    return data.images[picked], labels


def train(data: Digits, options: argparse.Namespace) -> DigitDenoiser:
    """The exponential average of the weights along the run."""
    model = DigitDenoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    started = time.perf_counter()
    for step in range(1, options.steps + 1):
        images, labels = training_batch(data, options.batch)
        loss = denoising_loss(model, images, labels, random_times(options.batch), torch.randn_like(images))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(EMA_DECAY, step / (step + 10))
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        if step % 100 == 0:
            print(
                f"step {step}/{options.steps} loss {loss.item():.4f} {time.perf_counter() - started:.0f}s", flush=True
            )
    return average.eval()


def save(model: DigitDenoiser, held_out_loss: float, options: argparse.Namespace) -> None:
    """fp16: half the size, and the loss does not move in the fourth digit."""
    tensors = {key: value.to(torch.float16).contiguous() for key, value in model.state_dict().items()}
    metadata = {
        "left_out_class": str(options.left_out),
        "seed": str(options.seed),
        "steps": str(options.steps),
        "batch": str(options.batch),
        "held_out_loss": f"{held_out_loss:.5f}",
        "data": "UCI optical recognition of handwritten digits, as shipped by scikit-learn",
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.out, metadata)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB, held-out loss {held_out_loss:.4f}")


def preview(options: argparse.Namespace) -> None:
    """One row of samples per class, the left-out class too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    per_class = 12
    model = load_base(options.out)
    labels = torch.arange(10).repeat_interleave(per_class)
    noise = torch.randn(len(labels), 1, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(1))
    images = sample(model, labels, noise).view(10, per_class, IMAGE_SIZE, IMAGE_SIZE)
    figure, axes = pyplot.subplots(10, per_class, figsize=(per_class * 0.7, 7))
    for axis, image in zip(axes.flat, images.flatten(0, 1), strict=True):
        axis.imshow(image, cmap="gray", vmin=-1, vmax=1, interpolation="bicubic")
        axis.axis("off")
    figure.savefig(options.preview, dpi=90)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    train_set, held_out = (part.without(check_digit(options.left_out)) for part in load_digits())
    model = train(train_set, options)
    save(model, evaluate(model, held_out.images, held_out.labels), options)
    if options.preview:
        preview(options)


if __name__ == "__main__":
    main()
