"""Result files as runs leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.config import Cell, Component, Scenario, Seeds, ThreatConfig
from sentinel_bench.record import digest
from sentinel_bench.score import METRICS, result

Save = Callable[..., Path]


def make(attack: str, defense: str, seed: int, mode: str, track: str, steps: int) -> dict[str, Any]:
    """A result of a cell that was killed: all but its scores is as `score.result` makes it."""
    scenario = Scenario(
        track=track,
        seeds=Seeds(model=seed),
        threat=ThreatConfig(mode=mode),
        train={"steps": steps},
    )
    cell = Cell(
        scenario=scenario, attack=Component.parse(attack), defense=Component.parse(defense)
    ).model_dump(mode="json")
    config = {"cell": cell, "digest": digest(cell), "commands": ["sentinel-bench suite core"]}
    packages = {"torch": "2.13.0", "sentinel-bench": "0.1.0"}
    end = {"type": "end", "status": "interrupted", "time": "2026-01-01T00:00:00Z"}
    return result(config, [end], {"packages": packages, "python": "3.11.9"})


@pytest.fixture
def age() -> Callable[[Path], None]:
    """Return a function that makes a saved result one of the first version."""

    def strip(path: Path) -> None:
        content = json.loads(path.read_text())
        del content["cell"]["knowledge"]
        for name in (
            *("harm_weighted_recall", "attack_success_rate", "attack_success_base"),
            *("extra_flops", "extra_bytes"),
        ):
            del content["scores"][name]
        path.write_text(json.dumps(content))

    return strip


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write `runs/<name>/result.json` with some scores, and return the file."""

    def write(
        name: str,
        attack: str = "zero",
        defense: str = "sentinel",
        seed: int = 0,
        *,
        mode: str = "activation",
        track: str = "core",
        steps: int = 350,
        knowledge: str | None = None,
        change: dict[str, Any] | None = None,
        **scores: Any,
    ) -> Path:
        content = make(attack, defense, seed, mode, track, steps)
        valid = dict.fromkeys(METRICS, 1.0) | {"outcome": "defended", "reason": None}
        valid |= {"diverged": False, "attack_success_rate": None, "attack_success_base": None}
        valid |= {"extra_flops": None, "extra_bytes": None}
        content["scores"] = valid | scores
        if knowledge is not None:
            content["cell"]["knowledge"] = knowledge
        content |= change or {}
        path = tmp_path / "runs" / name / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))
        return path

    return write
