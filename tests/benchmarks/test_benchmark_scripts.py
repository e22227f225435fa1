"""The scripts for GPUs and several processes run to the end where there is no GPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sentinel_bench.cli import cli
from sentinel_bench.pipeline import crew
from sentinel_bench.pipeline.crew import LocalCrew

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TINY = ["model.hidden_size=16", "model.intermediate_size=32", "train.seq_len=8"]
SMALL = [*TINY, "grid.stages=4", "grid.replicas=2"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, text_file: Path) -> Callable[..., int]:
    """Return a function that calls the `main` of a script, on the tiny corpus."""

    def run(script: Any, *options: str) -> int:
        corpus = ["--set", f"data.path={text_file}", "--set", "data.vocab_size=260"]
        monkeypatch.setattr(sys, "argv", ["script", *options, *corpus])
        code: int = script.main()
        return code

    return run


def sets(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def test_bare_pipelining_and_ours_train_the_same_model_side_by_side(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipeline

    monkeypatch.setattr(crew, "PRELOAD", [*crew.PRELOAD, "pytest"])
    monkeypatch.setattr(pipeline, "WARMUP", 2)
    options = ["--processes", "2", "--rounds", "2", "--steps", "1", "--json"]
    assert call(pipeline, *options, *sets(SMALL)) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    bare, none, sentinel = result["variants"]
    assert [bare["variant"], none["variant"]] == ["bare", "none"]
    assert sentinel["variant"].startswith("sentinel")
    assert none["loss"] == pytest.approx(bare["loss"], rel=1e-5)
    assert bare["over_bare"] == bare["processor_over_bare"] == [1.0, 1.0, 1.0]
    for row in (bare, none, sentinel):
        assert row["tokens_per_second"] > 0
        assert row["over_bare"] == sorted(row["over_bare"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "1"], "numbers from 2 on"),
        (["--processes", "2;4"], "numbers from 2 on"),
        (["--processes", "16"], "16 processes"),
        (["--defense", "sentinal"], "sentinal"),
        (["--defense", "redundant-block"], "one process"),
        (["--order", "1f1b", "--processes", "8"], "microbatches"),
        (["--set", "train.stepz=1"], "stepz"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    call: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    import pipeline

    monkeypatch.setattr(LocalCrew, "__init__", lambda *_, **__: pytest.fail("started"))
    assert call(pipeline, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_the_script_for_one_gpu_runs_to_the_end_without_one(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import gpu

    file = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--tiny", "--steps", "2", "--json", str(file)]
    assert call(gpu, *options, *sets([*TINY, "train.warmup_steps=2"])) == 0
    found = json.loads(file.read_text())
    assert found["failed"] == found["skipped"] == []
    cells = {(row["cell"], row["precision"]) for row in found["parity"]}
    names = ["zeros-vs-none", "zeros-vs-sentinel", "zeros-vs-cascade"]
    assert cells == {(name, p) for name in names for p in ("fp32", "bf16")}
    guarded = [row for row in found["parity"] if row["cell"] != "zeros-vs-none"]
    assert all(row["bans"] for row in guarded)  # there is something to agree on
    assert {row["precision"] for row in found["parity"] if row["worst_difference"]} == {"bf16"}
    assert [row["variant"] for row in found["speed"]] == gpu.VARIANTS
    out = capsys.readouterr().out
    assert all(name in out for name in (*names, *gpu.VARIANTS))


def test_without_time_all_is_left_out_and_said(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import gpu

    options = ["--device", "cpu", "--tiny", "--budget=-1", "--json", str(tmp_path / "gpu.json")]
    assert call(gpu, *options) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["parity"], found["speed"]) == ([], [])
    assert len(found["skipped"]) == 3 + len(gpu.VARIANTS)
    assert capsys.readouterr().out.count("left out: ") == len(found["skipped"])


def test_what_fails_is_said_and_does_not_stop_the_rest(
    call: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import gpu

    monkeypatch.setattr(gpu, "CELLS", [("zeros", "none:no=1"), ("zeros", "none")])
    monkeypatch.setattr(gpu, "VARIANTS", ["no-such-defense", "none"])
    options = ["--device", "cpu", "--tiny", "--steps", "1", "--json", str(tmp_path / "gpu.json")]
    assert call(gpu, *options, *sets(TINY)) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["variant"] for row in found["speed"]] == ["none"]
    assert found["failed"][-1].startswith("no-such-defense: ConfigError: ")
    assert "FAILED: no-such-defense" in capsys.readouterr().out


def test_waits_are_counted_by_place() -> None:
    import gpu

    with gpu.synchronisations("cpu") as places:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((place, count),) = places.items()
    assert count == 3
    assert place.startswith("tests/benchmarks/test_benchmark_scripts.py:")


@pytest.mark.parametrize(
    ("losses", "bans", "precision", "agrees"),
    [
        ([2.0, 1.0], [[5, 1, 0]], "fp32", True),
        ([2.0, 1.0009], [[5, 1, 0]], "fp32", True),
        ([2.0, 1.002], [[5, 1, 0]], "fp32", False),
        ([2.0, math.nan], [[5, 1, 0]], "fp32", False),
        ([2.0, 1.0], [[6, 1, 0]], "fp32", False),
        ([2.0], [[5, 1, 0]], "fp32", False),
        ([2.0, 9.0], [], "bf16", True),
    ],
)
def test_another_ban_or_loss_in_fp32_is_no_parity(
    losses: list[float], bans: list[list[int]], precision: str, agrees: bool
) -> None:
    import gpu
    import gpus

    base, other = gpu.Rows([2.0, 1.0], [[5, 1, 0]]), gpu.Rows(losses, bans)
    row = gpu.compared("cell", "cuda", precision, base, other)
    assert gpu.agrees(row) == agrees
    if precision == "fp32":
        one, two = ({"losses": r.losses, "bans": r.bans} for r in (base, other))
        wrong = gpus.show_parity({gpus.ALONE: {"cell": one}, "2 x 1": {"cell": two}})
        assert wrong == ([] if agrees else ["cell: 2 x 1 differs from 1 process"])


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("part", ["PARITY", "SPEED"])
@pytest.mark.parametrize(("processes", "groups"), [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2)])
def test_the_runs_for_several_gpus_are_valid(
    part: str, tiny: bool, processes: int, groups: int
) -> None:
    import gpus

    options = [*getattr(gpus, part), *(gpus.TINY if tiny else []), *gpus.DEFENSES]
    spread = ["--processes", str(processes), "--replica-groups", str(groups)]
    done = CliRunner().invoke(cli, ["run", *options, *spread, "--device", "cuda", "--dry-run"])
    assert done.exit_code == 0, done.output


def test_several_gpus_run_under_torchrun_and_in_two_groups_if_they_are_even() -> None:
    import gpus

    assert [*gpus.placements(3)] == ["1 process", "3 x 1"]
    assert [*gpus.placements(4)] == ["1 process", "4 x 1", "2 x 2 groups"]
    assert gpus.placements(4)["2 x 2 groups"][-2:] == ["--replica-groups", "2"]


def test_a_command_that_fails_hangs_or_says_nothing_does_not_stop_the_rest() -> None:
    import gpus

    course = gpus.Course(30)
    assert course.run("fine", ["-c", "print('[1]')"]) == [1]
    assert course.run("fails", ["-c", "import sys; sys.exit('no such thing')"]) is None
    assert course.run("silent", ["-c", "pass"]) is None
    assert course.failed == [
        "fails: exit code 1: no such thing",
        "silent: exit code 0: it says nothing",
    ]
    course._end = time.monotonic() + 0.5
    course._longest = 0.0
    assert course.run("hangs", ["-c", "import time; time.sleep(60)"]) is None
    assert course.run("late", ["-c", "print('[1]')"]) is None
    assert [line.split(":")[0] for line in course.skipped] == ["hangs", "late"]


@pytest.mark.parametrize("name", ["gpu", "gpus"])
def test_the_shell_scripts_find_the_package_and_pass_options_on(name: str, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "$PYTHONPATH|$PWD|$*"\n')
    interpreter.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPTS / f"{name}.sh"), "--tiny"],
        env={**os.environ, "PYTHON": str(interpreter)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    path, folder, arguments = done.stdout.strip().split("|")
    assert path.split(":")[0] == folder == str(SCRIPTS.parent)
    assert arguments.split()[0] == f"benchmarks/{name}.py"
    assert arguments.split()[-1] == "--tiny"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["2", "--device", "cpu"], "add --tiny"),
        (["1", "--device", "cpu", "--tiny"], "at least 2"),
        (["--device", "cpu", "--tiny"], "at least 2"),
        (["2", "--parts", "parity,sped"], "parity, speed and bare"),
        (["2", "--device", "cpu", "--tiny", "--json", "/no/such/folder/x"], "cannot be written"),
        (["1000"], "1000 GPUs are needed"),
    ],
)
def test_several_gpus_are_asked_for_in_vain_in_one_line(
    call: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    import gpus

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "measured", lambda *_: pytest.fail("started"))
    assert call(gpus, *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
