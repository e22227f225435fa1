"""Tracks: their file is sound, and a run that leaves its track is told apart from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel_bench import registry, tracks
from sentinel_bench.config import Cell, Component
from sentinel_bench.data.corpora import find_corpus
from sentinel_bench.errors import ConfigError
from sentinel_bench.models.presets import layers_per_stage
from sentinel_bench.threat import place

NAMES = list(tracks.load().tracks)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A benchmark file in which `core` has settings for `sentinel`."""
    track = tracks.get("core").model_copy(
        update={"defenses": {"sentinel": {"lambda": {"activation": 0.5, "gradient": 0.7}}}}
    )
    benchmark = tracks.Benchmark(tracks={"core": track})
    monkeypatch.setattr(tracks, "load", lambda: benchmark)
    yield


@pytest.mark.parametrize("name", NAMES)
def test_every_attack_of_a_track_can_be_placed_on_it(name: str) -> None:
    track = tracks.get(name)
    scenario = tracks.scenario(name, {})
    assert scenario.track == name
    layers_per_stage(scenario)
    find_corpus(scenario.data)
    assert track.attacks
    assert track.summary
    for text in track.attacks:
        attack = Component.parse(text)
        registry.attacks.params(attack)
        assert (attack.name == "none") == (not place(scenario, attack))
    for defense, params in track.defenses.items():
        registry.defenses.params(Component(name=defense, params=params))


def test_the_default_track_exists() -> None:
    assert tracks.DEFAULT in NAMES


def test_the_file_in_the_package_is_the_one_at_the_root() -> None:
    root = Path(__file__).parents[1] / "benchmark.yaml"
    content = yaml.safe_load(root.read_text(encoding="utf-8"))
    assert tracks.Benchmark.model_validate(content) == tracks.load()


@pytest.mark.parametrize(
    "changes, name",
    [
        ({}, "core"),
        ({"seeds": {"model": 5, "data": 6, "threat": 7}}, "core"),
        ({"threat": {"mode": "both"}, "device": "cuda"}, "core"),
        ({"train": {"steps": 350}}, "core"),
        ({"train": {"steps": 351}}, "custom"),
        ({"threat": {"fraction": 0.375}}, "custom"),
        ({"data": {"vocab_size": 1025}}, "custom"),
        ({"model": {"layers": 9}}, "custom"),
    ],
)
def test_a_changed_scenario_is_no_longer_of_its_track(changes: dict[str, Any], name: str) -> None:
    assert tracks.scenario("core", changes).track == name


def test_changes_are_laid_on_the_track() -> None:
    scenario = tracks.scenario("smoke", {"train": {"lr": 0.5}})
    assert scenario.train.lr == 0.5
    assert scenario.train.steps == tracks.scenario("smoke", {}).train.steps


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("cor", {}, "unknown track 'cor'; did you mean core"),
        ("core", {"trian": {}}, "unknown key 'trian'; did you mean train"),
        ("core", {"train": {"steps": 0}}, "train.steps"),
    ],
)
def test_a_wrong_track_or_change_is_told(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tracks.scenario(name, changes)


def settings(text: str) -> Any:
    """The parameters of a defense in a run of `core`."""
    defense = Component.parse(text)
    cell = Cell(
        scenario=tracks.scenario("core", {}),
        attack=Component(name="none"),
        defense=defense,
        tuned=tracks.tuned("core", defense),
    )
    return registry.defenses.params(cell.resolved_defense)


@pytest.mark.usefixtures("tuned")
def test_the_settings_of_a_track_are_used_unless_others_are_given() -> None:
    assert settings("sentinel").lambda_.activation == 0.5
    one = settings("sentinel:lambda.gradient=9").lambda_
    assert (one.activation, one.gradient) == (0.5, 9)
    both = settings("sentinel:lambda=9").lambda_
    assert (both.activation, both.gradient) == (9, 9)
    published = settings("sentinel:values=llama-3-0.6b-16x8")
    assert published == registry.defenses.params(Component(name="sentinel"))
    assert published.lambda_.activation != 0.5


@pytest.mark.usefixtures("tuned")
def test_a_defense_that_was_not_tuned_has_its_own_defaults() -> None:
    assert tracks.tuned("core", Component(name="averaging")) == {}
    assert settings("averaging") == registry.defenses.params(Component(name="averaging"))
