"""`suite`: all cells of a track; what is reused, what fails, shards, and kills at any moment."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import registry
from sentinel_bench.record import find_finished, find_runs, read_config, read_events, read_result

Call = Callable[..., Any]
NO_CLOCK = ("time", "seconds", "tokens_per_second")
KILLS = 20
LETHAL = '''"""Plugins that fail in a process of its own."""
import os, signal, time
from sentinel_bench.api import Attack, NoParams

class Raise(Attack[NoParams]):
    name = "raise"
    goal = formula = source = "test"
    def signal(self, x, ctx):
        raise RuntimeError("on purpose")

class Kill(Attack[NoParams]):
    name = "kill"
    goal = formula = source = "test"
    def signal(self, x, ctx):
        os.kill(os.getpid(), signal.SIGKILL)

class Hang(Attack[NoParams]):
    name = "hang"
    goal = formula = source = "test"
    def signal(self, x, ctx):
        time.sleep(3600)
'''


@pytest.fixture
def small(text_file: Path) -> list[str]:
    """The options of a suite whose cells take a moment."""
    settings = {
        "data.path": text_file, "data.vocab_size": 260, "model.hidden_size": 16,
        "model.intermediate_size": 32, "train.steps": 12, "train.warmup_steps": 4,
        "train.batch_size": 1, "train.seq_len": 8, "train.eval_sequences": 8,
    }  # fmt: skip
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["smoke", "--out", "runs", *sets]


FEW = ["--attack", "none", "--attack", "zeros", "--defense", "averaging"]


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run, but for times, and what depends on them."""
    return [{k: v for k, v in row.items() if k not in NO_CLOCK} for row in read_events(folder)]


def finished(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return digest and events of each valid run; each must be there once."""
    folders = [f for f in find_runs(out) if read_result(f) is not None]
    keys = Counter(read_config(f)["digest"] for f in folders)
    assert set(keys.values()) <= {1}, keys
    found = find_finished(out)
    assert set(found) == set(keys)
    return {key: timeless(folder) for key, folder in found.items()}


def test_smoke_runs_every_plugin(call: Call, small: list[str]) -> None:
    done = call("suite", *small, "--no-unprotected", "--jobs", "2", "--json")
    assert done.status == 0, done.err
    cells = [row["cell"] for row in json.loads(done.out)]
    names = {(cell["attack"].split(":")[0], cell["defense"].split(":")[0]) for cell in cells}
    assert names >= {(attack, "cascade") for attack in registry.attacks.names()}
    assert names >= {
        ("zeros", defense) for defense in registry.defenses.names() if defense != "none"
    }
    table = call("suite", *small, "--no-unprotected").out
    assert re.search(r"^swap +cascade +\d+ / [+-]\d", table, re.MULTILINE), table


def test_all_cells_are_run_and_each_is_the_run_alone(call: Call, small: list[str]) -> None:
    modes = ["--mode", "activation", "--mode", "gradient", "--seeds", "0,1"]
    done = call("suite", *small, *FEW, *modes, "--jobs", "2")
    assert done.status == 0, done.err
    assert "[12/12]" in done.err
    assert len(finished(Path("runs"))) == 12
    for row in ("zeros", "zeros (gradient)", "none"):
        assert f"\n{row} " in done.out
    sets = small[small.index("--set") :]
    alone = call(
        "run", "--track", "smoke", *sets, "--attack", "zeros", "--mode", "gradient",
        "--defense", "averaging", "--seeds", "1", "--threads", "1", "--out", "alone",
    )  # fmt: skip
    assert alone.status == 0, alone.err
    own, all_of_them = finished(Path("alone")), finished(Path("runs"))
    assert len(own) == 3
    assert {key: all_of_them[key] for key in own} == own


def test_what_is_there_is_reused_and_what_differs_is_named(call: Call, small: list[str]) -> None:
    assert call("suite", *small, *FEW).status == 0
    before = find_runs(Path("runs"))
    again = call("suite", *small, *FEW, "--json")
    assert again.status == 0
    assert find_runs(Path("runs")) == before
    told = json.loads(again.out)
    assert [one["state"] for one in told] == ["reused"] * 4
    assert {one["folder"] for one in told} == {str(folder) for folder in before}
    other = call("suite", *small, *FEW, "--set", "train.lr=0.002", "--dry-run")
    assert "4 to run" in other.out
    assert "is not reused; differs in scenario.train.lr" in other.err


def test_a_dry_run_counts_and_estimates_and_runs_nothing(call: Call, small: list[str]) -> None:
    done = call("suite", *small, *FEW, "--dry-run", "--json", "--jobs", "3")
    assert done.status == 0, done.err
    data = json.loads(done.out)
    assert (data["cells"], data["reused"], data["to_run"]) == (4, 0, 4)
    assert data["by_protection"] == {"none": 2, "averaging": 2}
    assert data["warmups"] == 1
    assert data["seconds"] > 0
    assert data["estimate"].startswith("at least")
    assert not Path("runs").exists()
    assert call("suite", *small, *FEW, "--attack", "ones").status == 0
    text = call("suite", *small, *FEW, "--attack", "scaling", "--dry-run").out
    assert "cells: 6, 4 of them reused, 2 to run" in text
    assert "by the cells that are there" in text


def test_shards_are_merged_by_copying_their_folders(call: Call, small: list[str]) -> None:
    options = [*FEW, "--attack", "ones"]
    for k in (1, 2):
        shard = [*small, *options, "--shard", f"{k}/2", "--out", f"part{k}"]
        assert call("suite", *shard).status == 0
    for part in (Path("part1"), Path("part2")):
        for folder in find_runs(part):
            shutil.copytree(folder, Path("runs") / folder.name)
    whole = call("suite", *small, *options, "--json")
    assert [one["state"] for one in json.loads(whole.out)] == ["reused"] * 6


def test_a_cell_that_fails_stops_no_other_and_is_listed_with_its_reason(
    call: Call, small: list[str]
) -> None:
    Path("lethal.py").write_text(LETHAL)
    attacks = ["none", "lethal/raise", "lethal/kill", "lethal/hang", "zeros"]
    options = [word for name in attacks for word in ("--attack", name)]
    options += ["--defense", "averaging", "--plugin", "lethal.py", "--timeout", "10"]
    done = call("suite", *small, *options, "--jobs", "2")
    assert done.status == 1
    said = {
        "raise": "raised RuntimeError: on purpose",
        "kill": "its process was killed by signal 9",
        "hang": "no progress for 10 s (--timeout)",
    }
    assert "6 failed" in done.out
    for name, reason in said.items():
        for defense in ("none", "averaging"):
            (line,) = [x for x in done.out.splitlines() if f"lethal/{name} vs {defense}:" in x]
            assert reason in line
    outcomes = Counter(
        (read_config(f)["cell"]["attack"]["name"], read_result(f)["scores"]["outcome"] == "invalid")  # type: ignore[index]
        for f in find_runs(Path("runs"))
    )
    assert outcomes == {
        ("none", False): 2, ("zeros", False): 2, ("lethal/raise", True): 2,
        ("lethal/kill", True): 2, ("lethal/hang", True): 2,
    }  # fmt: skip
    # only what has failed, without what is new
    quick = [w.replace("lethal/hang", "lethal/raise") for w in options]
    again = call("suite", *small, *quick, "--attack", "ones", "--only-failed", "--dry-run")
    assert "cells: 5, 1 of them reused, 4 to run" in again.out


@pytest.mark.parametrize(
    "words, said",
    [
        (["nosuch"], "unknown track 'nosuch'"),
        (["smok"], "did you mean smoke?"),
        (["smoke", "--attack", "zeross"], "zeros"),
        (["smoke", "--defense", "sentinal"], "sentinel"),
        (["smoke", "--mode", "activations"], "did you mean activation?"),
        (["smoke", "--shard", "3/2"], "--shard '3/2': write K/N"),
        (["smoke", "--shard", "0/2"], "--shard '0/2': write K/N"),
        (["smoke", "--seeds", "x"], "--seeds 'x'"),
        (["smoke", "--set", "train.step=3"], "steps"),
        (["smoke", "--set", "nothing"], "is not KEY=VALUE"),
        (["smoke", "--set", "seeds.model=5"], "use --seeds"),
        (["smoke", "--set", "threat.mode=gradient"], "use --mode"),
    ],
)
def test_mistakes_are_told_in_one_line(call: Call, words: list[str], said: str) -> None:
    done = call("suite", *words)
    assert done.status == 2
    (line,) = done.err.strip().splitlines()
    assert said in line
    assert not Path("runs").exists()


def test_a_device_that_is_not_there_is_told_in_one_line(call: Call, small: list[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = call("suite", *small, *FEW, "--device", "cuda")
    assert done.status == 2
    (line,) = done.err.strip().splitlines()
    assert line.startswith("error: device cuda: torch sees no GPU here")
    assert find_runs(Path("runs")) == []


def test_weights_that_are_not_there_are_told_before_any_cell_is_run(
    call: Call, small: list[str]
) -> None:
    sets = ["--set", "model.pretrained=./nowhere", "--set", "data.tokenizer=./nowhere"]
    done = call("suite", *small, *FEW, *sets)
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "nowhere" in done.err
    assert "Traceback" not in done.err
    assert not Path("runs").exists()


def start(arguments: list[str], folder: Path, mark: str) -> subprocess.Popen[str]:
    """Start a suite in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "sentinel_bench", "suite", *arguments],
        cwd=folder, env={**os.environ, "SUITE_TEST": mark}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def living(mark: str) -> list[int]:
    """Return the processes of a suite that are still there, and not only waiting to be reaped."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"SUITE_TEST={mark}".encode() in (path / "environ").read_bytes()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marked and state not in "ZX":
            found.append(int(path.name))
    return found


def wait_for(true: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_killed_at_any_moment_it_goes_on_and_every_cell_is_there_once_as_if_undisturbed(
    small: list[str], tmp_path: Path
) -> None:
    attacks = ["none", "zeros", "ones", "scaling", "delay:steps=2", "random-value", "swap"]
    options = [*small, *(word for name in attacks for word in ("--attack", name))]
    options += ["--defense", "averaging", "--defense", "sentinel", "--jobs", "2"]
    options += ["--mode", "activation", "--mode", "gradient"]
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    quiet.mkdir()
    killed.mkdir()
    undisturbed = start(options, quiet, "quiet")
    said = undisturbed.communicate(timeout=300)[0]
    assert undisturbed.returncode == 0, said
    expected = finished(quiet / "runs")
    assert len(expected) == 39
    dice = random.Random(6)
    runs = killed / "runs"
    for number in range(KILLS):
        before = len(find_runs(runs))
        process = start(options, killed, f"killed{number}")
        wait_for(lambda n=before, p=process: len(find_runs(runs)) > n or p.poll() is not None)  # type: ignore[misc]
        time.sleep(dice.uniform(0, 0.5))
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.wait()
        wait_for(lambda n=number: not living(f"killed{n}"))  # type: ignore[misc]
    assert len(finished(runs)) < len(expected)  # each kill has hit a suite at work
    last = start(options, killed, "last")
    said = last.communicate(timeout=300)[0]
    assert last.returncode == 0, said
    assert finished(runs) == expected


def test_ctrl_c_ends_all_jobs_and_the_next_call_goes_on(small: list[str], tmp_path: Path) -> None:
    longer = [word.replace("train.steps=12", "train.steps=200") for word in small]
    options = [*longer, *FEW, "--jobs", "2"]
    process = start(options, tmp_path, "interrupt")
    runs = tmp_path / "runs"
    wait_for(lambda: find_finished(runs) and len(find_runs(runs)) > len(find_finished(runs)))
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not living("interrupt")
    kept = find_finished(runs)
    again = start(options, tmp_path, "again")
    said = again.communicate(timeout=300)[0]
    assert again.returncode == 0, said
    assert set(kept) < set(find_finished(runs))
    assert len(find_finished(runs)) == 4
    records = [read_result(folder) for folder in find_runs(runs)]
    assert None not in records  # the cells that were running say that they were interrupted
