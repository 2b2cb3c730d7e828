"""The one training loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..core.errors import DataError, DeltaFuseError, OptionError
from ..core.optional import require
from . import checkpointing
from .config import TrainConfig
from .logs import Metrics
from .objective import Objective, adapter_groups, evaluating, freeze
from .optimizers import make_optimizer
from .plots import plot_loss
from .progress import Progress, Silent
from .randomness import guarded, seed_everything
from .schedules import make_scheduler
from .state import ADAPTER_FILE, METRICS_FILE, PLOT_FILE, STATE_FILE, Resumable, read_step, save_adapter
from .task import EndlessShuffle, Task, attach_task, write_samples

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NonFiniteError(DeltaFuseError, ArithmeticError):
    """The loss or its gradient is NaN or infinite."""


@dataclass(frozen=True)
class TrainResult:
    """What a run did. Losses are those of ``metrics.jsonl``; ``evals`` maps steps to the numbers of ``evaluate``."""

    steps: int
    interrupted: bool
    losses: list[float]
    evals: dict[int, dict[str, float]]
    seconds: float
    adapter: Path
    metrics: Path
    plot: Path
    samples: dict[int, Path] = field(default_factory=dict)


def run(
    task: Task,
    model: nn.Module,
    network: Any,
    config: TrainConfig,
    out_dir: str | Path,
    ui: Progress | None = None,
    *,
    resume: bool = False,
    metadata: dict[str, str] | None = None,
) -> TrainResult:
    """Train ``network`` (made by ``create_lycoris`` on ``model``; applied here if it is not yet) on ``task``.

    Writes ``adapter.safetensors``, ``state.pt``, ``metrics.jsonl`` and ``loss.png`` into ``out_dir``, which is made if
    absent. ``resume`` continues from the state there up to ``config.steps``. SIGINT and SIGTERM end the run after the
    current step, saved, with ``interrupted`` set. Raises :class:`NonFiniteError` naming the step; files then hold the
    last saved state.
    """
    check_device(config)
    out = Path(out_dir)
    started = read_step(out / STATE_FILE) if resume else 0
    out.mkdir(parents=True, exist_ok=True)
    return _Loop(task, model, network, config, out, ui or Silent(), metadata or {}).run(started, resume)


def check_device(config: TrainConfig) -> str:
    """``cpu`` or ``cuda``: what ``config.device`` means here; OptionError where it cannot be had."""
    if config.device not in ("auto", "cpu", "cuda"):
        raise OptionError(f"option 'device' is '{config.device}'. Legal: auto, cpu, cuda.")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("option 'device' is 'cuda', but torch sees no CUDA device. Legal here: auto, cpu.")
    device = "cpu" if config.device == "cpu" or not torch.cuda.is_available() else "cuda"
    if config.mixed_precision == "fp16" and device == "cpu":
        raise OptionError("option 'mixed_precision' is 'fp16', which needs a GPU. Legal on cpu: no, bf16.")
    return device


def make_accelerator(config: TrainConfig) -> Any:
    """A fresh accelerator: precision and accumulation may differ from an earlier run of the same process."""
    accelerate = require("accelerate", extra="train", purpose="training")
    state = require("accelerate.state", extra="train")
    utils = require("accelerate.utils", extra="train")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
    plugin = utils.GradientAccumulationPlugin(num_steps=config.grad_accum, sync_with_dataloader=False)
    return accelerate.Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_plugin=plugin,
        cpu=check_device(config) == "cpu",
        step_scheduler_with_optimizer=False,
    )


class _Loop:
    """State of one run; made once, run once."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        network: Any,
        config: TrainConfig,
        out: Path,
        ui: Progress,
        metadata: dict[str, str],
    ) -> None:
        self.task, self.network, self.config, self.out = task, network, config, out
        self.metadata = metadata
        seed_everything(config.seed)
        network.apply_to()
        attach_task(task, network)
        if config.freeze_base:
            freeze(model, network)
        checkpointing.enable(model, network, config.gradient_checkpointing)
        self.accelerator = make_accelerator(config)
        self.main = bool(self.accelerator.is_main_process)
        self.ui: Progress = ui if self.main else Silent()
        self.objective = Objective(task, model, network)
        self.objective.to(self.accelerator.device)
        self.groups = adapter_groups(network, config.lr)
        self.parameters = [p for group in self.groups for p in group["params"]]
        self.evals: dict[int, dict[str, float]] = {}
        self.samples: dict[int, Path] = {}

    def run(self, started: int, resume: bool) -> TrainResult:
        """Everything between the first and the last file."""
        begun = time.perf_counter()
        self._prepare(started)
        if resume:
            self.parts.load(self.out / STATE_FILE)
        if self.accelerator.process_index:  # every process its own noise, also after a resume
            seed_everything(config_seed(self.config.seed, self.accelerator.process_index, started))
        self.metrics = Metrics(
            self.out / METRICS_FILE if self.main else None,
            resume_step=started if resume else None,
            tensorboard=self.config.tensorboard,
        )
        self.ui.start(self.config.steps, started)
        try:
            if started == 0:
                self._evaluate(0)
                self._sample(0)
            step, interrupted = self._train(started)
            return self._result(step, interrupted, time.perf_counter() - begun)
        finally:
            self.metrics.close()
            self.ui.close()

    def _prepare(self, started: int) -> None:
        """Optimizer, scheduler, loaders and their wrapping."""
        config = self.config
        optimizer = make_optimizer(config.optimizer, self.groups, config.lr, config.weight_decay)
        self.scheduler = make_scheduler(optimizer, config.schedule, config.steps, config.warmup)
        loader = self.task.batches("train", config.batch_size)
        if loader is None or not isinstance(loader.sampler, EndlessShuffle):
            raise DataError(f"task '{self.task.name}' must give training batches made by training.task.make_loader.")
        taken = started * config.grad_accum * config.batch_size * self.accelerator.num_processes
        loader.sampler.begin(config.seed, taken)
        self.wrapped, self.optimizer, self.loader = self.accelerator.prepare(self.objective, optimizer, loader)
        self.held_out: DataLoader[Any] | None = self.task.batches("held_out", config.batch_size)
        self.parts = Resumable(self.network, optimizer, self.scheduler, self.accelerator.scaler)

    def _train(self, started: int) -> tuple[int, bool]:
        """Steps ``started + 1`` to ``config.steps``; returns the last one and whether a signal ended it."""
        config, step = self.config, started
        self.objective.train()
        self.ui.state("warming up")
        batches = iter(self.loader)
        with _stop_requests() as stop:
            while step < config.steps and not self._agreed(stop):
                values = self._step(batches, step + 1)
                step += 1
                self.metrics.write(step, **values)
                self.ui.step(step, values["loss"], values["lr"])
                self._between(step)
        if step < config.steps or not config.save_every or step % config.save_every:
            self._save(step)
        self.accelerator.wait_for_everyone()
        return step, step < config.steps

    def _agreed(self, stop: _Stop) -> bool:
        """Whether any process was asked to stop, so that all end after the same step."""
        if self.accelerator.num_processes == 1:
            return bool(stop)
        asked = torch.tensor(float(bool(stop)), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, reduction="sum") > 0)

    def _between(self, step: int) -> None:
        """Evaluation and saving after a step, and the state shown for the next one."""
        config = self.config
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            self._evaluate(step)
        if step == config.steps:
            self._sample(step)
        if config.save_every and step % config.save_every == 0:
            self._save(step)
        self.ui.state("done" if step == config.steps else "training")

    def _step(self, batches: Iterator[Any], step: int) -> dict[str, float]:
        """One optimizer step over ``grad_accum`` micro-batches; the numbers for the log."""
        begun, config = time.perf_counter(), self.config
        lr = float(self.optimizer.param_groups[0]["lr"])
        losses = []
        for _ in range(config.grad_accum):
            with self.accelerator.accumulate(self.wrapped):
                loss = self.wrapped(next(batches))
                self.accelerator.backward(loss)
                losses.append(loss.detach().float())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.parameters, config.max_grad_norm or math.inf)
                    mean, size = self._checked(torch.stack(losses).mean(), norm, step)
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
        if not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        values = {"loss": mean, "lr": lr, "grad_norm": size}
        values.update(self._limit_norms())
        return {**values, "seconds": time.perf_counter() - begun}

    def _checked(self, loss: torch.Tensor, norm: torch.Tensor, step: int) -> tuple[float, float]:
        """Both as numbers, before the optimizer may write anything they spoil. One synchronisation per step."""
        value, size = torch.stack([loss, norm.to(loss)]).tolist()
        scaled = self.accelerator.scaler is not None  # an infinite scaled gradient is the scaler's business
        if math.isfinite(value) and (math.isfinite(size) or scaled):
            return value, size
        what = f"loss {value}" if not math.isfinite(value) else f"gradient norm {size}"
        raise NonFiniteError(
            f"step {step}: {what}; training stopped. {self._last_good()} "
            "Lower --lr, set --max-grad-norm, or use --mixed-precision bf16 or no."
        )

    def _last_good(self) -> str:
        path = self.out / STATE_FILE
        if not path.is_file():
            return "Nothing was saved before it."
        return f"'{self.out / ADAPTER_FILE}' holds step {read_step(path)}, the last one saved."

    def _limit_norms(self) -> dict[str, float]:
        limit = self.config.scale_weight_norms
        if not limit:
            return {}
        count, mean, largest = self.network.apply_max_norm_regularization(limit, self.accelerator.device)
        return {"norms_scaled": float(count), "norm_mean": float(mean), "norm_max": float(largest)}

    def _evaluate(self, step: int) -> None:
        if self.held_out is None or not self.main:
            return
        self.ui.state("evaluating")
        place = require("accelerate.utils", extra="train").send_to_device
        limit = self.config.eval_batches or len(self.held_out)
        with guarded(self.config.seed), evaluating(self.objective), self.accelerator.autocast():
            batches = (place(batch, self.accelerator.device) for batch in islice(self.held_out, limit))
            values = self.task.evaluate(self.objective.model, batches)
        self.evals[step] = values
        self.metrics.write(step, **{f"eval_{name}": value for name, value in values.items()})
        self.ui.message(f"step {step}: held out " + ", ".join(f"{k} {v:.4f}" for k, v in values.items()))

    def _sample(self, step: int) -> None:
        if not callable(getattr(self.task, "samples", None)) or not self.main:
            return
        self.ui.state("sampling")
        with guarded(self.config.seed), evaluating(self.objective), self.accelerator.autocast():
            path = write_samples(self.task, self.objective.model, self.out, step)
        if path is not None:
            self.samples[step] = path

    def _save(self, step: int) -> None:
        if not self.main:
            return
        self.ui.state("saving")
        facts = {"ss_steps": str(step), "ss_learning_rate": str(self.config.lr), "ss_seed": str(self.config.seed)}
        metadata = {**facts, **self.metadata}
        save_adapter(self.network, self.out / ADAPTER_FILE, DTYPES[self.config.save_dtype], metadata)
        self.parts.save(self.out / STATE_FILE, step)
        plot_loss(self.metrics.records, self.out / PLOT_FILE, title=f"{self.task.name}: loss over {step} steps")

    def _result(self, step: int, interrupted: bool, seconds: float) -> TrainResult:
        losses = [record["loss"] for record in self.metrics.records if "loss" in record]
        out = self.out
        return TrainResult(
            step, interrupted, losses, self.evals, seconds, out / ADAPTER_FILE, out / METRICS_FILE, out / PLOT_FILE,
            self.samples,
        )  # fmt: skip


def config_seed(seed: int, process: int, step: int) -> int:
    """A seed of its own for each process and starting step."""
    return (seed + 7919 * process + 104_729 * step) % 2**32


class _Stop:
    """Truthy once a signal asked for the end."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def _stop_requests() -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM asks for an end after the step; a second SIGINT ends at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}

    def ask(kind: int, frame: Any) -> None:
        stop.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for kind in before:
        signal.signal(kind, ask)
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
