"""The demo: a small digit denoiser with one class left out, and what teaches it that class."""

from __future__ import annotations
