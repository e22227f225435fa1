"""A newcomer's way with the command line alone: from nothing to an entry that can be submitted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

LIMIT = 300.0  # seconds of a step; far more than any takes
PLUGIN = "soft-flip/src/soft_flip.py"
ABOUT = "--what 'half of the mean' --who 'A. Newcomer' --contact a@b.org --paper none --licence MIT"

Step = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Step:
    """Return a function that runs a command in a fresh folder, and says how long it took."""
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.getenv("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"}

    def run(command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        words = shlex.split(command)
        program = "sentinel_bench" if words[0] == "sentinel-bench" else words[0]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", program, *words[1:]],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
        with capsys.disabled():
            sys.stdout.write(f"\n{time.monotonic() - started:6.1f} s  {command[:90]}")
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.mark.skipif(not (find_spec("pip") and find_spec("setuptools")), reason="no pip here")
def test_from_nothing_to_an_entry_without_findings(step: Step, tmp_path: Path) -> None:
    made = step("sentinel-bench new attack soft-flip")
    assert f"next: change {PLUGIN}, then" in made.stdout
    change_a_line(tmp_path / PLUGIN)

    command = f"sentinel-bench validate soft_flip/soft-flip --plugin {PLUGIN}"
    assert command in made.stdout
    assert "17 passed\n" in step(command).stdout

    command = f"sentinel-bench run --track smoke --attack soft_flip/soft-flip --plugin {PLUGIN}"
    assert command in made.stdout
    tried = step(f"{command} --steps 12 --warmup 6 --threads 1 --out tried")
    assert "soft_flip/soft-flip" in tried.stdout and "record: tried/" in tried.stdout

    pack = "sentinel-bench submit pack {} --track smoke --name soft --kind attack"
    refused = step(pack.format("tried"), status=1)
    assert "train.steps is 12, and 60 in the track" in refused.stdout
    assert refused.stderr.endswith("nothing was written\n")

    assert "pip install -e soft-flip" in made.stdout
    step("pip install -q --no-deps --no-index --no-build-isolation --target site ./soft-flip")
    assert "soft-flip/soft-flip" in step("sentinel-bench list attacks").stdout
    step("sentinel-bench run --track smoke --attack soft-flip/soft-flip --threads 1 --out runs")

    packed = step(f"{pack.format('runs')} {ABOUT}")
    check = "sentinel-bench submit check leaderboards/smoke/soft"
    assert packed.stdout == "" and f"next: {check}" in packed.stderr
    assert step(check).stderr == "no findings; in 3 cells\n"
    board = step("sentinel-bench leaderboard build runs leaderboards --track smoke")
    assert "leaderboards/smoke/README.md" in board.stdout
    assert "soft-flip/soft-flip @ soft" in (tmp_path / "leaderboards/smoke/README.md").read_text()


def change_a_line(file: Path) -> None:
    text = file.read_text()
    line = "strength: float = Field(1.0, gt=0"
    assert text.count(line) == 1
    file.write_text(text.replace(line, "strength: float = Field(0.5, gt=0"))
