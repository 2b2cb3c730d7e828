"""Measurements: single operations and whole training steps, checked before they are timed."""
