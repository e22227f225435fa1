"""`sentinel-bench run`: one attack against one defense, beside the runs without them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from sentinel_bench import registry, suite, tracks
from sentinel_bench.cli import _options, _output
from sentinel_bench.config import Cell
from sentinel_bench.errors import ConfigError


@click.command()
@click.option("--attack", "attacks", multiple=True, help="NAME or NAME:key=value,...; repeatable")
@click.option("--defense", "defenses", multiple=True, help="NAME or NAME:key=value,...; repeatable")
@_options.scenario_options
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
    help="folder of the run folders",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="take finished cells from --out, if nothing changed")
@click.option("--threads", type=click.IntRange(1), help="threads of torch  [default: its choice]")
@click.option("--dry-run", is_flag=True, help="print the resolved configuration and stop")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
def run(**options: Any) -> int:
    """Run attacks against defenses and print a table: one row for each run.

    For every attack: no attack and no defense, attack and no defense, attack and defense. The
    honest warm-up that they share is trained once.

    Example: sentinel-bench run --attack delay:steps=20 --defense sentinel:lambda=.2
    """
    file = _options.read_file(options["config_file"])
    attacks = _options.components(options["attacks"], file.attack)
    defenses = _options.components(options["defenses"], file.defense)
    if not attacks or not defenses:
        raise ConfigError(
            "name at least one --attack and one --defense ('none' is one of each); "
            "see 'sentinel-bench list attacks' and 'list defenses'"
        )
    track, scenarios = _options.resolve_scenarios(file, options)
    tuned = {d.name: tracks.tuned(track, d) for d in defenses}
    foreign = {d.name for d in defenses if tuned[d.name] and "values" not in d.params}
    for name in sorted(foreign) if scenarios[0].track != track else ():
        click.echo(
            f"note: {name} uses the fences found for track {track}; for other settings, "
            f"'sentinel-bench calibrate' finds others",
            err=True,
        )
    plan = suite.make_plan(scenarios, attacks, defenses, tuned)
    if options["dry_run"]:
        _print_plan(plan, as_json=options["as_json"])
        return 0
    command = shlex.join(["sentinel-bench", *sys.argv[1:]])
    finished = suite.run(
        plan,
        options["out"],
        _output.Reporter(),
        commands=[command],
        resume=options["resume"],
        threads=options["threads"],
    )
    if options["as_json"]:
        _output.print_json([{"folder": str(f.folder), **f.result} for f in finished])
    else:
        _print_table(finished)
    return 0 if all(f.valid for f in finished) else 1


def _print_table(finished: list[suite.Finished]) -> None:
    console = _output.stdout()
    console.print(_output.result_table(finished))
    console.print()
    for item in finished:
        if item.result["scores"]["reason"]:
            console.print(
                f"{item.cell.label}: {item.result['scores']['outcome']}: "
                f"{item.result['scores']['reason']}",
                markup=False,
            )
    for item in finished:
        console.print(f"record: {item.folder}", markup=False, soft_wrap=True)


def _print_plan(plan: suite.Plan, *, as_json: bool) -> None:
    scenario = plan.groups[0][0]
    data = {
        "scenario": scenario.model_dump(mode="json"),
        "seeds": [s.seeds.model_dump() for s, _ in plan.groups],
        "cells": [_describe(cell) for cell in plan.groups[0][1]],
    }
    if as_json:
        _output.print_json(data)
    else:
        click.echo(yaml.safe_dump(data, sort_keys=False), nl=False)


def _describe(cell: Cell) -> dict[str, Any]:
    attack = registry.attacks.params(cell.attack)
    defense = registry.defenses.params(cell.resolved_defense)
    return {
        "attack": {"name": cell.attack.name, **attack.model_dump(mode="json", by_alias=True)},
        "defense": {"name": cell.defense.name, **defense.model_dump(mode="json", by_alias=True)},
    }
