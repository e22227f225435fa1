"""`sentinel-bench run`: one attack against one defense, beside the runs without them."""

from __future__ import annotations

from typing import Any

import click

from sentinel_bench import suite
from sentinel_bench.cli import _options, _output
from sentinel_bench.leaderboard import price


@click.command()
@_options.cell_options
@_options.execution_options
@click.option(
    "--aggregator", "aggregators", multiple=True,
    help="in place of the mean of weight gradients: NAME or NAME:key=value,...; repeatable",
)  # fmt: skip
@click.option(
    "--unprotected/--no-unprotected", default=True, show_default=True,
    help="also run each attack without a defense",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="take finished cells from --out, if nothing changed")
@click.option(
    "--trace", is_flag=True,
    help="also record every statistic of every worker, for 'report'; reused cells get none",
)  # fmt: skip
def run(**options: Any) -> int:
    """Run attacks against defenses and print a table: one row for each run.

    For every attack: no attack and no defense, attack and no defense, attack and defense. The
    honest warm-up that they share is trained once.

    Example: sentinel-bench run --attack delay:steps=20 --defense sentinel:lambda=.2
    """
    file = _options.read_file(options["config_file"])
    attacks, defenses = _options.chosen(file, options)
    track, scenarios = _options.resolve_scenarios(file, options)
    tuned = _options.tuned(track, scenarios[0], defenses)
    rules = _options.components(options["aggregators"], suite.MEAN.name)
    plan = suite.make_plan(
        scenarios, attacks, defenses, tuned, rules, unprotected=options["unprotected"]
    )
    placement = _options.placement(options)
    suite.check_placement(plan, placement)
    if options["dry_run"]:
        _output.print_plan(plan, as_json=options["as_json"])
        return 0
    finished = suite.run(
        plan,
        options["out"],
        _output.Reporter(),
        commands=[_output.command()],
        resume=options["resume"],
        threads=options["threads"],
        placement=placement,
        trace=options["trace"],
    )
    if placement.follows:
        return 0
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
    for name, scores in {f.cell.protection: f.result["scores"] for f in finished}.items():
        if name != "none" and price(scores):
            console.print(f"cost of {name}: {price(scores)}", markup=False)
        if scores["traffic"]:
            sent = ", ".join(f"{kind} {size:,}" for kind, size in scores["traffic"].items() if size)
            console.print(f"bytes sent per step with {name}: {sent}", markup=False)
    for item in finished:
        console.print(f"record: {item.folder}", markup=False, soft_wrap=True)
