"""Runs and results written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.record import EVENTS, RunFolder


@pytest.fixture
def make_run(make_scenario: Callable[..., Scenario], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run of 10 steps, 4 of them warm-up, with two attackers.

    `bans` is worker to step, `losses` step to loss where it is not 2.
    """

    def make(
        bans: dict[tuple[int, int], int],
        losses: dict[int, Any] | None = None,
        *,
        loss: Any = 1.5,
        ended: bool = True,
        **settings: Any,
    ) -> Path:
        told = {"grid__stages": 3, "train__steps": 10, "train__warmup_steps": 4} | settings
        scenario = make_scenario(**told)
        cell = Cell(
            scenario=scenario, attack=Component(name="zeros"), defense=Component(name="sentinel")
        )
        identity = {"scenario": scenario.model_dump(mode="json"), "engine": "e" * 64}
        config = {"cell": cell.model_dump(mode="json"), "identity": identity}
        with RunFolder.create(tmp_path / "runs", cell.label, config) as folder:
            rows = _events(bans, losses or {}, loss, ended)
            (folder.path / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder.path

    return make


def _events(
    bans: dict[tuple[int, int], int], losses: dict[int, Any], loss: Any, ended: bool
) -> Iterator[dict[str, Any]]:
    what = {"start": 5, "attack": "zeros", "params": {}, "mode": "activation"}
    who = [{"stage": 1, "replica": r, **what} for r in (0, 1)]
    start = {"type": "start", "stages": 3, "replicas": 4, "steps": 10, "warmup_steps": 4}
    yield {**start, "tokens_per_step": 100, "attackers": who, "state_bytes": 0}
    yield {"type": "baseline", "digest": "b", "validation_loss": 1.25, "tokens_per_second": 400.0}
    for step in range(10):
        at = {"step": step, "loss": losses.get(step, 2.0), "grad_norm": 1.0, "seconds": 0.25}
        counts = {"checked": [0, 0], "flagged": [0, 0], "tampered": 0, "excluded": 0}
        yield {"type": "step", **at, **counts}
        if step == 5:
            for replica in (0, 1):
                worker = {"stage": 1, "replica": replica, "direction": "activation"}
                yield {"type": "act", "step": 5, **worker}
        for (stage, replica), banned in bans.items():
            if banned == step:
                worker = {"stage": stage, "replica": replica}
                yield {"type": "ban", "step": step, **worker, "reason": "violations"}
    if ended:
        yield {"type": "eval", "step": 9, "loss": loss, "tokens": 100}
        yield {"type": "end", "status": "complete", "time": "2026-01-01T00:00:00Z", "seconds": 1}


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a result for each seed of a cell below `folder`."""

    def write(
        folder: str,
        attack: str = "zeros",
        defense: str = "sentinel",
        seeds: int | list[int] = 3,
        scenario: str = "s" * 64,
        track: str = "core",
        **scores: Any,
    ) -> Path:
        for number, seed in enumerate(range(seeds) if isinstance(seeds, int) else seeds):
            name = "".join(c if c.isalnum() else "-" for c in f"{attack}-{defense}")[:50]
            path = tmp_path / folder / f"{track}-{name}-{scenario[:4]}-{seed}" / "result.json"
            path.parent.mkdir(parents=True)
            found = {"f1": 50.0, "excess_loss": 1.0, "undetected_damage": 0.0, "false_bans": 0}
            found |= {k: v[number] if isinstance(v, list) else v for k, v in scores.items()}
            cell = {
                "track": track,
                "attack": attack,
                "mode": "activation",
                "defense": defense,
                "seeds": dict.fromkeys(("model", "data", "threat"), seed),
                "scenario": scenario,
                "setting": {"model": "m", "stages": 8, "replicas": 8, "steps": 9, "device": "cpu"},
            }
            content = {"schema": 1, "digest": str(path), "finished": "", "cell": cell}
            content["scores"] = {"outcome": "defended", "reason": None, **found}
            path.write_text(json.dumps(content))
        return tmp_path / folder

    return write


@pytest.fixture
def call(command_line: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `sentinel-bench compare` in this process."""
    return partial(command_line, "compare")
