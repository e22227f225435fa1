"""The tracks of `benchmark.yaml`: named scenarios, with settings of defenses tuned for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from pydantic import Field

from sentinel_bench.config import Component, Frozen, Mode, Scenario, build, flatten, merge
from sentinel_bench.errors import ConfigError, nearest

DEFAULT = "core"
DEFENSE = "cascade"
"""What defends where nothing else is said: the best that leaderboards/adaptive knows."""
FREE = ("track", "seeds", "device", "threat.mode")
"""What a run may change and still belong to its track."""


class Track(Frozen):
    """A named scenario.

    Attributes:
        summary: one line.
        scenario: what differs from the defaults of `Scenario`.
        attacks: the attacks of its board, as `name:key=value`.
        modes, seeds: the modes and seeds of its board; each seed for model, data and threat alike.
        board: the defenses of its board, as `name:key=value`.
        defenses: name of a defense to its tuned settings.
        every_plugin: a suite also runs every attack that is registered against the default
            defense, and every defense against the first attack of the board.
    """

    summary: str
    scenario: dict[str, Any] = {}
    attacks: list[str] = []
    modes: list[Mode] = Field(["activation"], min_length=1)
    seeds: list[int] = Field([0, 1, 2], min_length=1)
    board: list[str] = ["averaging", "sentinel", "duplicate-work", DEFENSE]
    defenses: dict[str, dict[str, Any]] = {}
    every_plugin: bool = False


class Benchmark(Frozen):
    """The content of `benchmark.yaml`."""

    tracks: dict[str, Track] = Field(min_length=1)


@cache
def load() -> Benchmark:
    """Read the `benchmark.yaml` of the package."""
    text = files("sentinel_bench").joinpath("benchmark.yaml").read_text(encoding="utf-8")
    return build(Benchmark, yaml.safe_load(text), "benchmark.yaml")


def get(name: str) -> Track:
    """Return the track called `name`.

    Raises:
        ConfigError: no such track.
    """
    tracks = load().tracks
    if name not in tracks:
        raise ConfigError(f"unknown track {name!r}{nearest(name, tracks)}")
    return tracks[name]


def scenario(name: str, changes: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a track with `changes` laid on it.

    A changed scenario is no longer of the track, and is called `custom`, unless only seeds, device
    or mode were changed.

    Raises:
        ConfigError: an unknown track, key or value.
    """
    base = build(Scenario, {**get(name).scenario, "track": name}, f"track {name}")
    changed = build(Scenario, merge(base.model_dump(), changes), "settings")
    return (
        changed if not deviations(base, changed) else changed.model_copy(update={"track": "custom"})
    )


def deviations(base: Scenario, other: Scenario) -> list[str]:
    """Return the dotted keys in which a scenario leaves its track."""
    one, two = flatten(base.model_dump()), flatten(other.model_dump())
    return [
        key
        for key in one
        if one[key] != two.get(key) and not any(key == f or key.startswith(f + ".") for f in FREE)
    ]


def tuned(name: str, defense: Component) -> dict[str, Any]:
    """Return the settings that a track has found for a defense, empty without any."""
    return get(name).defenses.get(defense.name, {})
