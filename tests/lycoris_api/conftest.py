"""Give the name ``lycoris`` to the package under test while this folder is collected and while its tests run."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from .target import TARGET, lycoris_name


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    with lycoris_name():
        return (yield)


@pytest.fixture(autouse=True)
def _lycoris_is_the_target():
    with lycoris_name():
        yield


@pytest.fixture(autouse=True, scope="session")
def _light_process():
    """The layers are tiny: a thread pool and collections over all imported code would cost more than the tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20240607)
    random.seed(7)


@pytest.fixture
def target() -> str:
    return TARGET
