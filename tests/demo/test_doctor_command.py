"""``deltafuse doctor``: facts as a table and as JSON."""

from __future__ import annotations

import json

import pytest

from deltafuse import __version__, available_backends
from deltafuse.algorithms.registry import algorithms
from deltafuse.cli.app import run
from deltafuse.cli.doctor import collect
from deltafuse.cli.tables import plain_table


def test_json_holds_every_section(capsys):
    assert run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["deltafuse"] == __version__
    assert {row["name"] for row in facts["algorithms"]} == set(algorithms())
    assert {row["name"]: row["ok"] for row in facts["backends"]} == {
        name: verdict.ok for name, verdict in available_backends().items()
    }
    assert all(row["reason"] for row in facts["backends"])
    assert facts["devices"][0]["device"] == "cpu"
    assert {"scikit-learn", "transformers"} <= {row["name"] for row in facts["packages"]}


def test_tables_are_plain_when_piped(capsys):
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("Versions", "Optional packages", "Devices", "Backends", "Algorithms", "Environment", "lokr", "torch"):
        assert word in printed
    assert "\x1b" not in printed


def test_environment_is_shown_and_misspellings_are_named(monkeypatch):
    monkeypatch.setenv("DELTAFUSE_BACKEND", "torch")
    monkeypatch.setenv("DELTAFUSE_STRIKT", "1")
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "torch")
    facts = collect()
    assert set(facts["environment"]) >= {"DELTAFUSE_BACKEND", "DELTAFUSE_STRIKT", "LYCORIS_KERNEL_BACKEND"}
    advice = [line for line in facts["advice"] if "DELTAFUSE_STRIKT" in line]
    assert len(advice) == 1
    assert "DELTAFUSE_STRICT" in advice[0]


def test_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setattr("deltafuse.cli.doctor._installed", lambda name: None if name == "scikit-learn" else "1.0")
    facts = collect()
    assert facts["advice"][0] == "pip install 'deltafuse[demo]' brings scikit-learn"
    assert next(row for row in facts["packages"] if row["name"] == "scikit-learn")["version"] is None


@pytest.mark.parametrize("rows", [[], [("a", "b")], [("long name", "x"), ("s", "y")]])
def test_plain_table(rows):
    text = plain_table("Title", ("first", "second"), rows)
    assert text.startswith("Title")
    if not rows:
        assert "none" in text
    else:
        columns = {line.index(row[1]) for line, row in zip(text.splitlines()[2:], rows, strict=True)}
        assert len(columns) == 1
