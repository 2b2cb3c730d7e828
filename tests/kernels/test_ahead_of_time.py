"""Kernels compiled for sm_80 and sm_90 without a GPU: everything compiles, fits, and no product spills registers.

One subprocess, because Triton decides at import whether kernels are interpreted. The fast suite compiles each kernel
once per capability with most of its options on; ``-m slow`` compiles every launch of every example at every size, dtype
and configuration that ships.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from deltafuse.backends.triton.ahead import CAPABILITIES, SHARED_LIMIT

Reports = list[dict[str, Any]]
SOURCE = Path(__file__).parents[2] / "src"
NO_ASSEMBLER = 2


def compiled(folder: Path, *options: str) -> Reports:
    file = folder / "reports.json"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "deltafuse.backends.triton.ahead", "--json", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == NO_ASSEMBLER:
        pytest.skip(done.stderr.strip())
    assert file.exists(), done.stderr
    reports: Reports = json.loads(file.read_text())
    return reports


def check(reports: Reports) -> None:
    assert {report["capability"] for report in reports} == set(CAPABILITIES)
    wrong = [f"{line(report)}: {report['error']}" for report in reports if report["error"]]
    assert not wrong, "\n".join(["does not compile:", *wrong])
    wrong = [
        f"{line(report)}: {report['spills']} bytes" for report in reports if report["products"] and report["spills"]
    ]
    assert not wrong, "\n".join(["spills:", *wrong])
    wrong = [line(report) for report in reports if report["shared"] > SHARED_LIMIT[report["capability"]]]
    assert not wrong, "\n".join(["wants more shared memory than there is:", *wrong])


def line(report: dict[str, Any]) -> str:
    return f"sm_{report['capability']} {report['kernel']} [{report['config']}] in {report['where']}"


def test_each_kernel_compiles_without_spills(tmp_path: Path) -> None:
    check(compiled(tmp_path, "--quick"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_launch_compiles_without_spills(tmp_path: Path) -> None:
    check(compiled(tmp_path))
