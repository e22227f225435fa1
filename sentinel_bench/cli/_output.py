"""What the commands share: progress on stderr, plans, tables and JSON on stdout."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import click
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sentinel_bench import registry
from sentinel_bench.config import Cell
from sentinel_bench.suite import Finished, Plan

PLAIN_WIDTH = 140
"""Width of a table where there is no terminal."""
PLAIN_EVERY = 5.0
"""Seconds between two lines of progress where there is no terminal."""


def print_json(data: Any) -> None:
    """Print data for another program."""
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def command() -> str:
    """Return what the user typed, but for `--out`: the place is of this machine alone."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["sentinel-bench", *kept])


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Print what would be run: the scenario, the seeds, and the cells with all their settings."""
    scenario = plan.groups[0][0]
    data = {
        "scenario": scenario.model_dump(mode="json"),
        "seeds": [s.seeds.model_dump() for s, _ in plan.groups],
        "cells": [_describe(cell) for cell in plan.groups[0][1]],
    }
    if as_json:
        print_json(data)
    else:
        click.echo(yaml.safe_dump(data, sort_keys=False), nl=False)


def _describe(cell: Cell) -> dict[str, Any]:
    attack = registry.attacks.params(cell.attack)
    defense = registry.defenses.params(cell.resolved_defense)
    rule = registry.aggregators.params(cell.aggregator)
    return {
        "attack": {"name": cell.attack.name, **attack.model_dump(mode="json", by_alias=True)},
        "defense": {"name": cell.defense.name, **defense.model_dump(mode="json", by_alias=True)},
        "aggregator": {"name": cell.aggregator.name, **rule.model_dump(mode="json")},
    }


def stdout() -> Console:
    """Return a console that never cuts a table where there is no terminal."""
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        return console
    return Console(width=PLAIN_WIDTH, highlight=False, markup=False)


class Reporter:
    """Progress with an ETA on stderr: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._label, self._total, self._done = "", 0, 0
        self._started = self._told = 0.0

    def say(self, text: str) -> None:
        """Show a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start(self, label: str, total: int) -> None:
        """Begin a piece of work of `total` steps."""
        self._label, self._total, self._done = label, total, 0
        self._started = self._told = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._bar.add_task(label, total=total)

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
            return
        now = time.monotonic()
        if now - self._told >= PLAIN_EVERY:
            self._told = now
            left = (now - self._started) / self._done * (self._total - self._done)
            self.say(f"{self._label}: step {self._done} of {self._total}, {left:.0f} s left")

    def finish(self) -> None:
        """The piece of work is over."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._label and self._done:
            self.say(f"{self._label}: done in {time.monotonic() - self._started:.0f} s")
        self._label, self._done = "", 0


def plain_table(columns: Sequence[str]) -> Table:
    """Return an empty table; the first column is text, the others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def result_table(finished: list[Finished]) -> Table:
    """Return one row per cell."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    seeds = {cell.cell.scenario.seeds.model for cell in finished}
    columns = ["attack", "defense", *(["seed"] if len(seeds) > 1 else [])]
    columns += ["precision", "recall", "F1", "found after", "false bans", "val. loss"]
    columns += ["excess", "tokens/s", "relative", "outcome"]
    for name in columns:
        text = name in ("attack", "defense")
        table.add_column(
            name, justify="left" if text else "right", overflow="fold", no_wrap=not text
        )
    for item in finished:
        table.add_row(*_row(item, seeds=len(seeds) > 1))
    return table


def _row(item: Finished, *, seeds: bool) -> list[str]:
    s = item.result["scores"]
    baseline = item.cell.is_baseline
    bans = not baseline and (item.cell.defense.name != "none" or bool(s["banned"]))
    steps = "" if not bans or s["acted"] == 0 else _number(s["detection_steps_mean"], ".1f")
    return [
        item.cell.attack.label(),
        item.cell.protection,
        *([str(item.cell.scenario.seeds.model)] if seeds else []),
        *(_number(s[k], ".1f") if bans else "" for k in ("precision", "recall", "f1")),
        steps,
        _number(s["false_bans"], "d") if bans else "",
        _number(s["validation_loss"], ".3f"),
        "" if baseline else _number(s["excess_loss"], "+.3f"),
        _number(s["tokens_per_second"], ",.0f"),
        "" if baseline else _number(s["relative_tps"], ".2f"),
        "baseline" if baseline and item.valid else s["outcome"],
    ]


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)
