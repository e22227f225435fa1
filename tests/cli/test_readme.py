"""What README and the page of ablations show can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ABLATIONS = (ROOT / "docs" / "ablations.md").read_text(encoding="utf-8")
SHOWN = r"(?:^    |/|`)sentinel-bench ([^#`\n]+)"
COMMANDS = [c for text in (README, ABLATIONS) for c in re.findall(SHOWN, text, re.MULTILINE)]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_shown_is_understood(
    command: str, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are only planned, and what needs the results of runs may say that there are none."""
    Path("corpus.txt").write_text("some words\n\n" * 500)
    Path("my.yaml").write_text("attack: delay\ndefense: sentinel\n")
    words = shlex.split(command)
    if words[0] == "calibrate":
        words.append("--help")
    planned = words[0] in ("run", "sweep", "suite", "reproduce") and "--dry-run" not in words
    done = call(*words, *(["--dry-run"] if planned else []))
    if words[0] in ("score", "leaderboard", "report", "compare"):
        assert done.status in (1, 2)
        assert done.err.startswith("error: ")
        assert len(done.err.splitlines()) == 1
    else:
        assert done.status == 0
        shows_progress = words[0] in ("validate", "suite")
        told = done.err.splitlines() if not shows_progress else []
        assert all(line.startswith("note: ") for line in told)


def test_the_two_commands_of_readme_use_the_constraints_and_name_what_ci_runs() -> None:
    lines = re.findall(r"^    (python3 -m venv .*)$", README, re.MULTILINE)
    assert len(lines) == 2
    assert all("pip install -c constraints.txt -e" in line for line in lines)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for part in lines[1].split(" && "):
        assert part in ci
