"""Adapted layers: a delta on a base, planned per call."""
