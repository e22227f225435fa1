"""`sentinel-bench suite`: all cells of a track, over several processes, resumed where they were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.table import Table

from sentinel_bench import batch, registry, suite, tracks
from sentinel_bench.batch import Entry
from sentinel_bench.batch_worker import Work
from sentinel_bench.cli import _options, _output
from sentinel_bench.cli._live import duration, look_up, work_off
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError

SIDE_BY_SIDE = 6
"""More defenses than that are not printed side by side."""


@click.command("suite")
@click.argument("track")
@click.option("--attack", "attacks", multiple=True, help="only this; repeatable  [default: all]")
@click.option(
    "--defense", "defenses", multiple=True,
    help="only this, beside none; repeatable  [default: those of the track's board]",
)  # fmt: skip
@click.option("--mode", "modes", multiple=True, help="only this; repeatable  [default: all]")
@click.option("--seeds", help="e.g. 0-2 or 0,3  [default: those of the track]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="another scenario")
@click.option("--device", help="cpu or cuda")
@click.option("--jobs", type=click.IntRange(1), help="cells at a time  [default: one for each CPU]")
@click.option("--shard", default="1/1", metavar="K/N", help="only the K-th of N parts of the cells")
@click.option(
    "--only-failed", is_flag=True, help="only cells that have failed in --out, and no new ones"
)
@click.option(
    "--unprotected/--no-unprotected", default=True, show_default=True,
    help="also run each attack without a defense",
)  # fmt: skip
@_options.plugin_option
@_options.placed(out=None)
def suite_(track: str, **options: Any) -> int:
    """Run all cells of TRACK: every attack against every defense, with all seeds.

    What OUT has already under an equal digest is taken. A cell that fails is listed with its
    reason, and stops no other. The default OUT is runs/TRACK; shards are merged by copying their
    run folders into one.

    Example: sentinel-bench suite core --defense sentinel --seeds 0 --jobs 2
    """
    shard = _shard(options["shard"])
    plan = _plan(track, options)
    placement = _options.placement(options)
    if placement.torchrun:
        raise ConfigError("suite starts its own processes: use --processes instead of torchrun")
    suite.check_placement(plan, placement)
    out = options["out"] or Path("runs") / track
    jobs = options["jobs"] or _options.usual_jobs(placement.processes)
    entries, tokens = look_up(plan, out, shard)
    if options["only_failed"]:
        entries = batch.only_failed(entries, out)
    if options["dry_run"]:
        _estimate(entries, plan, tokens, jobs, as_json=options["as_json"])
        return 0
    task = Work(out, (_output.command(),), options["threads"] or 1, placement)
    work_off(entries, plan, task, jobs)
    _print(entries, out, as_json=options["as_json"])
    return 0 if all(e.state != "failed" for e in entries) else 1


def _plan(name: str, options: dict[str, Any]) -> suite.Plan:
    track = tracks.get(name)
    for key, option in (("seeds", "--seeds"), ("threat.mode", "--mode")):
        if any(s.strip().startswith(key) for s in options["settings"]):
            raise ConfigError(f"--set {key} would be overruled by the track: use {option}")
    scenario = _options.changed(name, options["settings"], options["device"])
    attacks = _options.components(options["attacks"], track.attacks)
    defenses = _options.components(options["defenses"], track.board)
    defenses = [d for d in defenses if d != suite.NONE]
    modes = _options.modes(options["modes"]) or track.modes
    seeds = _options.parse_seeds(options["seeds"]) if options["seeds"] else track.seeds
    parts = [(attacks, defenses)]
    if track.every_plugin and not options["attacks"] and not options["defenses"]:
        every_attack, every_defense = (
            [Component(name=n) for n in kind.names() if n != "none"]
            for kind in (registry.attacks, registry.defenses)
        )
        first = next(a for a in attacks if a != suite.NONE)
        parts += [(every_attack, [Component(name=tracks.DEFENSE)]), ([first], every_defense)]
    tuned = _options.tuned(name, scenario, [d for _, some in parts for d in some])
    plans = [
        suite.plan_track(scenario, modes, seeds, *part, tuned, unprotected=options["unprotected"])
        for part in parts
    ]
    return suite.share_warmups(suite.Plan([group for plan in plans for group in plan.groups]))


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--shard {text!r}: write K/N with K from 1 to N, for example 1/4")
    return int(match[1]), int(match[2])


def _estimate(
    entries: Sequence[Entry], plan: suite.Plan, tokens: Any, jobs: int, *, as_json: bool
) -> None:
    """Say how many cells there are, and how long they will take."""
    left = [e for e in entries if not e.over]
    seconds, source = batch.seconds_left(entries, jobs), "by the cells that are there"
    if seconds is None and left:
        step = suite.seconds_per_step(plan.groups[0][0], tokens)
        train = plan.groups[0][0].train
        warmups = len({e.group for e in left}) * train.warmup_steps
        steps = warmups + sum(e.cell.scenario.train.steps - train.warmup_steps for e in left)
        seconds, source = steps * step / jobs, f"at least: {step:.3g} s a step without a defense"
    names = dict.fromkeys(e.cell.protection for e in left)
    numbers = {name: sum(e.cell.protection == name for e in left) for name in names}
    data = {
        "cells": len(entries),
        "reused": len(entries) - len(left),
        "to_run": len(left),
        "warmups": len({e.group for e in left}),
        "jobs": jobs,
        "seconds": seconds,
        "estimate": source,
        "by_protection": numbers,
    }
    if as_json:
        _output.print_json(data)
        return
    click.echo(f"cells: {data['cells']}, {data['reused']} of them reused, {len(left)} to run")
    for name, number in numbers.items():
        click.echo(f"  {name}: {number}")
    if left:
        click.echo(f"warm-ups: {data['warmups']}; jobs: {jobs}")
        click.echo(f"time: {duration(seconds or 0)} ({source})")


def _print(entries: Sequence[Entry], out: Path, *, as_json: bool) -> None:
    """Print a table of means over seeds, and what has failed."""
    if as_json:
        told = (
            {"folder": e.folder and str(e.folder), "state": e.state, "reason": e.reason}
            for e in entries
        )
        results = (e.result or {} for e in entries)
        _output.print_json([one | two for one, two in zip(told, results, strict=True)])
        return
    console = _output.stdout()
    console.print("F1 / excess loss, means over seeds")
    console.print(_table(entries))
    failed = [e for e in entries if e.state == "failed"]
    if failed:
        console.print(f"\n{len(failed)} failed; the same command runs them again")
        for entry in failed:
            console.print(f"{suite.title(entry.cell)}: {entry.reason}", soft_wrap=True)
    console.print(f"\nrecords: {out}", soft_wrap=True)


def _table(entries: Sequence[Entry]) -> Table:
    """Return attacks by defenses; with more defenses than fit side by side, a row for each cell."""
    columns = list(dict.fromkeys(e.cell.protection for e in entries))
    rows = batch.by_attack(entries)
    if len(columns) <= SIDE_BY_SIDE:
        table = _output.plain_table(["attack", *columns])
        for name, row in rows.items():
            table.add_row(name, *(_means(row.get(c, [])) for c in columns))
        return table
    table = _output.plain_table(["attack", "defense", "F1 / excess loss"])
    table.columns[1].justify = "left"
    for name, row in rows.items():
        for column, some in row.items():
            table.add_row(name, column, _means(some))
    return table


def _means(entries: Sequence[Entry]) -> str:
    scores = [e.result["scores"] for e in entries if e.result and e.state != "failed"]
    if not scores:
        return "failed" if entries else ""
    f1 = fmean(s["f1"] for s in scores)
    excess = [s["excess_loss"] for s in scores if s["excess_loss"] is not None]
    return f"{f1:.0f} / {fmean(excess):+.3f}" if excess else f"{f1:.0f} / -"
