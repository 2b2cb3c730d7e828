"""Give the name ``lycoris`` to the package under test while this folder is collected and while its tests run."""

from __future__ import annotations

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
def _one_thread():
    """The layers here are tiny; a thread pool costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20240607)


@pytest.fixture
def target() -> str:
    return TARGET
