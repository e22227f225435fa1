"""Check an entry: its files, what it says of itself, its cells one by one, and all together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sentinel_bench import tracks
from sentinel_bench.errors import ConfigError
from sentinel_bench.score import DAMAGE_TOLERANCE, FALSE_BAN_TOLERANCE
from sentinel_bench.submit._cells import (
    Key,
    Record,
    baseline,
    complete,
    mixed,
    numbers_of,
    only_weights,
    packages_of,
    row_of,
)
from sentinel_bench.submit._entry import (
    ABOUT,
    RESERVED,
    Entry,
    Verification,
    agree,
    digest_of,
    level_of,
    read_entry,
    read_verification,
)
from sentinel_bench.submit._files import CONFIG, ENTRY, EVENTS, FOLDER, VERIFICATION, Files, opened
from sentinel_bench.submit._record import findings_of, read_record, settings_of
from sentinel_bench.submit.rules import (
    ALL_EVENTS,
    FINDINGS,
    LOSS_SAME,
    PROTOCOL,
    Finding,
    RefusedError,
    finding,
)
from sentinel_bench.submit.rules import EVENTS as EVENTS_OF_CELL

WARMUP = 1e-3  # relative: the honest warm-up of a seed is the same in all of its cells
_UNVERSIONED = "others cannot run a plugin of a file: install it, run without --plugin, pack again"
SPEEDS = 10.0  # factor between two measurements of one speed on a busy machine


@dataclass
class Report:
    """What is known of an entry after a check.

    Attributes:
        findings: sorted; none: the entry is accepted.
        entry: None if `entry.yaml` cannot be read.
        digest: of the cells; "" if they cannot be read.
        records: name of a cell's folder to the cell.
        verification: as it is stored.
    """

    findings: list[Finding] = field(default_factory=list)
    entry: Entry | None = None
    digest: str = ""
    records: dict[str, Record] = field(default_factory=dict)
    verification: Verification | None = None


def check(folder: Path, *, name: str | None = None, incoming: bool = False) -> Report:
    """Check an entry; nothing of it is imported or run, and nothing outside of it is read.

    Args:
        folder: of the entry.
        name: that it must have; default: that of the folder.
        incoming: whether it was just submitted: then it holds no verification.

    Raises:
        ConfigError: there is no such folder.
    """
    report = Report()
    with opened(folder) as files:
        if isinstance(files, Finding):
            report.findings.append(files)
            return report
        found = list(files.findings)
        found += islice(_content(files, report, name or folder.absolute().name), FINDINGS)
        if not files.findings:
            found += _verified(files, report, incoming)
    report.findings = sorted(set(found))
    return report


def _content(files: Files, report: Report, name: str) -> Iterator[Finding]:
    try:
        entry = report.entry = read_entry(files)
    except RefusedError as refused:
        yield finding(ENTRY, refused.rule, str(refused))
        return
    yield from _entry(entry, name)
    if entry.protocol != PROTOCOL or entry.track not in tracks.load().tracks:
        return
    left, sound = ALL_EVENTS, []
    for cell in files.cells:
        try:
            record = read_record(files, cell, min(left, EVENTS_OF_CELL))
        except RefusedError as refused:
            yield finding(refused.place, refused.rule, str(refused))
            continue
        left -= record.size
        found = list(settings_of(record, entry.track)) or list(findings_of(record, cell))
        yield from found
        report.records[cell] = record.slim(sound=not found)
        if not found:
            sound.append(report.records[cell])
    yield from _complete(entry, list(report.records.values()))
    yield from _together(sound)


def _entry(entry: Entry, name: str) -> Iterator[Finding]:
    if entry.protocol != PROTOCOL:
        yield finding(f"{ENTRY}: protocol", "protocol", f"is {entry.protocol}, and not {PROTOCOL}")
    try:
        tracks.get(entry.track)
    except ConfigError as error:
        yield finding(f"{ENTRY}: track", "entry", str(error))
    if entry.name != name or name == RESERVED:
        yield finding(f"{ENTRY}: name", "entry", f"is {entry.name!r}, in the folder {name!r}")
    if not entry.subject.isascii():
        yield finding(f"{ENTRY}: subject", "text", "names are made of ASCII")
    for key in ABOUT:
        if not getattr(entry, key).strip():
            yield finding(f"{ENTRY}: {key}", "entry", "is empty", f"fill in {key}")
    if not entry.plugin.version.strip():
        yield finding(f"{ENTRY}: plugin.version", "entry", "is empty", _UNVERSIONED)
    packages = packages_of(entry.subject)
    if entry.plugin.package not in packages:
        what = f"is {entry.plugin.package!r}, and the name says {' or '.join(packages)}"
        yield finding(f"{ENTRY}: plugin.package", "entry", what)


def _complete(entry: Entry, records: list[Record]) -> Iterator[Finding]:
    """Yield which cells are missing, there twice, of no use, or of other code."""
    by_key: dict[Key, Record] = {}
    for record in records:
        other = by_key.setdefault(record.key, record)
        if other is not record:
            yield finding(record.place, "cell-extra", f"is the same cell as {other.place}")
    on_weights = entry.kind == "attack" and only_weights(entry.subject, by_key)
    told = complete(entry.track, entry.kind, entry.subject, on_weights)
    for key in told:
        if key not in by_key:
            yield finding(FOLDER, "cell-missing", str(key))
    for key, record in by_key.items():
        if key not in told:
            yield finding(record.place, "cell-extra", f"{key} is no cell of this entry")
    for record, what in mixed(records):
        yield finding(f"{record.place}/{CONFIG}: identity", "code", what)
    for record in records[:1]:
        version = record.config["identity"]["versions"].get(entry.plugin.package)
        if version not in (None, entry.plugin.version):
            what = f"is {entry.plugin.version!r}; the runs have {version!r}"
            yield finding(f"{ENTRY}: plugin.version", "entry", what)


def _together(records: list[Record]) -> Iterator[Finding]:
    """Yield what is wrong with cells that are sound one by one."""
    by_key = {record.key: record for record in records}
    for key, record in by_key.items():
        paired = by_key.get(baseline(key.seed))
        if paired is not None and paired is not record:
            yield from _paired(record, paired)
        if key.attack == "none":
            yield from _false_bans(record)


def _paired(record: Record, paired: Record) -> Iterator[Finding]:
    """Yield where a cell does not fit to the run without attack and defense of its seed."""
    place, told = f"{record.place}/{EVENTS}", row_of(record, "baseline")
    loss, speed = (paired.result["scores"][k] for k in ("validation_loss", "tokens_per_second"))
    if told["digest"] != paired.config["digest"]:
        yield finding(place, "baseline", f"its digest is not that of {paired.place}")
    if loss is None or not abs(told["validation_loss"] - loss) <= LOSS_SAME:
        yield finding(place, "baseline", f"its loss is not the {loss} of {paired.place}")
    if not speed / SPEEDS <= told["tokens_per_second"] <= speed * SPEEDS:
        yield finding(place, "baseline", f"its speed is not about the {speed} of {paired.place}")
    excess = record.result["scores"]["excess_loss"]
    if excess is not None and excess < -DAMAGE_TOLERANCE:
        yield finding(place, "plausible", f"trains {-excess:.3f} better than undisturbed")
    for kind, key in (("cost", "step_flops"), ("eval", "tokens")):
        ours, theirs = row_of(record, kind)[key], row_of(paired, kind)[key]
        if ours != theirs:
            what = f"{kind}: {key} is {ours}, and {theirs} without attack and defense"
            yield finding(place, "plausible", what)
    yield from _same_warmup(record, paired)


def _same_warmup(record: Record, paired: Record) -> Iterator[Finding]:
    """Yield where two cells of a seed do not come from the same honest warm-up."""
    ours, theirs = ([row for row in r.events if row["type"] == "step"] for r in (record, paired))
    for one, other in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm"):
            if not abs(one[key] - other[key]) <= WARMUP * abs(other[key]):
                what = f"step {one['step']}: {key} is not that of the warm-up of {paired.place}"
                yield finding(f"{record.place}/{EVENTS}", "plausible", what)
                return


def _false_bans(record: Record) -> Iterator[Finding]:
    grid = record.cell.scenario.grid
    bans, workers = record.result["scores"]["false_bans"], grid.stages * grid.replicas
    if bans > FALSE_BAN_TOLERANCE * workers:
        what = f"{bans} of {workers} workers banned, though nobody attacks"
        yield finding(record.place, "false-bans", what)


def _verified(files: Files, report: Report, incoming: bool) -> Iterator[Finding]:
    try:
        report.digest = digest_of(files)
        told = report.verification = read_verification(files)
    except RefusedError as refused:
        yield finding(VERIFICATION, "verification", str(refused))
        return
    if told is not None and incoming:
        yield finding(VERIFICATION, "verification", "is part of a submission")
    if told is not None:
        yield from _verification(told, report)


def _verification(told: Verification, report: Report) -> Iterator[Finding]:
    """Yield where a verification is not of this entry, or contradicts itself."""
    wrong = []
    if told.entry != report.digest:
        wrong.append("is of other cells than these")
    if told.level != level_of(told.reruns, told.cells):
        wrong.append(f"the level {told.level} does not follow from the cells that were run again")
    if told.cells != len(report.records):
        wrong.append(f"is of {told.cells} cells, and there are {len(report.records)}")
    for rerun in told.reruns:
        record = report.records.get(rerun.cell)
        if record is None or numbers_of(record) != rerun.submitted:
            wrong.append(f"has other numbers of {rerun.cell}")
        if rerun.agrees != agree(rerun.submitted, rerun.found, not rerun.differing):
            wrong.append(f"{rerun.cell}: agrees does not follow from its numbers")
    yield from (finding(VERIFICATION, "verification", what) for what in wrong)
