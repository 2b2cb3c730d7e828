"""What an adapter sits on."""

from .dense import Base, ForeignBase, ScaledFp8Base, base_for, is_plain, is_scaled_fp8

__all__ = ["Base", "ForeignBase", "ScaledFp8Base", "base_for", "is_plain", "is_scaled_fp8"]
