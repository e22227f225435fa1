"""A run folder as its page needs it: settings, rows of a sound form, scores, partners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sentinel_bench.config import Cell
from sentinel_bench.errors import ConfigError, RunError, SentinelBenchError
from sentinel_bench.record import (
    CONFIG,
    find_finished,
    find_runs,
    read_config,
    read_events,
    read_result,
)
from sentinel_bench.report._numbers import count
from sentinel_bench.score import rescore, score
from sentinel_bench.soundness import MAX_WORKERS, Row, misfit, rows_of
from sentinel_bench.trace import Boundary, read_trace

_AT_WORKER = ("act", "flag", "ban", "tamper")


@dataclass
class Run:
    """A run that is reported.

    Attributes:
        folder: of the record.
        config: content of `config.json`.
        cell: its settings.
        rows: events in order, without those that do not fit; the others may contradict each other.
        scores: of all events; see `score`.
        result: content of `result.json`; None if there is none.
        trace: every statistic of every tested worker; None if the run was not traced.
        notes: what is wrong with the record, in sentences.
    """

    folder: Path
    config: Mapping[str, Any]
    cell: Cell
    rows: Sequence[Row]
    scores: Mapping[str, Any]
    result: Mapping[str, Any] | None
    trace: Sequence[Boundary] | None = None
    notes: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Row]:
        """Return the rows of one kind, in order."""
        return rows_of(self.rows, kind)

    @property
    def start(self) -> Row | None:
        """The start event; None if there is none, or not one that can be used."""
        return next(iter(self.of("start")), None)

    @property
    def validation_loss(self) -> float | None:
        """The last evaluation, finite or not; None if there was none."""
        return next((row["loss"] for row in reversed(self.of("eval"))), None)


@dataclass(frozen=True)
class Partner:
    """A run that belongs beside the reported one.

    Attributes:
        role: what it has in place of attack and defense.
        run: None if it was not found.
        why: why it is missing.
        self: True if it is the reported run itself.
    """

    role: str
    run: Run | None
    why: str = ""
    self: bool = False


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ConfigError: it is no run folder.
        RunError: settings or events cannot be read.
    """
    require_run(folder)
    config, events = read_config(folder), read_events(folder)
    try:
        cell = Cell.model_validate(config.get("cell"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ["cell", *first["loc"]]))
        raise RunError(f"{folder / CONFIG}: {where}: {first['msg']}") from error
    scores, notes = score(events), []
    rows = _fitting(events)
    if len(rows) < len(events):
        notes.append(f"{len(events) - len(rows)} of {len(events)} events have a wrong form.")
    result = _result(folder, notes)
    run = Run(folder, config, cell, rows, scores, result, notes=notes)
    try:
        run.trace = read_trace(folder)
    except RunError as error:
        notes.append(f"The trace is left out: {error}.")
    return run


def require_run(folder: Path) -> None:
    """Refuse what is no run folder.

    Raises:
        ConfigError: it has no settings; with run folders that are in it.
    """
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder}: no run folder, it has no {CONFIG}{_inside(folder)}")


def steps_of(run: Run) -> tuple[int, int]:
    """Return the first step after the warm-up, and the number of all steps."""
    start, train = run.start, run.cell.scenario.train
    if start is None:
        return train.warmup_steps, train.steps
    return start["warmup_steps"], start["steps"]


def partners(run: Run) -> list[Partner]:
    """Return the runs of the same scenario and seeds: without anything, unprotected, and `run`.

    The first is named by the run's `baseline` event. The second has the same identity but for the
    defense and the aggregator. Both are looked for among the finished runs beside the folder.
    """
    cell = run.cell
    role = f"{cell.attack.label()} vs {cell.protection}"
    if cell.is_baseline:
        return [Partner("no attack, no defense", run, self=True)]
    finished = find_finished(run.folder.resolve().parent)
    found = [_named("no attack, no defense", _baseline(run), finished)]
    if cell.attack.name != "none" and cell.protection != "none":
        found.append(_unprotected(run, finished.values()))
    return [*found, Partner(role, run, self=True)]


def _named(role: str, digest: str | None, finished: Mapping[str, Path]) -> Partner:
    if digest is None:
        return Partner(role, None, "the record names none")
    if digest not in finished:
        return Partner(role, None, f"no finished run beside this one has the digest {digest[:12]}")
    return _opened(role, finished[digest])


def _unprotected(run: Run, folders: Any) -> Partner:
    role = f"{run.cell.attack.label()}, no defense"
    rest = _without_protection(run.config["identity"])
    for folder in reversed([*folders]):
        config = read_config(folder)
        if _without_protection(config["identity"]) != rest:
            continue
        try:
            other = Cell.model_validate(config.get("cell"))
        except ValidationError:  # of another version, with other settings
            continue
        if other.protection == "none":
            return _opened(role, folder)
    return Partner(role, None, "no finished run beside this one differs in the defense alone")


def _opened(role: str, folder: Path) -> Partner:
    try:
        return Partner(role, read_run(folder))
    except SentinelBenchError as error:
        return Partner(role, None, str(error))


def _baseline(run: Run) -> str | None:
    digest = next((row.get("digest") for row in run.of("baseline")), None)
    return digest if isinstance(digest, str) else None


def _without_protection(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in identity.items() if k not in ("defense", "aggregator")}


def _fitting(events: Sequence[Row]) -> list[Row]:
    """Return the rows that have the form that their kind asks for, within the grid."""
    rows = [row for row in events if misfit(row) is None or row.get("type") == "end"]
    starts = [row for row in rows_of(rows, "start") if _usable(row)]
    if not starts:
        return [row for row in rows if row.get("type") not in ("start", *_AT_WORKER)]
    start = starts[0]
    return [
        row
        for row in rows
        if (row["type"] != "start" or row is start)
        and (
            row["type"] not in _AT_WORKER
            or (row["stage"] < start["stages"] and row["replica"] < start["replicas"])
        )
    ]


def _usable(start: Row) -> bool:
    return bool(1 <= start["stages"] * start["replicas"] <= MAX_WORKERS)


def _result(folder: Path, notes: list[str]) -> Mapping[str, Any] | None:
    """Return what `result.json` says, and note where that is not what the events say."""
    try:
        result = read_result(folder)
        differences = rescore(folder)[1] if result is not None else []
    except RunError as error:
        notes.append(f"The result is left out: {error}.")
        return None
    if result is None:
        notes.append(
            "result.json is missing: the run is still going on, or was killed. "
            "What is shown comes from the events so far."
        )
    if differences:
        notes.append(
            f"result.json says otherwise than the events in {count(len(differences), 'place')} "
            f"(first {differences[0]}). What is shown comes from the events."
        )
    return result


def _inside(folder: Path) -> str:
    """Say which run folders there are below a folder."""
    inside = [str(path) for path in find_runs(folder)[-3:]]
    return f"; name one in it, such as {' or '.join(inside)}" if inside else ""
