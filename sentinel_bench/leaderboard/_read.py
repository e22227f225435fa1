"""Find and check `result.json` files. One that cannot be used is a problem with a reason."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel_bench.errors import ConfigError

if TYPE_CHECKING:
    from sentinel_bench.submit import Standing

NUMBERS = (
    *("precision", "recall", "f1", "detection_steps_mean", "false_bans", "validation_loss"),
    *("excess_loss", "relative_tps", "acted", "attackers", "capacity"),
    *("harm_weighted_recall", "undetected_damage", "attack_success_rate", "attack_success_base"),
    *("extra_flops", "extra_bytes", "state_bytes"),
)
_ENTRY, _CELLS = "entry.yaml", "cells"  # of a submission
_SEEDS = ("model", "data", "threat")
_TRACK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes the name of a folder


@dataclass(frozen=True)
class Result:
    """One cell's result, checked. `place` is its path below the folder that was searched.

    `path` is that of the file.

    What an older result does not have yet is empty or None. `entry`, `kind` and `level` are those
    of the submission that it is part of, empty for the board's own results; what a submission is
    about bears the name of the entry, so that its rows stand beside others.
    """

    place: str
    digest: str
    finished: str
    track: str
    attack: str
    mode: str
    knowledge: str
    defense: str
    tuned: str
    code: str
    seeds: tuple[int, ...]
    scenario: str
    setting: str
    workers: int | None
    outcome: str
    reason: str
    diverged: bool
    scores: Mapping[str, float | None]
    versions: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    entry: str = ""
    kind: str = ""
    level: str = ""
    path: Path = Path()


@dataclass(frozen=True)
class Problem:
    """A result file that was left out, and why."""

    place: str
    reason: str


def read(roots: Iterable[Path]) -> tuple[list[Result], list[Problem]]:
    """Read every `result.json` at or below `roots`, each once, in the order of their places.

    Raises:
        ConfigError: a root does not exist.
    """
    results: list[Result] = []
    problems: list[Problem] = []
    seen: set[Path] = set()
    entries: dict[Path, Standing] = {}
    for root in sorted(roots):
        if not root.exists():
            raise ConfigError(f"{root}: no such file or folder to read results from")
        base = (root if root.is_dir() else root.parent).resolve()
        for path in _files(root):
            if path in seen:
                continue
            seen.add(path)
            place = f"{base.name}/{path.relative_to(base).as_posix()}"
            try:
                told = _standing(path, entries)
                results += _entered(replace(_parse(place, _load(path)), path=path), told)
            except (OSError, ValueError, RecursionError) as error:
                text = error.strerror if isinstance(error, OSError) else str(error)
                problems.append(Problem(place, text or type(error).__name__))
    results.sort(key=lambda r: (r.place, r.digest))
    problems.sort(key=lambda p: (p.place, p.reason))
    return results, problems


def _files(root: Path) -> list[Path]:
    if not root.is_dir():
        return [root.resolve()]
    found = os.walk(root.resolve())
    return sorted(
        Path(folder, "result.json") for folder, _, names in found if "result.json" in names
    )


def _standing(path: Path, entries: dict[Path, Standing]) -> Standing | None:
    """Return what is known of the entry that a file is part of; None for the board's own results.

    Raises:
        ValueError: the entry cannot be read, or the file is none of its cells.
    """
    folder = next((above for above in path.parents if (above / _ENTRY).is_file()), None)
    if folder is None:
        return None
    if path.parent.parent != folder / _CELLS:
        raise ValueError("lies in the folder of a submission, and is no cell of it")
    from sentinel_bench.submit import standing  # pydantic: not at import

    if folder not in entries:
        entries[folder] = standing(folder)
    return entries[folder]


def _entered(item: Result, told: Standing | None) -> list[Result]:
    """Return a result as one of its entry, if it has one; what an entry is compared with is not."""
    if told is None:
        return [item]
    label = item.defense if told.kind == "defense" else item.attack
    if label != told.subject:
        return []
    guest = replace(item, entry=told.name, kind=told.kind, level=told.level, commands=())
    name = f"{label} @ {told.name}"
    return [replace(guest, defense=name) if told.kind == "defense" else replace(guest, attack=name)]


def _load(path: Path) -> Any:
    """Read strict JSON.

    Raises:
        OSError, ValueError, RecursionError: it is none, or holds text that cannot be written.
    """
    content = path.read_bytes()
    data = json.loads(content, parse_constant=_refuse)
    if b"\\ud" in content.lower():  # half a surrogate pair
        json.dumps(data, ensure_ascii=False).encode()
    return data


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _parse(place: str, data: Any) -> Result:
    """Check the content of a file.

    Raises:
        ValueError: a part is missing or of a wrong kind.
    """
    if not isinstance(data, dict) or data.get("schema") != 1:
        raise ValueError("not a result of schema 1")
    json.dumps(data, ensure_ascii=False).encode()  # text that no file can hold is refused
    cell, scores = _mapping(data, "cell"), _mapping(data, "scores")
    seeds = _mapping(cell, "seeds")
    track, outcome = _text(cell, "track"), _text(scores, "outcome")
    if not _TRACK.fullmatch(track):
        raise ValueError(f"track {track[:80]!r} is not fit for the name of a folder")
    if outcome not in ("defended", "broken", "invalid"):
        raise ValueError(f"outcome {outcome[:80]!r} is unknown")
    if any(type(seeds.get(name)) is not int for name in _SEEDS):
        raise ValueError("cell.seeds must hold whole numbers for model, data and threat")
    attack = _text(cell, "attack")
    return Result(
        place=place,
        digest=_text(data, "digest"),
        finished=_text(data, "finished", optional=True),
        track=track,
        attack=attack,
        mode="" if attack == "none" else _text(cell, "mode"),
        knowledge=_text(cell, "knowledge", optional=True),
        defense=_text(cell, "defense"),
        code=str(cell.get("code", "")),
        tuned=json.dumps(cell.get("tuned") or {}, sort_keys=True),
        seeds=tuple(seeds[name] for name in _SEEDS),
        scenario=_text(cell, "scenario"),
        setting=_setting(cell.get("setting")),
        workers=_workers(cell.get("setting")),
        outcome=outcome,
        reason=_text(scores, "reason", optional=True),
        diverged=scores.get("diverged") is True,
        scores={name: _number(scores, name) for name in NUMBERS},
        versions=_versions(data.get("provenance")),
        commands=_commands(data.get("commands")),
    )


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} is missing or not an object")
    return value


def _text(data: Mapping[str, Any], key: str, optional: bool = False) -> str:
    value = data.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{key} is missing or not text")
    return value


def _number(scores: Mapping[str, Any], key: str) -> float | None:
    value = scores.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not -1e300 < value < 1e300:
        raise ValueError(f"scores.{key} is not a finite number")
    return float(value)


def _setting(value: Any) -> str:
    """Say the scale in words, so that a tiny setting is not read as a published one."""
    if not isinstance(value, dict):
        return "setting not named"
    get = value.get
    grid = f"{get('stages')} stages x {get('replicas')} replicas"
    return f"{get('model')}, {grid}, {get('steps')} steps, {get('device')}"


def _workers(value: Any) -> int | None:
    """Return the number of workers, None if it is not known."""
    if not isinstance(value, dict):
        return None
    stages, replicas = value.get("stages"), value.get("replicas")
    if type(stages) is not int or type(replicas) is not int or min(stages, replicas) < 1:
        return None
    return stages * replicas


def _versions(provenance: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(provenance, dict):
        return ()
    packages = provenance.get("packages")
    found = dict(packages) if isinstance(packages, dict) else {}
    found["python"] = provenance.get("python")
    return tuple((str(k), v) for k, v in sorted(found.items()) if isinstance(v, str))


def _commands(value: Any) -> tuple[str, ...]:
    items: Sequence[Any] = value if isinstance(value, list) else ()
    return tuple(item for item in items if isinstance(item, str))
