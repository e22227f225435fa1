"""The digest of a cell covers all that decides about its numbers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import runner
from sentinel_bench.config import Cell, Component, Scenario, build, flatten, merge, set_dotted
from sentinel_bench.models import pretrained
from sentinel_bench.provenance import digest

OTHER: dict[str, Any] = {
    "train.precision": "bf16",
    "model.preset": "llama-3-0.6b",
    "model.init": "huggingface",
    "model.pretrained": "somewhere",
    "model.revision": "main",
    "data.name": "c4",
    "data.path": "other.txt",
    "data.revision": "main",
    "data.tokenizer": "gpt2",
    "train.betas": [0.8, 0.9],
    "train.lr_decay_type": "cosine",
    "threat.mode": "both",
    "threat.schedule": "single",
    "threat.allow_majority": True,
    "threat.verifiers": "collude",
    "faults.on_crash": "ban",
    "device": "cuda",
}
LEAVES = [key for key in flatten(Scenario().model_dump(mode="json")) if key != "track"]


@cache
def key_of(scenario: Scenario, attack: str = "delay", defense: str = "averaging") -> str:
    cell = Cell(scenario=scenario, attack=Component.parse(attack), defense=Component.parse(defense))
    return digest(runner.identity(cell, "data"))


def other(scenario: Scenario, key: str) -> Scenario:
    """The scenario with another value in one place."""
    old = flatten(scenario.model_dump(mode="json"))[key]
    if key in OTHER:
        fresh = OTHER[key]
    elif old is None:
        fresh = 8
    else:
        fresh = old / 2 if isinstance(old, float) and old else old + 1
    tree: dict[str, Any] = {}
    set_dotted(tree, key, fresh)
    changed = build(Scenario, merge(scenario.model_dump(), tree), "test")
    assert changed != scenario
    return changed


@pytest.mark.parametrize("key", LEAVES)
def test_every_setting_is_part_of_the_identity(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "identity", lambda model: None)  # the settings alone count here
    scenario = Scenario(track="core")
    assert key_of(other(scenario, key), defense="none") != key_of(scenario, defense="none")


def test_the_name_of_the_track_is_no_part_of_the_identity() -> None:
    assert key_of(Scenario(track="core")) == key_of(Scenario(track="custom"))


def test_attack_defense_parameters_and_data_are_part_of_the_identity() -> None:
    scenario = Scenario()
    cell = Cell(
        scenario=scenario, attack=Component.parse("delay"), defense=Component.parse("averaging")
    )
    keys = [
        key_of(scenario),
        key_of(scenario, attack="zeros"),
        key_of(scenario, attack="delay:steps=5"),
        key_of(scenario, defense="sentinel"),
        key_of(scenario, defense="averaging:violations=4"),
        digest(runner.identity(cell, "other data")),
        digest(runner.identity(cell.model_copy(update={"tuned": {"lambda": 3}}), "data")),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(scenario, attack="delay:steps=100") == keys[0]


@pytest.mark.parametrize(
    "key", ["threat.fraction", "seeds.threat", "threat.gap", "faults.deadline"]
)
def test_without_an_attack_the_threat_does_not_matter(key: str) -> None:
    one, two = Scenario(), other(Scenario(), key)
    assert key_of(one, attack="none") == key_of(two, attack="none")


def test_all_code_that_decides_about_numbers_is_part_of_the_identity() -> None:
    root = Path(runner.__file__).parent
    covered = {p for name in runner.ENGINE for p in root.glob(f"{name}.py")}
    assert {p.parent.name for p in covered} == {"sentinel_bench", "pipeline", "models", "data"}
    for path in covered:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sentinel_b"):
                place = root.joinpath(*node.module.split(".")[1:])  # type: ignore[union-attr]
                if place.is_dir() or place.stem in ("errors", "registry"):
                    continue
                assert place.with_suffix(".py") in covered, (path.name, node.module)
