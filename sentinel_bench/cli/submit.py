"""`sentinel-bench submit`: entries of the leaderboards, packed, checked and verified."""

from __future__ import annotations

import secrets
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from sentinel_bench.cli import _output

if TYPE_CHECKING:
    from sentinel_bench.submit import Finding

ENTRY = click.argument("folder", metavar="ENTRY_DIR", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")


@click.group()
def submit() -> None:
    """Submissions to the leaderboards; leaderboards/RULES.md has the rules."""


@submit.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--track", required=True, help="whose complete set of cells the runs are")
@click.option("--name", required=True, metavar="ENTRY", help="small letters, digits and hyphens")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("leaderboards"), show_default=True,
    help="the entry is written to OUT/TRACK/ENTRY",
)  # fmt: skip
@click.option(
    "--kind", type=click.Choice(["defense", "attack"]), default="defense", show_default=True,
    help="what the runs are about",
)  # fmt: skip
@click.option("--what", default="", help="one line about it")
@click.option("--who", default="", help="authors")
@click.option("--contact", default="", help="an address for questions")
@click.option("--paper", default="", help="address or 'none'")
@click.option("--licence", default="", help="of the plugin")
@JSON
def pack(as_json: bool, **options: Any) -> int:
    """Make an entry of the finished runs of one defense or one attack.

    RUNS are run folders, or folders of these. Exit status 1 if a cell is missing or cannot be
    taken; then nothing is written. What is left to fill in is listed, with exit status 1 too.
    """
    from sentinel_bench import submit as entries

    about = {key: options[key] for key in entries.ABOUT}
    done = entries.pack(
        options["runs"], options["track"], options["name"], options["out"], options["kind"], about
    )
    findings = done.complaints or done.findings
    if as_json:
        folder = None if done.folder is None else str(done.folder)
        _output.print_json({"folder": folder, "findings": [f.data() for f in findings]})
    else:
        _print(findings)
        if done.left_out:
            click.echo(f"left out: {len(done.left_out)} runs that are not of this entry", err=True)
        click.echo(_next(done.folder, mend=bool(findings)), err=True)
    return 1 if findings else 0


@submit.command()
@ENTRY
@click.option("--incoming", is_flag=True, help="it was just submitted: nobody has verified it")
@JSON
def check(folder: Path, incoming: bool, as_json: bool) -> int:
    """Check the entry in ENTRY_DIR against all rules; exit status 1 if there are findings.

    Every number is recomputed from the events. Nothing of the entry is imported or run, and
    nothing outside of its folder is read.
    """
    from sentinel_bench import submit as entries

    report = entries.check(folder, incoming=incoming)
    if as_json:
        level = report.verification.level if report.verification else "self-reported"
        _output.print_json(
            {
                "digest": report.digest,
                "cells": len(report.records),
                "level": level,
                "findings": [f.data() for f in report.findings],
            }
        )
    else:
        _print(report.findings)
        click.echo(_count(report.findings, f"in {len(report.records)} cells"), err=True)
    return 1 if report.findings else 0


@submit.command()
@ENTRY
@click.option("--sample", type=click.IntRange(1), default=3, show_default=True, help="how many")
@click.option("--all", "everything", is_flag=True, help="run all cells again")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1),
    help="with the digest of the entry, it draws the sample  [default: a new one]",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path),
    help="folder of the new runs; finished ones in it are reused  [default: a temporary one]",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="threads of torch")
@JSON
def verify(
    folder: Path,
    sample: int,
    everything: bool,
    seed: int | None,
    out: Path | None,
    threads: int | None,
    as_json: bool,
) -> int:
    """Run cells of the entry in ENTRY_DIR again, with the plugins that are installed here.

    What came of it is written to ENTRY_DIR/verification.json. Exit status 1 if a cell differs.
    """
    from sentinel_bench import submit as entries

    with ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sentinel-bench-")))
        done, findings = entries.verify(
            folder,
            out,
            _output.Reporter(),
            seed=secrets.randbits(32) if seed is None else seed,
            sample=None if everything else sample,
            threads=threads,
        )
    if done is None:
        _output.print_json({"findings": [f.data() for f in findings]}) if as_json else _print(
            findings
        )
        click.echo(_count(findings, "nothing was run"), err=True)
        return 1
    if as_json:
        _output.print_json(done.model_dump(mode="json", by_alias=True))
    else:
        _output.stdout().print(_reruns(done.reruns))
        click.echo(f"{done.level}: {len(done.reruns)} of {done.cells} cells run again", err=True)
    return 0 if all(rerun.agrees for rerun in done.reruns) else 1


def _next(folder: Path | None, mend: bool) -> str:
    """Say what was written, and what to do with it."""
    if folder is None:
        return "nothing was written"
    first = f"mend {shlex.quote(str(folder / 'entry.yaml'))}, then: " if mend else ""
    command = f"sentinel-bench submit check {shlex.quote(str(folder))}"
    return f"written: {folder}\nnext: {first}{command}"


def _count(findings: Sequence[Finding], where: str) -> str:
    n = len(findings)
    return f"{n or 'no'} finding{'s' * (n != 1)}; {where}"


def _print(findings: Sequence[Finding]) -> None:
    if not findings:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "rule", "what is wrong", "remedy"):
        table.add_column(name, overflow="fold", no_wrap=name == "rule")
    for item in findings:
        table.add_row(item.place, item.rule, item.what, item.remedy)
    _output.stdout().print(table)


def _reruns(reruns: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cell", "code", "bans", "F1", "val. loss", "agrees"):
        table.add_column(name, overflow="fold")
    for rerun in reruns:
        one, other = rerun.submitted, rerun.found
        same = "the same" if one.bans == other.bans else f"{len(one.bans)} -> {len(other.bans)}"
        table.add_row(
            rerun.cell,
            "equal" if not rerun.differing else ", ".join(rerun.differing[:4]),
            same,
            f"{one.f1} -> {other.f1}",
            f"{one.validation_loss} -> {other.validation_loss}",
            "yes" if rerun.agrees else "no",
        )
    return table
