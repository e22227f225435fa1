"""Make an entry of finished runs: equal runs give equal bytes, and nothing is left half-made."""

from __future__ import annotations

import gzip
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from sentinel_bench import record as runs
from sentinel_bench import tracks
from sentinel_bench.config import Cell
from sentinel_bench.errors import ConfigError, RunError, SentinelBenchError
from sentinel_bench.provenance import to_json
from sentinel_bench.score import result
from sentinel_bench.submit._cells import (
    Key,
    Record,
    complete,
    foreign,
    mixed,
    of_subject,
    only_weights,
    packages_of,
    subjects,
)
from sentinel_bench.submit._check import check
from sentinel_bench.submit._entry import ABOUT, RESERVED, Kind
from sentinel_bench.submit._files import CONFIG, ENTRY, EVENTS, FOLDER, RESULT
from sentinel_bench.submit.rules import PROTOCOL, Finding, finding

_OF_CONFIG = ("cell", "defense", "identity", "digest", "commands")


@dataclass
class Packed:
    """What became of runs.

    Attributes:
        folder: the entry; None if there are complaints.
        complaints: why it was not written.
        findings: what still has to be mended in it.
        left_out: runs that are not of the entry.
    """

    folder: Path | None = None
    complaints: list[Finding] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)


def pack(
    paths: Sequence[Path],
    track: str,
    name: str,
    out: Path,
    kind: Kind = "defense",
    about: dict[str, str] | None = None,
) -> Packed:
    """Write the entry `<out>/<track>/<name>` from finished runs of one defense or one attack.

    Args:
        paths: run folders, or folders of run folders.
        track: whose complete set of cells it is.
        name: of the entry: small letters, digits and hyphens.
        out: parent of the folders of the tracks.
        kind: what the runs are about.
        about: `ABOUT` in words; what is missing is left empty in `entry.yaml`.

    Raises:
        ConfigError: an unknown track, a name that is none, runs of several subjects, or a folder
            that is there already or cannot be written.
    """
    tracks.get(track)
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", name) or name == RESERVED:
        raise ConfigError(f"--name {name!r}: use small letters, digits and hyphens")
    target = out / track / name
    if target.is_symlink() or (target.exists() and not (target.is_dir() and _empty(target))):
        raise ConfigError(f"{target}: is there already; remove it or choose another --name")
    packed, unread = Packed(), list[Finding]()
    found = list(_read(paths, unread))
    subject = _subject(kind, found)
    chosen = _choose(found, track, kind, subject, packed)
    packed.complaints += [finding(r.place, "code", what) for r, what in mixed(chosen.values())]
    if packed.complaints:  # what could not be read may be what is missing
        packed.complaints += unread
    else:
        entry = _entry(track, name, kind, subject, chosen, about or {})
        packed.findings = _write(target, entry, list(chosen.values()))
        packed.folder = target
    return packed


def _empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


# The runs.


def _read(paths: Iterable[Path], unread: list[Finding]) -> Iterator[Record]:
    """Yield the runs, each once and those of one cell with the newest last."""
    folders: dict[Path, None] = {}
    for path in paths:
        below = [path] if (path / runs.CONFIG).exists() else runs.find_runs(path)
        if not below:
            raise ConfigError(f"{path}: holds no run; name run folders, or a folder of them")
        folders |= dict.fromkeys(folder.absolute() for folder in below)
    found = []
    for folder in folders:
        try:
            found.append(_record(folder))
        except RunError as error:
            unread.append(finding(folder.name, "cell-invalid", str(error)))
    yield from sorted(found, key=lambda r: (str(r.result["finished"]), Path(r.place).name))


def _record(folder: Path) -> Record:
    """Read a run folder, and score it anew.

    Raises:
        RunError: a file of it cannot be read.
    """
    config, stored = runs.read_config(folder), runs.read_result(folder)
    if stored is None:
        raise RunError("the run was not finished; run it again")
    events = runs.read_events(folder)
    try:
        cell = Cell.model_validate(config["cell"])
        scored = result(config, events, stored["provenance"])
        kept = {key: config[key] for key in _OF_CONFIG}
    except (KeyError, TypeError, ValueError, SentinelBenchError) as error:
        raise RunError(f"is a run of another version: {error!r}; run it again") from error
    return Record(str(folder), kept, cell, events, scored, 0)


def _subject(kind: Kind, found: Sequence[Record]) -> str:
    """Return what all runs are about.

    Raises:
        ConfigError: there is none, or there are several.
    """
    names = subjects(kind, [record.cell for record in found])
    if len(names) != 1:
        told = f"several {kind}s: {', '.join(names)}" if names else f"no {kind}"
        raise ConfigError(f"the runs are of {told}; name runs of one, or see --kind")
    return names[0]


def _choose(
    found: Sequence[Record], track: str, kind: Kind, subject: str, packed: Packed
) -> dict[Key, Record]:
    """Return the complete set of a track; complain of what is missing or cannot be taken."""
    modes = [record.key for record in found]
    told = complete(track, kind, subject, kind == "attack" and only_weights(subject, modes))
    chosen: dict[Key, Record] = {}
    failed: dict[Key, Finding] = {}
    for record in found:
        key, name = record.key, Path(record.place).name
        if not (record.cell.is_baseline or of_subject(kind, subject, record.cell)):
            packed.left_out.append(Path(record.place))
            continue
        other = foreign(track, record.cell)
        if other:
            packed.complaints.append(finding(name, "settings", "; ".join(other)))
        elif record.result["scores"]["outcome"] == "invalid":
            failed[key] = finding(
                name, "cell-invalid", f"{key}: {record.result['scores']['reason']}"
            )
        elif key not in told:
            packed.left_out.append(Path(record.place))
        else:
            chosen[key] = replace(record, place=name)
    for key in told:
        if key not in chosen:
            missing = finding("runs", "cell-missing", str(key))
            packed.complaints.append(failed.get(key, missing))
    return {key: chosen[key] for key in told if key in chosen}


# The entry.


def _entry(
    track: str,
    name: str,
    kind: Kind,
    subject: str,
    chosen: dict[Key, Record],
    about: dict[str, str],
) -> dict[str, Any]:
    package = packages_of(subject)[0]
    versions = next(iter(chosen.values())).config["identity"]["versions"]
    try:
        ours = versions.get(package) or version(package)
    except PackageNotFoundError:
        ours = ""
    return {
        "schema": 1,
        "protocol": PROTOCOL,
        "track": track,
        "name": name,
        "kind": kind,
        "subject": subject,
        **{key: about.get(key, "") for key in ABOUT},
        "plugin": {"package": package, "version": ours},
        "level": "self-reported",
    }


def _write(target: Path, entry: dict[str, Any], records: list[Record]) -> list[Finding]:
    """Write the folder, all of it or nothing; return what `check` finds in it.

    Raises:
        ConfigError: it cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        (temporary / FOLDER).mkdir(parents=True)
        text = yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)
        (temporary / ENTRY).write_text(text, encoding="utf-8", newline="\n")
        for record in records:
            _write_cell(temporary / FOLDER / record.name, record)
        findings = check(temporary, name=target.name).findings
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror or error}; choose another --out"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return findings


def _write_cell(folder: Path, record: Record) -> None:
    folder.mkdir()
    for name, content in ((CONFIG, record.config), (RESULT, record.result)):
        text = to_json(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    (folder / EVENTS).write_bytes(compact(record.events))


def compact(events: Iterable[dict[str, Any]]) -> bytes:
    """Return events as gzip'd JSON lines, without the statistics of flags, which score nothing."""
    rows = ({k: v for k, v in runs.encode(row).items() if k != "statistics"} for row in events)
    lines = "".join(f"{to_json(row, separators=(',', ':'))}\n" for row in rows)
    return gzip.compress(lines.encode(), compresslevel=9, mtime=0)
