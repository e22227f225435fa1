"""What is wrong in a command is told in one line, with exit status 2, before any work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.record import find_runs

RUN = ["run", "--attack", "zeros", "--defense", "none"]
Call = Callable[..., Any]


def assert_refused(done: Any, *parts: str) -> None:
    assert done.status == 2, done.err
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("error: ")
    for part in parts:
        assert re.search(part, lines[0]), (part, lines[0])
    assert done.out == ""
    assert not find_runs(Path("runs"))


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a run has started")

    monkeypatch.setattr("sentinel_bench.runner.Group.run", fail)


@pytest.mark.parametrize(
    "options, parts",
    [
        (["--attack", "dealy"], ["unknown attack 'dealy'; did you mean delay"]),
        (["--defense", "sentinell"], ["unknown defense 'sentinell'; did you mean sentinel"]),
        (["--model", "llama-tini"], ["unknown model 'llama-tini'; did you mean llama-tiny"]),
        (["--data", "soto"], ["unknown corpus 'soto'; did you mean sotu"]),
        (["--track", "smok"], ["unknown track 'smok'; did you mean smoke"]),
        (["--attack", "delay:step=2"], ["attack delay: unknown key 'step'; did you mean steps"]),
        (["--attack", "delay:steps=x"], ["attack delay: steps: .*'x'"]),
        (["--attack", "delay:steps"], ["'steps' is not key=value"]),
        (["--attack", ""], ["names nothing"]),
        (["--defense", "sentinel:lamda=2"], ["unknown key 'lamda'; did you mean lambda"]),
        (["--defense", "sentinel:lambda=nan"], ["lambda.*'nan'"]),
        (["--attack", "dealy", "--defense", "sentinell"], ["did you mean delay", "mean sentinel"]),
        (["--attack", "dealy", "--attack", "zeross"], ["did you mean delay", "did you mean zeros"]),
        (["--fraction", "0.5"], ["4 of 8 replicas of a stage would be malicious"]),
        (["--fraction", "1.5"], ["threat.fraction: .*1.5"]),
        (["--stages", "40", "--set", "model.layers=8"], ["40 stages are more than the 8 layers"]),
        (["--stages", "3"], ["no stage is open"]),
        (["--batch-size", "0"], ["train.batch_size: .*0"]),
        (["--steps", "-5"], ["train.steps: .*-5"]),
        (["--steps", "abc"], ["train.steps: .*'abc'"]),
        (["--steps", ""], ["train.steps: "]),
        (["--steps", "["], ["'--steps \\['"]),
        (["--steps", "1.5"], ["train.steps: .*1.5"]),
        (["--steps", "10", "--set", "train.steps=20"], ["'steps' is given twice"]),
        (["--warmup", "350"], ["warmup_steps 350 must be below steps 350"]),
        (["--lr", "nan"], ["train.lr: .*nan"]),
        (["--lr", ".inf"], ["train.lr: .*inf"]),
        (["--mode", "sideways"], ["threat.mode: .*'activation', 'gradient' or 'both'"]),
        (["--device", "tpu"], ["device: "]),
        (["--seeds", "x"], ["--seeds 'x'"]),
        (["--seeds", ""], ["--seeds ''"]),
        (["--seeds", "3-1"], ["no range of seeds"]),
        (["--seeds", "1-"], ["write a number"]),
        (["--seeds", "\u00b2"], ["write a number"]),
        (["--seeds", "9999999999"], ["no range of seeds"]),
        (["--model-seed", "-1"], ["seeds.model"]),
        (["--seeds", "1", "--threat-seed", "2"], ["--seeds sets all three seeds"]),
        (["--set", "nonsense"], ["is not KEY=VALUE"]),
        (["--set", "a=1"], ["unknown key 'a'"]),
        (["--set", "=1"], ["unknown key ''"]),
        (["--set", "train.step=1"], ["unknown key 'train.step'; did you mean steps"]),
        (["--set", "train=5"], ["train: "]),
        (["--set", "train.lr=[1"], ["is not a YAML value"]),
        (["--set", "model.heads=3"], ["must be an even multiple of heads 3"]),
        (["--threads", "0"], ["--threads"]),
        (["--theads", "1"], ["No such option.*--threads"]),
        (["--attack"], ["--attack.* requires an argument"]),
        (["surplus"], ["unexpected extra argument"]),
        (["--data", "missing/*.txt"], ["missing/\\*.txt"]),
        (["--data", "missing.txt"], ["missing.txt"]),
        (["--config", "missing.yaml"], ["missing.yaml: cannot be read"]),
        (["--out", "file"], ["file: cannot write here: .*choose another folder"]),
        (["--out", "file/runs"], ["file/runs: cannot write here: .*choose another folder"]),
    ],
)  # fmt: skip
def test_a_bad_option_is_one_line(call: Call, options: list[str], parts: list[str]) -> None:
    Path("file").write_text("")
    base = RUN if not {"--attack", "--defense"} & {*options} else ["run"]
    if base == ["run"] and "--defense" not in options:
        options = ["--defense", "none", *options]
    if base == ["run"] and "--attack" not in options:
        options = ["--attack", "zeros", *options]
    assert_refused(call(*base, *options), *parts)


@pytest.mark.parametrize(
    "content, parts",
    [
        ("", ["must be a mapping"]),
        ("- 1\n- 2\n", ["must be a mapping"]),
        ("a: [1\nb: }", ["not YAML"]),
        ("a: !!python/object:os.system x", ["not YAML"]),
        ("\x00", ["not YAML"]),
        ("when: 2020-13-45", ["not YAML"]),
        ("a: " + "[" * 3000, ["not YAML"]),
        ("atack: zeros", ["unknown key 'atack'; did you mean attack"]),
        ("trian: {steps: 3}", ["unknown key 'trian'; did you mean .*train"]),
        ("train: {step: 3}", ["unknown key 'train.step'; did you mean steps"]),
        ("1: 2", ["unknown key 1"]),
        ("atack: zeros\ngird: {}", ["did you mean attack", "did you mean grid"]),
        ("attack: {name: zeros}", ["attack"]),
        ("attack: [zeros, 3]", ["attack"]),
        ("track: 3", ["track"]),
        ("track: smok", ["did you mean smoke"]),
        ("train: {lr: .nan}", ["train.lr"]),
        ("train: 3", ["train"]),
    ],
)
def test_a_bad_file_is_one_line(call: Call, content: str, parts: list[str]) -> None:
    Path("bad.yaml").write_text(content)
    assert_refused(call(*RUN, "--config", "bad.yaml"), "bad.yaml|unknown track", *parts)


def test_a_file_that_is_not_text_is_one_line(call: Call) -> None:
    Path("bad.yaml").write_bytes(b"\xff\xfe\xfa")
    assert_refused(call(*RUN, "--config", "bad.yaml"), "bad.yaml: cannot be read")
    assert_refused(call(*RUN, "--config", "."), "cannot be read")


def test_a_corpus_shorter_than_a_sequence_is_one_line(call: Call) -> None:
    Path("short.txt").write_text("a few words, " * 20)
    done = call(*RUN, "--data", "short.txt", "--seq-len", "5000", "--set", "data.vocab_size=257")
    done.err = done.err.splitlines()[-1]  # after what is said while the tokenizer is trained
    assert_refused(done, "seq_len 5000 needs at least 5,001")
    Path("empty.txt").write_text("")
    assert_refused(call(*RUN, "--data", "empty.txt"), "empty.txt")


def test_a_run_needs_an_attack(call: Call) -> None:
    assert_refused(call("run"), "name at least one --attack")
    assert_refused(call("run", "--defense", "sentinel"), "name at least one --attack")


def test_without_a_defense_the_default_one_runs(call: Call) -> None:
    done = call("run", "--attack", "zeros", "--dry-run", "--json")
    cells = json.loads(done.out)["cells"]
    assert [cell["defense"]["name"] for cell in cells] == ["none", "none", "cascade"]


@pytest.mark.parametrize(
    "command, parts",
    [
        (["lst"], ["No such command 'lst'"]),
        (["list", "atacks"], ["'atacks' is not one of"]),
        (["list"], ["Missing argument"]),
        (["show", "attack", "dealy"], ["unknown attack 'dealy'; did you mean delay"]),
        (["show", "defense", "sentinl"], ["did you mean sentinel"]),
        (["show", "aggregator", "krm"], ["unknown aggregator 'krm'; did you mean krum"]),
        (["show", "attack"], ["Missing argument"]),
        (["score"], ["Missing argument"]),
        (["leaderboard", "build"], ["Missing argument"]),
        (["leaderboard", "collect"], ["Missing argument"]),
        (["leaderboard", "collect", "nowhere"], ["nowhere: no such folder of runs"]),
        (["calibrate", "--flags", "x"], ["--flags"]),
    ],
)
def test_a_bad_command_is_one_line(call: Call, command: list[str], parts: list[str]) -> None:
    assert_refused(call(*command), *parts)


def test_a_gpu_that_is_not_there_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_refused(call(*RUN, "--device", "cuda"), "torch sees no GPU")
