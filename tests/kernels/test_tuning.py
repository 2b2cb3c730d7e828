"""Tuning: what decides, what is timed and when, and a store that many processes share."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltafuse.backends.triton import interpreted, store, tuning
from deltafuse.backends.triton.store import Store, card_key
from deltafuse.backends.triton.tuning import Tunable
from deltafuse.core import policy
from deltafuse.core.errors import OptionError
from deltafuse.core.messages import forget_said

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Block:
    size: int
    warps: int = 4


class Toy:
    """A launch function that counts, and a clock that says larger blocks are faster."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []
        self.timed: list[int] = []
        self.seen: list[Tensor] = []
        self.broken: set[int] = set()
        self.item = Tunable("toy", 1, Block, lambda key: Block(16), lambda key: [Block(16), Block(32), Block(64)])

    def launch(self, x: Tensor, scale: float, config: Block | None = None) -> Tensor:
        key = (x.device, x.dtype, x.shape[0].bit_length(), x.shape[1])
        config = config or self.item.config_for(key, self.launch, (x, scale))
        if config.size in self.broken:
            raise RuntimeError("out of resources")
        self.launched.append((config.size, x.shape[0]))
        self.seen.append(x)
        x.mul_(scale)  # what a careless kernel would do to its input
        return x

    def clock(self, calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device) -> list[list[float]]:
        times = []
        for call in calls:
            call()
            size = self.launched[-1][0]
            self.timed.append(size)
            times.append([1.0 / size] * rounds)
        return times


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Toy]:
    for name in policy.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "TABLES", tmp_path / "shipped")
    found = Toy()
    monkeypatch.setattr(tuning, "measure", found.clock)
    tuning.forget()
    forget_said()
    yield found
    tuning._tunables.pop("toy", None)
    tuning.forget()
    forget_said()


def rows(count: int) -> Tensor:
    return torch.ones(count, 8)


def written(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "tune" / "cpu.json").read_text())
    return found


def entry(size: int, version: int = 1, triton: str | None = None) -> dict[str, Any]:
    stamp = tuning.triton_version() if triton is None else triton
    return {"config": {"size": size, "warps": 4}, "version": version, "triton": stamp}


# -- who decides


@pytest.mark.parametrize("mode", [None, "table", "off", "OFF", ""])
def test_nothing_is_timed_unless_asked_for(
    toy: Toy, mode: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if mode is not None:
        monkeypatch.setenv("DELTAFUSE_TUNE", mode)
    toy.launch(rows(5), 1.0)
    assert toy.launched == [(16, 5)]
    assert not toy.timed
    assert not (tmp_path / "tune").exists()


def test_unknown_modes_come_with_the_nearest(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFUSE_TUNE", "lzay")
    with pytest.raises(OptionError, match=r"'lzay' in DELTAFUSE_TUNE. Did you mean 'lazy'\?"):
        toy.launch(rows(5), 1.0)


def test_the_users_result_comes_before_the_shipped_table(toy: Toy, tmp_path: Path) -> None:
    key = "float32,3,8"
    Store(tmp_path / "shipped" / "cpu.json", "cpu").add("toy", key, entry(32))
    toy.launch(rows(5), 1.0)
    tuning.forget()
    Store(tmp_path / "tune" / "cpu.json", "cpu").add("toy", key, entry(64))
    toy.launch(rows(5), 1.0)
    assert [size for size, _ in toy.launched] == [32, 64]


def test_off_reads_no_table(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / "tune" / "cpu.json", "cpu").add("toy", "float32,3,8", entry(64))
    monkeypatch.setenv("DELTAFUSE_TUNE", "off")
    toy.launch(rows(5), 1.0)
    assert toy.launched == [(16, 5)]


@pytest.mark.parametrize("stamp", [{"version": 2}, {"triton": "0.1"}])
def test_results_of_other_versions_are_ignored_and_kept(toy: Toy, tmp_path: Path, stamp: dict[str, Any]) -> None:
    held = Store(tmp_path / "tune" / "cpu.json", "cpu")
    held.add("toy", "float32,3,8", {**entry(64), **stamp})
    toy.launch(rows(5), 1.0)
    assert toy.launched == [(16, 5)]
    held.add("other", "x", entry(1))
    assert set(written(tmp_path)["entries"]) == {"toy", "other"}


def test_a_shipped_table_serves_every_triton(toy: Toy, tmp_path: Path) -> None:
    Store(tmp_path / "shipped" / "cpu.json", "cpu").add("toy", "float32,3,8", entry(32, triton="0.1"))
    toy.launch(rows(5), 1.0)
    assert toy.launched == [(32, 5)]


def test_an_entry_with_strange_fields_is_ignored(toy: Toy, tmp_path: Path) -> None:
    strange = {**entry(64), "config": {"size": 64, "colour": 3}}
    Store(tmp_path / "tune" / "cpu.json", "cpu").add("toy", "float32,3,8", strange)
    toy.launch(rows(5), 1.0)
    assert toy.launched == [(16, 5)]


# -- lazy


@pytest.fixture
def lazy(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setenv("DELTAFUSE_TUNE", "lazy")
    return toy


def test_a_bucket_is_tuned_once_at_its_middle(lazy: Toy, tmp_path: Path) -> None:
    for count in (5, 4, 7, 5):
        lazy.launch(rows(count), 1.0)
    assert [size for size, _ in lazy.launched[-4:]] == [64, 64, 64, 64]
    assert {count for _, count in lazy.launched[:-4]} == {6}
    timed = len(lazy.timed)
    lazy.launch(rows(9), 1.0)  # the next bucket
    assert len(lazy.timed) > timed
    found = written(tmp_path)["entries"]["toy"]
    assert {key: item["config"]["size"] for key, item in found.items()} == {"float32,3,8": 64, "float32,4,8": 64}
    assert found["float32,3,8"]["version"] == 1
    assert found["float32,3,8"]["triton"] == tuning.triton_version()


def test_a_new_process_finds_the_result(lazy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy.launch(rows(5), 1.0)
    timed = len(lazy.timed)
    tuning.forget()
    monkeypatch.setenv("DELTAFUSE_TUNE", "table")
    lazy.launch(rows(5), 1.0)
    assert lazy.launched[-1] == (64, 5)
    assert len(lazy.timed) == timed


def test_live_tensors_are_only_read(lazy: Toy) -> None:
    x = rows(5)
    version = x._version
    lazy.launch(x, 2.0)
    assert torch.equal(x, 2 * rows(5))  # changed by its own launch, once
    assert x._version == version + 1
    assert sum(seen is x for seen in lazy.seen) == 1
    assert all(seen.data_ptr() != x.data_ptr() for seen in lazy.seen[:-1])


def test_random_states_stay(lazy: Toy) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    lazy.launch(rows(5), 1.0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_configuration_that_fails_is_left_out(lazy: Toy) -> None:
    lazy.broken = {64}
    lazy.launch(rows(5), 1.0)
    assert lazy.launched[-1] == (32, 5)


def test_without_a_working_default_nothing_is_chosen(lazy: Toy, tmp_path: Path) -> None:
    lazy.broken = {16, 32, 64}
    with pytest.raises(RuntimeError, match="out of resources"):
        lazy.launch(rows(5), 1.0)
    assert not (tmp_path / "tune").exists()


def test_a_close_race_keeps_the_default(lazy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device) -> list[list[float]]:
        return [[1.0 - 0.005 * index] * rounds for index in range(len(calls))]

    monkeypatch.setattr(tuning, "measure", clock)
    lazy.launch(rows(5), 1.0)
    assert lazy.launched[-1] == (16, 5)


def test_no_rows_no_trial(lazy: Toy) -> None:
    lazy.launch(rows(0), 1.0)
    assert lazy.launched == [(16, 0)]


def test_deterministic_mode_times_nothing(lazy: Toy) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        lazy.launch(rows(5), 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not lazy.timed
    lazy.launch(rows(5), 1.0)
    assert lazy.timed


def test_no_memory_for_copies_leaves_the_heuristic(lazy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(tuning, "stretched", full)
    with caplog.at_level(logging.WARNING, "deltafuse"):
        lazy.launch(rows(5), 1.0)
        lazy.launch(rows(5), 1.0)
    assert [size for size, _ in lazy.launched] == [16, 16]
    assert sum("no memory for scratch copies" in line for line in caplog.messages) == 1


def test_one_line_says_what_happens(lazy: Toy, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "deltafuse"):
        for _ in range(3):
            lazy.launch(rows(5), 1.0)
    assert [line for line in caplog.messages if line.startswith("tuning toy [float32,3,8]")] == caplog.messages


def test_an_open_bar_shows_it(lazy: Toy, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from tqdm import tqdm

    shown: list[str] = []
    monkeypatch.setattr(tqdm, "set_postfix_str", lambda self, text, refresh=True: shown.append((self.desc, text)))
    with (
        open(os.devnull, "w") as nowhere,
        caplog.at_level(logging.WARNING, "deltafuse"),
        tqdm(total=3, desc="outer", file=nowhere),
        tqdm(total=3, desc="inner", file=nowhere, postfix="mine") as bar,
    ):
        lazy.launch(rows(5), 1.0)
        assert bar.postfix == "mine"
    assert shown == [("inner", "tuning toy [float32,3,8]")]
    assert not caplog.messages


def test_forced_tuning_reports_and_can_repeat(toy: Toy) -> None:
    outcomes: list[tuning.Outcome] = []
    for again in (False, False, True):
        with tuning.forced("lazy", again, outcomes.append):
            toy.launch(rows(5), 1.0)
    assert len(outcomes) == 2
    assert outcomes[0].config == Block(64)
    assert outcomes[0].default == Block(16)
    assert outcomes[0].default_seconds == 4 * outcomes[0].seconds


def test_scratch_keeps_axis_order_and_values() -> None:
    live = torch.arange(12.0).view(3, 4).t()  # (4, 3), rows are the fast axis
    made = tuning.stretched(live, 6)
    assert made.shape == (6, 3)
    assert made.stride() == (1, 6)
    assert torch.equal(made[:4], live)
    assert torch.equal(made[4:], live[:2])
    expanded = tuning.stretched(torch.ones(1, 4).expand(5, 4), 2)
    assert expanded.shape == (2, 4)
    assert expanded.is_contiguous() or expanded.t().is_contiguous()


# -- the store


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia_h100"),
        ("NVIDIA A100-SXM4-40GB", "nvidia_a100"),
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
        ("AMD Instinct MI300X", "amd_instinct_mi300x"),
        ("///", "unknown"),
    ],
)
def test_card_names(name: str, key: str) -> None:
    assert card_key(name) == key


BROKEN = ["", "{", "[]", '{"entries": 3}', '{"entries": {"toy": 3}}', "\x00\x00", '{"card": "x"}']


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_set_aside_once(tmp_path: Path, text: str, caplog: Any) -> None:
    forget_said()
    path = tmp_path / "cpu.json"
    path.write_text(text)
    held = Store(path, "cpu")
    with caplog.at_level(logging.WARNING, "deltafuse"):
        assert held.entries() == {}
        assert held.add("toy", "k", entry(32))
    assert len([line for line in caplog.messages if "cannot be read" in line]) == 1
    assert Store(path, "cpu").find("toy", "k", {"version": 1}) is not None
    aside = [item for item in tmp_path.iterdir() if ".broken-" in item.name]
    assert [item.read_text() for item in aside] == [text]


def test_an_unwritable_place_is_one_line(tmp_path: Path, caplog: Any) -> None:
    forget_said()
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "deltafuse"):
        assert not Store(tmp_path / "file" / "cpu.json", "cpu").add("toy", "k", entry(1))
    assert any("are not kept" in line for line in caplog.messages)


def _write(path: str, worker: int, count: int, own_lock: bool) -> None:
    if own_lock:
        store.available = lambda *args, **kwargs: False  # type: ignore[assignment]
    for index in range(count):
        assert Store(Path(path), "cpu").add("toy", f"{worker}-{index}", entry(worker))


@pytest.mark.parametrize("own_lock", [False, True], ids=["filelock", "created file"])
def test_concurrent_writers_lose_nothing(tmp_path: Path, own_lock: bool) -> None:
    if not own_lock:
        pytest.importorskip("filelock")
    path, workers, count = tmp_path / "cpu.json", 4, 12
    context = multiprocessing.get_context("fork" if sys.platform != "win32" else "spawn")
    started = [context.Process(target=_write, args=(str(path), worker, count, own_lock)) for worker in range(workers)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0] * workers
    assert len(Store(path, "cpu").entries()["toy"]) == workers * count
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".") or item.suffix == ".held"]


def test_a_lock_left_behind_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "available", lambda *args, **kwargs: False)
    path = tmp_path / "cpu.json"
    left = tmp_path / "cpu.json.held"
    left.write_text("")
    os.utime(left, (0, 0))
    assert Store(path, "cpu").add("toy", "k", entry(1))
    assert not left.exists()


def test_a_held_lock_is_waited_for_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    forget_said()
    monkeypatch.setattr(store, "available", lambda *args, **kwargs: False)
    monkeypatch.setattr(store, "LOCK_TIMEOUT", 0.05)
    (tmp_path / "cpu.json.held").write_text("")
    with caplog.at_level(logging.WARNING, "deltafuse"):
        assert not Store(tmp_path / "cpu.json", "cpu").add("toy", "k", entry(1))
    assert any("held by another process" in line for line in caplog.messages)


# -- shipped tables and real kernels


@pytest.mark.parametrize("path", sorted(Path(tuning.__file__).parent.glob("tables/*.json")), ids=lambda path: path.stem)
def test_shipped_tables_fit_the_kernels(path: Path) -> None:
    pytest.importorskip("triton")
    from deltafuse.backends import backends
    from deltafuse.backends.triton import OPERATIONS

    for name in OPERATIONS:
        backends()["triton"].implementation(name)
    held = json.loads(path.read_text())
    assert card_key(held["card"]) == path.stem
    for kernel, items in held["entries"].items():
        item = tuning.tunables()[kernel]
        for found in items.values():
            assert found["version"] == item.version
            item.config(**found["config"])


@pytest.mark.skipif(not interpreted() and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter")
def test_every_kernel_of_the_low_rank_layer_is_tuned(toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Candidates of real kernels run on scratch copies, and the results are still right."""
    pytest.importorskip("triton")
    from deltafuse.backends import backends
    from deltafuse.primitives import get_primitive
    from deltafuse.primitives.examples import Draw, Sizes, examples, limit, relative_error, run, widened

    def clock(calls: Sequence[Callable[[], Any]], rounds: int, device: torch.device) -> list[list[float]]:
        return [[1.0 / (1 + index)] * rounds for index in range(len(calls))]  # the last candidate always wins

    monkeypatch.setattr(tuning, "measure", clock)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    function = backends()["triton"].implementation("lowrank_linear")
    case = next(iter(examples("lowrank_linear")))
    args = case.build(Sizes(lead=(1, 20), inner=48, out=32, rank=4), Draw(torch.float32, device, seed=1))
    outcomes: list[tuning.Outcome] = []
    with tuning.forced("lazy", False, outcomes.append):
        found = run(function, args)
    assert outcomes
    assert len({item.kernel for item in outcomes}) == len(outcomes)
    reference = get_primitive("lowrank_linear").reference
    exact, eager = run(reference, widened(args)), run(reference, args)
    for mine, wanted, theirs in zip(found, exact, eager, strict=True):
        assert relative_error(mine, wanted) <= limit(relative_error(theirs, wanted), torch.float32)
