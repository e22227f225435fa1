"""`sentinel-bench calibrate`: fences that leave the honest alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml
from rich.table import Table

from sentinel_bench import suite
from sentinel_bench.cli import _options, _output
from sentinel_bench.config import Component, Scenario


@click.command()
@click.option("--defense", default="sentinel", show_default=True, help="NAME or NAME:key=value,...")
@_options.scenario_options
@click.option(
    "--flags", type=click.FloatRange(0), default=1.0, show_default=True,
    help="honest signals that may be flagged, per 1000",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
    help="folder of the runs that test the proposal",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="threads of torch  [default: its choice]")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of tables")
def calibrate(**options: Any) -> int:
    """Propose fences from runs without attack, and test them.

    Watches one run per seed (--seeds, best not those of the board), replays a grid of lambdas, and
    runs the proposal for real on the same seeds. Exit status 1 if a worker was banned.
    """
    from sentinel_bench import calibrate as engine
    from sentinel_bench.pipeline.session import prepare
    from sentinel_bench.record import check_writable

    file = _options.read_file(options["config_file"])
    _, scenarios = _options.resolve_scenarios(file, options)
    component = Component.parse(options["defense"])
    suite.make_plan(scenarios, [suite.NONE], [component], {})
    engine.fenced(component)
    check_writable(options["out"])
    prepare(scenarios[0].device, options["threads"])
    progress = _output.Reporter()
    tokens = suite.load_tokens(scenarios[0], progress)
    grid = scenarios[0].grid
    seen = [engine.observe(s, component, tokens, progress) for s in scenarios]
    rows = engine.candidates(seen, component, grid.stages, grid.replicas)
    proposal = engine.propose(rows, component, options["flags"])
    tested = _test(scenarios, proposal, options, progress)
    _report(rows, proposal, tested, options)
    return 0 if all(f.valid and not f.result["scores"]["false_bans"] for f in tested) else 1


def _test(
    scenarios: list[Scenario], proposal: Component, options: dict[str, Any], progress: Any
) -> list[suite.Finished]:
    plan = suite.make_plan(scenarios, [suite.NONE], [proposal], {})
    finished = suite.run(
        plan,
        options["out"],
        progress,
        commands=[_output.command()],
        threads=options["threads"],
    )
    return [f for f in finished if not f.cell.is_baseline]


def _report(
    rows: list[Any], proposal: Component, tested: list[suite.Finished], options: dict[str, Any]
) -> None:
    results = [
        {
            "seed": f.cell.scenario.seeds.model,
            "outcome": f.result["scores"]["outcome"],
            "false_bans": f.result["scores"]["false_bans"],
            "honest_flagged": f.result["scores"]["flags"]["honest_flagged"],
            "honest_checked": f.result["scores"]["flags"]["honest_checked"],
            "excess_loss": f.result["scores"]["excess_loss"],
        }
        for f in tested
    ]
    if options["as_json"]:
        _output.print_json(
            {
                "candidates": [
                    {
                        "direction": r.direction,
                        "lambda": r.value,
                        "flags_per_1000": r.flags_per_1000,
                        "false_bans": r.false_bans,
                    }
                    for r in rows
                ],
                "proposal": proposal.params,
                "tested": results,
            }
        )
        return
    console = _output.stdout()
    chosen = proposal.params["lambda"]
    table = Table("direction", "lambda", "flags per 1000", "false bans", box=None, pad_edge=False)
    for r in rows:
        if r.value <= chosen[r.direction] + 0.101:
            mark = "  <- proposed" if r.value == chosen[r.direction] else ""
            table.add_row(
                r.direction, f"{r.value:g}", f"{r.flags_per_1000:.2f}", f"{r.false_bans}{mark}"
            )
    console.print(table)
    console.print("\nthe proposal, run for real without attack:")
    table = Table(*results[0], box=None, pad_edge=False)
    for row in results:
        table.add_row(*("-" if v is None else str(v) for v in row.values()))
    console.print(table)
    console.print("\nfor benchmark.yaml, or as a YAML value:")
    click.echo(yaml.safe_dump({proposal.name: proposal.params}, default_flow_style=None), nl=False)
