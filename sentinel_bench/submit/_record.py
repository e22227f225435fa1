"""Checks of one cell: its settings, its identity, its attackers, its events, its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sentinel_bench import registry
from sentinel_bench.api import ResponseParams
from sentinel_bench.attacks import ATTACKS
from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.errors import SentinelBenchError
from sentinel_bench.provenance import differing, digest, to_json
from sentinel_bench.record import decode
from sentinel_bench.runner import settings
from sentinel_bench.score import result
from sentinel_bench.soundness import problem
from sentinel_bench.submit._cells import Record, foreign
from sentinel_bench.submit._files import CONFIG, EVENTS, FOLDER, RESULT, Files
from sentinel_bench.submit._form import Problem, disordered, malformed, unlike
from sentinel_bench.submit._replay import MAY_IDLE, Replay
from sentinel_bench.submit._strict import read_json_object, read_rows
from sentinel_bench.submit.rules import Finding, RefusedError, finding

_DRAWN = ("stage", "replica", "start", "seed", "rate", "poison_self", "verifiers")
"""What is drawn of an attacker, whatever its attack is."""
_STAND_IN = Component(name="zeros")


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Plugin(_Form):
    name: str
    params: dict[str, Any]
    version: str
    source: str
    wraps: list[_Plugin] = []


class _Identity(_Form):
    scenario: dict[str, Any]
    attack: _Plugin
    defense: _Plugin
    aggregator: _Plugin
    data: str
    engine: str
    versions: dict[str, str]


class _Config(_Form):
    """The content of `config.json`."""

    cell: dict[str, Any]
    defense: dict[str, Any]
    identity: _Identity
    digest: str
    commands: list[str]


def read_record(files: Files, name: str, largest: int) -> Record:
    """Read the cell in the folder `cells/<name>`; its events have at most `largest` bytes.

    Raises:
        RefusedError: a file cannot be read, or is not in its form; `place` names it.
    """
    place = f"{FOLDER}/{name}"
    last = CONFIG
    try:
        config = read_json_object(files.read(f"{place}/{CONFIG}"))
        cell = _cell(config)
        last = RESULT
        stored = read_json_object(files.read(f"{place}/{RESULT}"))
        last = EVENTS
        rows, size = read_rows(files.read(f"{place}/{EVENTS}"), largest)
    except RefusedError as refused:
        refused.place = f"{place}/{last}"
        raise
    return Record(place, config, cell, decode(rows), stored, size)


def _cell(config: Mapping[str, Any]) -> Cell:
    try:
        _Config.model_validate(config)
        return Cell.model_validate(config["cell"])
    except (ValidationError, SentinelBenchError) as error:
        raise RefusedError("identity", f"is not that of a run: {_first(error)}") from error


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def settings_of(record: Record, track: str) -> Iterator[Finding]:
    """Yield what a cell has otherwise than its track. Nothing else of it is trusted before."""
    for text in foreign(track, record.cell):
        yield finding(f"{record.place}/{CONFIG}: cell", "settings", text)


def findings_of(record: Record, name: str) -> Iterator[Finding]:
    """Yield what is wrong with a cell that has the settings of its track.

    Args:
        record: the cell.
        name: of its folder.
    """
    if name != record.name:
        yield finding(record.place, "cell-name", f"a folder of this cell is called {record.name}")
    yield from _identity(record)
    wrong = problem(record.events)
    if wrong is not None:
        yield finding(f"{record.place}/{EVENTS}", "cell-invalid", f"the run is invalid: {wrong}")
        return
    found = list(_events(record))
    yield from found[:10]
    if not found:
        yield from _threat(record)
        yield from _replayed(record)
    yield from _numbers(record)


def _identity(record: Record) -> Iterator[Finding]:
    """Yield where the identity does not follow from the cell, or its digest from the identity."""
    config, cell, place = record.config, record.cell, f"{record.place}/{CONFIG}"
    identity = config["identity"]
    if digest(identity) != config["digest"]:
        yield finding(f"{place}: digest", "identity", "is not that of the identity")
    expected, told = settings(cell), identity["scenario"]
    try:
        scenario = Scenario.model_validate({**told, "track": cell.scenario.track})
        told = settings(cell.model_copy(update={"scenario": scenario}))
    except ValidationError as error:
        yield finding(f"{place}: identity.scenario", "identity", _first(error))
    for key in differing(expected, told):
        yield finding(f"{place}: identity.scenario.{key}", "identity", "is not that of the cell")
    if config["defense"] != identity["defense"]["params"]:
        yield finding(f"{place}: defense", "identity", "differs from identity.defense.params")
    for kind, component in (
        ("attack", cell.attack),
        ("defense", cell.resolved_defense),
        ("aggregator", cell.aggregator),
    ):
        wrong = _plugin(kind, component, identity[kind])
        if wrong is not None:
            yield finding(f"{place}: identity.{kind}", "identity", wrong)


def _plugin(kind: str, component: Component, told: Mapping[str, Any]) -> str | None:
    """Say what is wrong with the identity of a plugin; parameters are known of built-in ones."""
    if told["name"] != component.name:
        return f"is of {told['name']!r}, and the cell has {component.name!r}"
    registries: dict[str, registry.Registry[Any]] = {
        "attack": registry.attacks,
        "defense": registry.defenses,
        "aggregator": registry.aggregators,
    }
    if "/" in component.name:
        return None
    try:
        given = registries[kind].params(component)
        resolved = registries[kind].params(Component(name=component.name, params=told["params"]))
    except SentinelBenchError as error:
        return str(error)
    return None if given == resolved else "its parameters are not those of the cell"


def _events(record: Record) -> Iterator[Finding]:
    """Yield the events that no run writes: of a wrong form, order or setting."""
    checks: list[Callable[[], Iterator[Problem]]] = [
        lambda: malformed(record.events),
        lambda: disordered(record.events, not record.cell.is_baseline),
        lambda: unlike(record.events, record.cell.scenario),
    ]
    for check in checks:  # each of them relies on the one before
        found = [_at(record, number, what) for number, what in check()]
        yield from found
        if found:
            return


def _at(record: Record, number: int, what: str) -> Finding:
    return finding(f"{record.place}/{EVENTS}: event {number}", "events", what)


def _threat(record: Record) -> Iterator[Finding]:
    """Yield where the attackers are not those that settings and seed give."""
    from sentinel_bench.threat import place

    cell, told = record.cell, record.events[0]["attackers"]
    ours = cell.attack.name in ATTACKS
    attack = cell.attack if ours else _STAND_IN
    try:
        drawn = [attacker.record() for attacker in place(cell.scenario, attack)]
    except SentinelBenchError as error:
        yield finding(f"{record.place}/{CONFIG}: cell", "threat", str(error))
        return
    expected = json.loads(to_json(drawn))
    keys = None if ours else _DRAWN
    if _only(told, keys) != _only(expected, keys):
        where = f"{record.place}/{EVENTS}: event 1: attackers"
        yield finding(
            where, "threat", f"are not those that seed {cell.scenario.seeds.threat} draws"
        )
    elif not ours and any(row.get("attack") != cell.attack.name for row in told):
        yield finding(f"{record.place}/{EVENTS}: event 1", "threat", "attackers of another attack")


def _only(rows: list[dict[str, Any]], keys: tuple[str, ...] | None) -> list[dict[str, Any]]:
    return rows if keys is None else [{k: row.get(k) for k in keys} for row in rows]


def policy_of(record: Record) -> ResponseParams:
    """Return what follows a flag of the cell's defense.

    Raises:
        RefusedError: its parameters do not say.
    """
    told = record.config["defense"]
    try:
        return ResponseParams.model_validate(
            {name: told[name] for name in ResponseParams.model_fields if name in told}
        )
    except ValidationError as error:
        raise RefusedError("identity", _first(error)) from error


def _replayed(record: Record) -> Iterator[Finding]:
    try:
        policy = policy_of(record)
    except RefusedError as refused:
        yield finding(f"{record.place}/{CONFIG}: defense", refused.rule, str(refused))
        return
    replay = Replay(record.events, policy, record.cell.defense.name != "none")
    yield from (_at(record, *p) for p in list(replay.problems())[:10])
    steady = record.cell.attack.name in ATTACKS.keys() - MAY_IDLE
    for worker in replay.idle() if steady and record.cell.scenario.threat.rate else ():
        yield finding(
            f"{record.place}/{EVENTS}", "plausible", f"attacker {worker} never acted, and had time"
        )


def _numbers(record: Record) -> Iterator[Finding]:
    """Yield where the stored result is not the one that follows from the events."""
    stored = record.result
    source = stored.get("provenance")
    fresh = result(record.config, record.events, source if isinstance(source, dict) else {})
    for key, what in compare(stored, fresh):
        yield finding(f"{record.place}/{RESULT}: {key}", "numbers", what)
    versions = source.get("packages", {}) if isinstance(source, dict) else {}
    for name, version in record.config["identity"]["versions"].items():
        if not isinstance(versions, dict) or versions.get(name) != version:
            where = f"{record.place}/{RESULT}: provenance.packages.{name}"
            yield finding(where, "identity", f"the identity has {version!r}")


def compare(stored: Any, fresh: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys in which two JSON values differ, and how; numbers up to rounding."""
    if isinstance(stored, dict) and isinstance(fresh, dict):
        for name in sorted(stored.keys() | fresh.keys()):
            below = f"{key}.{name}".lstrip(".")
            if name not in stored or name not in fresh:
                yield below, "is missing" if name in fresh else "does not belong there"
            else:
                yield from compare(stored[name], fresh[name], below)
    elif not _same(stored, fresh):
        yield key, f"is {stored!r}, and recomputed {fresh!r}"


def _same(stored: Any, fresh: Any) -> bool:
    if isinstance(fresh, float) and type(stored) is float:
        return abs(stored - fresh) <= 1e-12 + 1e-9 * abs(fresh)
    return type(stored) is type(fresh) and bool(stored == fresh)
