"""What needs a process of its own: signals, and what is imported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel_bench.record import find_runs, read_events, read_result

HEAVY = ("torch", "transformers", "datasets", "sklearn", "tokenizers", "scipy", "matplotlib")
COMMANDS = [
    ["--help"],
    ["run", "--help"],
    ["list", "attacks"],
    ["list", "defenses"],
    ["list", "aggregators"],
    ["list", "models"],
    ["list", "datasets"],
    ["list", "tracks"],
    ["list", "runs"],
    ["show", "defense", "sentinel"],
    ["show", "attack", "delay"],
    ["show", "aggregator", "krum"],
    ["run", "--attack", "zeros", "--defense", "sentinel", "--dry-run"],
    ["run", "--attack", "zeroes", "--defense", "sentinel"],
    ["leaderboard", "collect", "."],
    ["leaderboard", "build", "."],
    ["new", "attack", "soft-flip"],
    ["list", "attacks", "--plugin", "soft-flip/src/soft_flip.py"],
    ["show", "attack", "soft_flip/soft-flip", "--plugin", "soft-flip/src/soft_flip.py"],
    ["validate", "zeroes"],
]
SCRIPT = """
import json, sys
from sentinel_bench.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv = ["sentinel-bench", *command]
    try:
        main()
    except SystemExit:
        pass
    loaded = [m for m in json.loads(sys.stdin.readline()) if m in sys.modules]
    print("LOADED", json.dumps([command, loaded]), flush=True)
"""


def test_commands_that_train_nothing_import_nothing_heavy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)],
        input=f"{json.dumps(HEAVY)}\n" * len(COMMANDS),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert [json.loads(line.removeprefix("LOADED ")) for line in lines] == [
        [command, []] for command in COMMANDS
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_an_interrupted_run_ends_with_130_and_says_so_in_its_record(
    tiny: Callable[..., list[str]], tmp_path: Path
) -> None:
    options = tiny(train__steps=1_000_000, train__lr_decay_ratio=0.5)
    process = subprocess.Popen(
        [sys.executable, "-m", "sentinel_bench", "run", "--attack", "zeros", "--defense", "none",
         *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not _is_training(tmp_path / "runs"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    (folder,) = find_runs(tmp_path / "runs")
    assert read_events(folder)[-1]["status"] == "interrupted"
    result = read_result(folder)
    assert result is not None
    assert result["scores"]["reason"] == "interrupted: the run did not reach its last step"


def _is_training(runs: Path) -> bool:
    return any(len(events.read_bytes().splitlines()) > 20 for events in runs.glob("*/events.jsonl"))
