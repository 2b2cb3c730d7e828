"""The suite of tests/lycoris_api passes on the published lycoris-lora too, so it asks for nothing that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[1] / "lycoris_api"


@pytest.mark.timeout(900)
def test_api_suite_passes_on_lycoris_lora():
    environment = {**os.environ, "LYCORIS_API_TARGET": "peer", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(SUITE),
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=SUITE.parents[1], timeout=800)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert not re.search(r"\b\d+ (failed|errors?)\b", run.stdout)
