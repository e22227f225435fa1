"""Run cells of an entry again, on this machine with the installed plugins, and compare.

Which cells is drawn from a seed and the digest of the entry, so that who submits cannot choose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sentinel_bench import suite
from sentinel_bench.config import Cell, Component, Scenario
from sentinel_bench.errors import RunError
from sentinel_bench.provenance import differing, provenance, to_json
from sentinel_bench.record import read_config, read_events, write_atomically
from sentinel_bench.submit._cells import Record, numbers_of
from sentinel_bench.submit._check import Report, check
from sentinel_bench.submit._entry import Rerun, Verification, agree, level_of
from sentinel_bench.submit._files import VERIFICATION
from sentinel_bench.submit.rules import PROTOCOL, Finding


def draw(report: Report, seed: int, sample: int | None) -> list[str]:
    """Return the names of the cells that are run again; their baselines are run beside them.

    Args:
        report: of the entry.
        seed: chosen after the entry was submitted.
        sample: how many; None: all.
    """

    def lot(name: str) -> str:
        return hashlib.sha256(f"{seed} {report.digest} {name}".encode()).hexdigest()

    names = [name for name, record in report.records.items() if not record.cell.is_baseline]
    return sorted(names, key=lot)[:sample]


def verify(
    folder: Path,
    out: Path,
    progress: suite.Progress,
    *,
    seed: int,
    sample: int | None,
    threads: int | None = None,
) -> tuple[Verification | None, list[Finding]]:
    """Run cells again, and write what came of it to `verification.json`.

    Args:
        folder: of the entry.
        out: folder for the new runs; finished ones there are taken if nothing has changed.
        progress: is told what happens.
        seed, sample: see `draw`.
        threads: of torch.

    Returns:
        The verification; None if the entry itself has findings, and these.

    Raises:
        ConfigError: a plugin that is not installed, or `out` cannot be used; nothing was run.
        RunError: the verification cannot be written.
        KeyboardInterrupt: what is finished in `out` stays; nothing is written to the entry.
    """
    report = check(folder)
    findings = [found for found in report.findings if found.rule != "verification"]
    if findings:
        return None, findings
    plan = _plan([report.records[name].cell for name in draw(report, seed, sample)])
    finished = suite.run(
        plan, out, progress, commands=["sentinel-bench submit verify"], resume=True, threads=threads
    )
    names = {_place(record.cell): name for name, record in report.records.items()}
    new = {names[_place(done.cell)]: done for done in finished}
    reruns = [_compare(name, report.records[name], done) for name, done in sorted(new.items())]
    cells = len(report.records)
    verification = Verification(
        schema=1,
        protocol=PROTOCOL,
        entry=report.digest,
        level=level_of(reruns, cells),
        seed=seed,
        cells=cells,
        reruns=reruns,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        provenance=provenance(),
    )
    _save(folder, verification)
    return verification, []


def _plan(cells: Sequence[Cell]) -> suite.Plan:
    """Return a plan of these cells, each beside its baseline."""
    groups: dict[Scenario, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.scenario, []).append(cell)
    plan = suite.Plan()
    for scenario, same in groups.items():  # of one defense, or of one attack: no cell too many
        made = suite.make_plan(
            [scenario],
            _each(cell.attack for cell in same),
            _each(cell.defense for cell in same),
            {cell.defense.name: cell.tuned for cell in same},
            _each(cell.aggregator for cell in same),
            unprotected=False,
        )
        plan.groups += made.groups
    return plan


def _each(components: Iterable[Component]) -> list[Component]:
    return list({component.label(): component for component in components}.values())


def _place(cell: Cell) -> tuple[str, ...]:
    """Return what tells the cells of an entry apart; baselines do not differ by their mode."""
    mode = "" if cell.attack.name == "none" else cell.scenario.threat.mode
    return cell.attack.label(), cell.protection, mode, str(cell.scenario.seeds.model)


def _compare(name: str, record: Record, done: suite.Finished) -> Rerun:
    config = read_config(done.folder)
    fresh = Record("", config, done.cell, read_events(done.folder), done.result, 0)
    submitted, found = numbers_of(record), numbers_of(fresh)
    keys = differing(record.config["identity"], config["identity"])
    return Rerun(
        cell=name,
        code=done.result["cell"]["code"],
        differing=keys,
        submitted=submitted,
        found=found,
        agrees=agree(submitted, found, not keys),
    )


def _save(folder: Path, verification: Verification) -> None:
    path = folder / VERIFICATION
    text = to_json(verification.model_dump(mode="json", by_alias=True), indent=2)
    try:
        write_atomically(path, text + "\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
