"""Here ``lycoris`` is the published package and ``deltafuse`` is deltafuse, whatever other tests made of the name."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from lycoris_api.switch import PublishedLycoris

published = PublishedLycoris()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    with published():
        return (yield)


@pytest.fixture(autouse=True)
def _lycoris_is_the_published_one():
    with published():
        yield


@pytest.fixture(autouse=True, scope="session")
def _light_process():
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
