"""What a form costs: the planner's only currency."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Work of one forward pass.

    flops: multiply-adds counted twice. bytes: memory traffic. launches: kernels started. saved: bytes kept for the
    backward pass beyond the layer's own input.
    """

    flops: float = 0.0
    bytes: float = 0.0
    launches: int = 0
    saved: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.launches + other.launches,
            self.saved + other.saved,
        )

    def seconds(self, flops_per_second: float, bytes_per_second: float, launch_seconds: float) -> float:
        """Roofline time: the slower of compute and traffic, plus the launches."""
        roofline = max(self.flops / flops_per_second, self.bytes / bytes_per_second)
        return roofline + self.launches * launch_seconds
