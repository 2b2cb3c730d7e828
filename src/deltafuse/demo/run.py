"""The demo from settings to checked files."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import OptionError
from ..training.config import TrainConfig
from ..training.loop import TrainResult
from ..training.loop import run as run_loop
from ..training.progress import Progress
from .base import BaseFacts, base_facts, load_base
from .data import check_digit
from .model import DigitDenoiser
from .pictures import check_plotting
from .recipes import ADAPTED_BLOCKS, Recipe, recipe_for
from .reload import TOLERANCE, probe, reload_difference
from .task import SAMPLES_NAME, DemoTask

DEFAULT_STEPS = 300
BATCH_SIZE = 64
_HELD_OUT_POINTS = 6


@dataclass(frozen=True)
class DemoSettings:
    """What the user chose; None means what suits the algorithm (and the digit that the base never saw)."""

    algo: str = "lokr"
    steps: int = DEFAULT_STEPS
    out: Path = Path("deltafuse-demo")
    rank: int | None = None
    alpha: float | None = None
    lr: float | None = None
    seed: int = 0
    digit: int | None = None
    strength: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DemoResult:
    """What a finished demo left behind and measured."""

    training: TrainResult
    samples: Path
    before: dict[str, float]
    after: dict[str, float]
    reload_difference: float

    @property
    def reload_ok(self) -> bool:
        """Whether the file reproduces the trained network; NaN does not."""
        return self.reload_difference <= TOLERANCE


class Demo:
    """A prepared run: base loaded, adapter attached, every setting checked, nothing written yet."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        check_plotting()
        if not math.isfinite(settings.strength):
            raise OptionError(f"option 'strength' is {settings.strength}; it must be finite")
        if settings.out.exists() and not settings.out.is_dir():
            raise OptionError(f"option 'out' is '{settings.out}', which is a file; it must be a directory")
        self.base: BaseFacts = base_facts()
        self.digit = check_digit(self.base.left_out if settings.digit is None else settings.digit)
        self.recipe: Recipe = recipe_for(settings.algo).with_changes(
            settings.rank, settings.alpha, settings.lr, settings.options
        )
        self.config = training_config(self.recipe, settings)
        self.task = DemoTask(self.digit, seed=settings.seed)
        self.model: DigitDenoiser = load_base()
        self.network = attach(self.model, settings, self.recipe)

    def run(self, progress: Progress) -> DemoResult:
        """Train, write the files, then check that the adapter file alone reproduces the trained network."""
        settings = self.settings
        result = run_loop(self.task, self.model, self.network, self.config, settings.out, progress)
        self.network.eval()
        difference = reload_difference(probe(self.model, self.digit), result.adapter, self.digit, settings.strength)
        steps = sorted(result.evals)
        return DemoResult(
            training=result,
            samples=settings.out / SAMPLES_NAME,
            before=result.evals[steps[0]],
            after=result.evals[steps[-1]],
            reload_difference=difference,
        )


def attach(model: DigitDenoiser, settings: DemoSettings, recipe: Recipe) -> Any:
    """The adapter on the blocks of ``model``; raises OptionError or ShapeError for what cannot be made."""
    import torch

    from .. import create_lycoris

    torch.manual_seed(settings.seed)
    network = create_lycoris(
        model,
        settings.strength,
        linear_dim=recipe.rank,
        linear_alpha=recipe.alpha,
        algo=settings.algo,
        preset={"target_module": list(ADAPTED_BLOCKS)},
        **recipe.options,
    )
    network.apply_to()
    return network


def training_config(recipe: Recipe, settings: DemoSettings) -> TrainConfig:
    """The loop's options: a short warm-up where there is room for one, then a cosine."""
    return TrainConfig(
        steps=settings.steps,
        lr=recipe.lr,
        batch_size=BATCH_SIZE,
        weight_decay=0.01,
        schedule="cosine",
        warmup=min(20, settings.steps // 5),
        seed=settings.seed,
        device="cpu",
        eval_every=settings.steps // _HELD_OUT_POINTS,
    )
