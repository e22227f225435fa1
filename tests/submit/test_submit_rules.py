"""The rules as they are written are those that are checked."""

from __future__ import annotations

import re
from pathlib import Path

from sentinel_bench.submit import rules

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "leaderboards" / "RULES.md").read_text(encoding="utf-8")


def test_the_ids_are_those_of_the_code() -> None:
    section = TEXT.partition("\n## Rules\n")[2]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == list(rules.RULES)


def test_every_id_is_used_and_no_other() -> None:
    package = ROOT / "sentinel_bench" / "submit"
    source = "\n".join(p.read_text() for p in package.glob("*.py") if p.name != "rules.py")
    for rule in rules.RULES:
        assert f'"{rule}"' in source, rule


def test_limits_and_tolerances_are_those_of_the_code() -> None:
    assert f"Protocol {rules.PROTOCOL}." in TEXT
    assert f"validation loss within {rules.LOSS_SAME}\n" in TEXT.replace(" |", "")
    assert f"F1 within {rules.F1_OTHER:g} points; validation loss within {rules.LOSS_OTHER}" in TEXT
    for number in (
        f"{rules.SMALL_FILE // 1024} KiB a file",
        f"{rules.YAML_FILE // 1024} KiB `entry.yaml`",
        f"{rules.EVENTS_FILE // 1024**2} MiB packed",
        f"{rules.EVENTS // 1024**2} MiB unpacked",
        f"{rules.ALL_EVENTS // 1024**2} MiB of all",
        f"{rules.ROWS:,} events of {rules.ROW // 1024} KiB",
        f"{rules.CELLS} cells",
        f"{rules.STRING:,} characters",
        f"{rules.DEPTH} levels",
    ):
        assert number in TEXT, number
