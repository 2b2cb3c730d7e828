"""Every test of this folder starts from the same random state and leaves no message remembered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deltafuse.core.messages import forget_said


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(1234)
    forget_said()
    yield
    forget_said()
