"""Suites that walk the registry: every algorithm on every layer kind with every option it declares."""
