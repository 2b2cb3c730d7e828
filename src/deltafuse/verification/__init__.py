"""Checks every backend's primitives against float64, outside any test suite: what ``deltafuse verify`` runs."""

from .sweep import Plan, Result, verify

__all__ = ["Plan", "Result", "verify"]
