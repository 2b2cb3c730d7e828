"""A whole training job: checked before anything is written, then run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import DataError, OptionError
from ..core.optional import require
from . import checkpointing
from .adapter import build_network, check_texts
from .config import JobConfig, job_from_flat, job_to_flat
from .files import read_config, to_toml
from .loop import DTYPES, TrainResult, check_device, run
from .optimizers import make_optimizer
from .progress import Progress
from .state import ADAPTER_FILE, CONFIG_FILE, METRICS_FILE, PLOT_FILE, STATE_FILE, read_step, write_atomically
from .targets import LINEAR, LINEAR_AND_CONV
from .task import Task

OUT_FILES = (ADAPTER_FILE, STATE_FILE, CONFIG_FILE, METRICS_FILE, PLOT_FILE)
RESUME_MAY_CHANGE = frozenset(
    {"steps", "out", "device", "eval_every", "eval_batches", "save_every", "save_dtype", "tensorboard"}
)


@dataclass
class Prepared:
    """A job that passed every check: all that the loop needs."""

    job: JobConfig
    task: Task
    model: nn.Module
    network: Any
    resume: bool = False


def load_job(given: dict[str, Any], config_file: str | None, resume: bool) -> JobConfig:
    """Flags over the config file over (when resuming) the run's own config."""
    values: dict[str, Any] = {}
    if resume:
        out = given.get("out") or (read_config(config_file).get("out") if config_file else None)
        if not out:
            raise OptionError("option 'resume' needs --out: the directory of the run to continue.")
        values.update(read_config(Path(str(out)) / CONFIG_FILE))
    if config_file:
        values.update({key.replace("-", "_"): value for key, value in read_config(config_file).items()})
    return job_from_flat({**values, **given})


def prepare(job: JobConfig, *, resume: bool = False, overwrite: bool = False, write: bool = True) -> Prepared:
    """Check everything, load the model, attach the adapter. Writes nothing; raises a DeltaFuseError at the first fault.

    ``write=False`` (a dry run) leaves the out directory unchecked.
    """
    _check_packages(job)
    check_device(job.train)
    make_optimizer(job.train.optimizer, [torch.zeros(1)], job.train.lr, job.train.weight_decay)
    if not job.model:
        raise OptionError("option 'model' is missing: --model says what to train on.")
    if not job.data:
        raise DataError("no data given: --data takes files, directories or globs.")
    if write and first_process():
        check_out(job, resume, overwrite)
    check_texts(job.adapter)
    torch.manual_seed(job.train.seed)
    task, model = _LOADERS[job.task](job)
    checkpointing.check(model, job.train.gradient_checkpointing)
    torch.manual_seed(job.train.seed)
    network = build_network(model, job.adapter, LINEAR if job.task == "text" else LINEAR_AND_CONV)
    return Prepared(job, task, model, network, resume)


def execute(prepared: Prepared, ui: Progress) -> TrainResult:
    """Train. Files of an earlier run in the same directory are removed first, unless this run continues it."""
    job = prepared.job
    out = Path(job.out).expanduser()
    if first_process():
        _begin_out(job, out, prepared.resume)
    return run(
        prepared.task,
        prepared.model,
        prepared.network,
        job.train,
        out,
        ui,
        resume=prepared.resume,
        metadata={"ss_base_model": Path(job.model).name, "ss_task": job.task},
    )


def first_process() -> bool:
    """Whether this process writes: the only one, or the first of a launched group."""
    return os.environ.get("RANK", "0") == "0"


def _begin_out(job: JobConfig, out: Path, resume: bool) -> None:
    """Make the directory, clear an earlier run's files, leave the options there."""
    out.mkdir(parents=True, exist_ok=True)
    if not resume:
        for name in OUT_FILES:
            (out / name).unlink(missing_ok=True)
    text = to_toml(job_to_flat(job))
    write_atomically(out / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def check_out(job: JobConfig, resume: bool, overwrite: bool) -> None:
    """OptionError unless the out directory may be written: new, empty, overwritten on request, or a run to resume."""
    if not job.out:
        raise OptionError("option 'out' is missing: --out names the directory for the results.")
    out = Path(job.out).expanduser()
    if out.exists() and not out.is_dir():
        raise OptionError(f"option 'out' is '{job.out}', which is a file; it must be a directory.")
    if resume:
        _check_resume(job, out)
    elif out.is_dir() and any(out.iterdir()) and not overwrite:
        raise OptionError(
            f"out directory '{job.out}' is not empty: give --resume to continue the run there, --overwrite to replace "
            "its files, or another --out."
        )


def _check_resume(job: JobConfig, out: Path) -> None:
    """The run in ``out`` must be the same job, with steps left."""
    done = read_step(out / STATE_FILE)
    before = job_to_flat(job_from_flat(read_config(out / CONFIG_FILE)))
    now = job_to_flat(job)
    changed = [k for k in {**before, **now} if k not in RESUME_MAY_CHANGE and before.get(k) != now.get(k)]
    if changed:
        shown = ", ".join(f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in changed)
        raise OptionError(f"cannot resume '{out}' with changed options: {shown}.")
    if job.train.steps <= done:
        raise OptionError(f"'{out}' has already run {done} steps; give more than that with --steps.")


def _check_packages(job: JobConfig) -> None:
    """Every package the job will need, before the slow parts."""
    require("accelerate", extra="train", purpose="training")
    require("matplotlib", extra="train", purpose=PLOT_FILE)
    if job.task == "text":
        require("transformers", extra="train", purpose="--task text")
    else:
        require("diffusers", extra="train", purpose="--task image")
        require("PIL", extra="train", purpose="--task image")
    if job.train.tensorboard:
        require("tensorboard", extra="tensorboard", purpose="--tensorboard")


def _base_dtype(job: JobConfig) -> torch.dtype:
    """fp32, unless asked otherwise or half precision runs on a GPU anyway."""
    if job.base_dtype != "auto":
        return DTYPES[job.base_dtype]
    half = job.train.mixed_precision
    return DTYPES[half] if half != "no" and check_device(job.train) == "cuda" else torch.float32


def _load_text(job: JobConfig) -> tuple[Task, nn.Module]:
    from ..integrations.transformers import load_causal_lm, max_length
    from .text import find_files, make_text_task, read_documents

    for places in filter(None, (job.data, job.held_out_data)):
        for path in find_files(places):  # before the model, which takes longer
            read_documents(path)
    model, tokenizer = load_causal_lm(job.model, _base_dtype(job))
    task = make_text_task(
        tokenizer,
        job.data,
        seq_len=job.seq_len,
        held_out=job.held_out,
        held_out_data=job.held_out_data,
        max_len=max_length(model),
        seed=job.train.seed,
    )
    return task, model


def _load_image(job: JobConfig) -> tuple[Task, nn.Module]:
    from ..integrations.diffusers import load_denoiser
    from .image import make_image_task

    model, scheduler = load_denoiser(job.model, _base_dtype(job))
    task = make_image_task(
        model,
        scheduler,
        job.data,
        resolution=job.resolution,
        held_out=job.held_out,
        held_out_data=job.held_out_data,
        seed=job.train.seed,
    )
    return task, model


_LOADERS: dict[str, Callable[[JobConfig], tuple[Task, nn.Module]]] = {"text": _load_text, "image": _load_image}
