"""Settings every suite shares."""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:  # Triton decides when it is first imported whether kernels run interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "deltafuse", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("deltafuse")
