"""Settings every suite shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "deltafuse", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("deltafuse")
