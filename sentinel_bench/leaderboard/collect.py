"""Copies the cells of finished runs to a board: `result.json` as it is, and `curves.json`.

A board has one folder for each cell and seeds. A cell that finished later replaces the one before
it; an invalid cell never replaces a valid one. What is left out is reported with its reason.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sentinel_bench.errors import ConfigError, RunError, nearest
from sentinel_bench.leaderboard._read import Result, read
from sentinel_bench.leaderboard.curves import CURVES, curves_of
from sentinel_bench.record import CONFIG, RESULT, find_runs, read_config, write_atomically
from sentinel_bench.report._read import read_run
from sentinel_bench.score import rescore

RESULTS = "results"
LONGEST = 100
"""Characters of the name of a folder, before seeds and digest."""
_NEWER_CODE = ("cell.scenario", "cell.code", "cell.knowledge")  # how they are made has changed

Slot = tuple[Any, ...]


@dataclass(frozen=True)
class LeftOut:
    """A run that was not copied. `failed` is True if its record is at fault."""

    run: Path
    reason: str
    failed: bool = False


@dataclass
class Collected:
    """What was done: folders written, folders that were so already, folders replaced."""

    written: list[Path] = field(default_factory=list)
    unchanged: list[Path] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def collect(
    roots: Sequence[Path],
    out: Path,
    track: str | None = None,
    told: Callable[[int, int], None] | None = None,
) -> Collected:
    """Copy the cells of runs to `out/<track>/results/<cell>/`.

    Args:
        roots: run folders, or folders of run folders.
        out: parent of the folders of the tracks.
        track: only this one; default: all.
        told: is called with the number of runs done and of all.

    Raises:
        ConfigError: a root does not exist or holds no run; no run is of the track.
        RunError: a write failed.
    """
    done = Collected()
    slots, tracks = _candidates(_run_folders(roots), done)
    if track is not None and track not in tracks:
        raise ConfigError(f"no finished run is of track {track!r}{nearest(track, tracks)}")
    chosen = [s for s in sorted(slots) if track in (None, s[0])]
    boards = {name: _board(out, name) for name in {slot[0] for slot in chosen}}
    for number, slot in enumerate(chosen, start=1):
        _fill(slots[slot], boards[slot[0]].get(slot, []), out, done)
        if told is not None:
            told(number, len(chosen))
    done.left_out.sort(key=lambda item: (item.run, item.reason))
    return done


def name_of(item: Result) -> str:
    """Return the name of a cell's folder: attack, mode, defense, seeds, 8 digits of the digest."""
    words = "_".join(filter(None, [item.attack, item.mode, "vs", item.defense]))
    seeds = item.seeds[:1] if len({*item.seeds}) == 1 else item.seeds
    fit = re.sub(r"[^A-Za-z0-9._]+", "-", words)[:LONGEST].lstrip(".-")
    return f"{fit}_s{'-'.join(map(str, seeds))}_{item.digest[:8]}"


def _run_folders(roots: Sequence[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such folder of runs")
        inside = [root] if (root / CONFIG).exists() else find_runs(root)
        if not inside:
            raise ConfigError(f"{root}: holds no run, which is a folder with {CONFIG}")
        found |= {folder.resolve(): folder for folder in inside}
    return sorted(found.values())


def _candidates(
    folders: Iterable[Path], done: Collected
) -> tuple[dict[Slot, list[Result]], set[str]]:
    """Return the finished runs of each slot of a board, and all their tracks."""
    slots: dict[Slot, list[Result]] = defaultdict(list)
    for folder in folders:
        path = folder / RESULT
        if not path.exists():
            done.left_out.append(LeftOut(folder, f"not finished: it has no {RESULT}"))
            continue
        found, problems = read([path])
        done.left_out += [LeftOut(folder, p.reason, failed=True) for p in problems]
        for item in found:
            slots[_slot(item)].append(replace(item, path=path))  # as it was named
    return slots, {slot[0] for slot in slots}


def _slot(item: Result) -> Slot:
    return item.track, item.attack, item.mode, item.defense, item.scenario, item.seeds


def _age(item: Result) -> tuple[bool, str]:
    return item.outcome != "invalid", item.finished


def _board(out: Path, track: str) -> dict[Slot, list[Result]]:
    """Return what is on a board already."""
    root, slots = out / track / RESULTS, defaultdict(list)
    for item in read([root])[0] if root.is_dir() else []:
        slots[_slot(item)].append(item)
    return slots


def _fill(runs: Sequence[Result], there: Sequence[Result], out: Path, done: Collected) -> None:
    """Copy the newest run that can be read, unless the board has a better one."""
    best = max(there, key=_age, default=None)
    newest: Result | None = None
    for item in sorted(runs, key=_age, reverse=True):
        folder = item.path.parent
        reason = _worse(item, best, "the board")
        if newest is not None:
            reason = _worse(item, newest, "a run") or f"is the same cell as {newest.place}"
        if reason:
            done.left_out.append(LeftOut(folder, reason))
            continue
        try:
            curves = _curves(folder, item)
        except RunError as error:
            done.left_out.append(LeftOut(folder, str(error), failed=True))
            continue
        newest = item
        _copy(item, curves, there, out, done)


def _worse(item: Result, other: Result | None, where: str) -> str | None:
    """Say why another result is the better one; None if it is not."""
    if other is None or _age(item) >= _age(other):
        return None
    if item.outcome == "invalid" != other.outcome:
        reason = f"invalid ({item.reason or 'no reason'}), and {where} has a valid cell"
    else:
        reason = f"finished {item.finished or 'at no time'}, and {where} has a newer cell"
    return f"{reason}, {other.place}"


def _curves(folder: Path, item: Result) -> str:
    """Return the text of `curves.json`.

    Raises:
        RunError: the record cannot be read, or is not what its result says.
    """
    if read_config(folder)["digest"] != item.digest:
        raise RunError(f"{RESULT} has another digest than {CONFIG}")
    wrong = [
        line
        for line in rescore(folder)[1]
        if ": stored nothing," not in line and not line.startswith(_NEWER_CODE)
    ]
    if wrong:
        raise RunError(
            f"{RESULT} says otherwise than the events ({wrong[0]}); "
            "'sentinel-bench run --resume' scores it anew"
        )
    content = curves_of(read_run(folder))
    return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"


def _copy(item: Result, curves: str, there: Sequence[Result], out: Path, done: Collected) -> None:
    target = out / item.track / RESULTS / name_of(item)
    try:
        texts = {CURVES: curves, RESULT: item.path.read_text(encoding="utf-8")}
        if all(_holds(target / name, text) for name, text in texts.items()):
            done.unchanged.append(target)
        else:
            target.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                write_atomically(target / name, text)
            done.written.append(target)
        for old in there:
            if old.path.parent != target.resolve():
                _remove(old.path.parent)
                done.removed.append(old.path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{target}: cannot be written: {reason}; choose another folder") from error


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _remove(folder: Path) -> None:
    """Remove a cell, and its folder if nothing else is in it."""
    for name in (RESULT, CURVES):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
