"""`sentinel-bench sweep`: attacks over a range of strengths, damage against detectability."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from sentinel_bench import suite
from sentinel_bench import sweep as engine
from sentinel_bench.cli import _options, _output
from sentinel_bench.config import Scenario
from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.record import check_writable, write_atomically
from sentinel_bench.score import RECALL_FLOOR

KINDS = ("json", "png", "svg")


@click.command()
@_options.cell_options
@click.option(
    "--points", type=int, default=8, show_default=True, help="strengths of a range lo..hi"
)
@click.option(
    "--scale", type=click.Choice(["log", "linear"]),
    help="how they are spaced  [default: log, if lo is above 0]",
)  # fmt: skip
@_options.execution_options
@click.option(
    "--plot", "stem", type=click.Path(path_type=Path), metavar="STEM",
    help="write STEM.json, STEM.png and STEM.svg  [default: sweep in --out]",
)  # fmt: skip
def sweep(**options: Any) -> int:
    """Run attacks over a range of strengths: what they cost against how well they are found.

    One parameter of an attack may be a range lo..hi. Attacks without one are single points: many
    of them give the scatter of F1 against validation loss. Finished cells of --out are always
    reused, if nothing has changed.

    Example: sentinel-bench sweep --attack bias:sigma=0.01..3 --defense sentinel --points 8
    """
    file = _options.read_file(options["config_file"])
    attacks, defenses = _options.chosen(file, options)
    engine.refuse_ranges(defenses)
    curves = engine.curves(attacks, options["points"], options["scale"])
    track, scenarios = _options.resolve_scenarios(file, options)
    tuned = _options.tuned(track, scenarios[0], defenses)
    components = [attack for curve in curves for _, attack in curve.points]
    plan = suite.make_plan(scenarios, components, defenses, tuned)
    placement = _options.placement(options)
    suite.check_placement(plan, placement)
    if options["dry_run"]:
        _output.print_plan(plan, as_json=options["as_json"])
        return 0
    files = _files(options["stem"] or options["out"] / "sweep")
    finished = suite.run(
        plan,
        options["out"],
        _output.Reporter(),
        commands=[_output.command()],
        resume=True,
        threads=options["threads"],
        placement=placement,
    )
    if placement.follows:
        return 0
    data = {
        "schema": 1,
        "command": _output.command(),
        "settings": _settings(scenarios, options),
        **engine.summarize(curves, defenses, finished),
    }
    if options["as_json"]:
        _output.print_json(data)
    else:
        _print(data)
    _write(files, data, scenarios)
    return 0 if all(f.valid for f in finished) else 1


def _settings(scenarios: list[Scenario], options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "scenario": scenarios[0].model_dump(mode="json", exclude={"seeds"}),
        "seeds": [s.seeds.model_dump() for s in scenarios],
        "points": options["points"],
        "scale": options["scale"],
        "recall_floor": RECALL_FLOOR,
    }


# Files.


def _files(stem: Path) -> dict[str, Path]:
    """Return the files by kind.

    Raises:
        ConfigError: they cannot be written.
    """
    if stem.name in ("", ".."):
        raise ConfigError(f"--plot {stem}: name files, not a folder, for example {stem / 'sweep'}")
    files = {kind: stem.with_name(f"{stem.name}.{kind}") for kind in KINDS}
    for path in files.values():
        if path.is_dir():
            raise ConfigError(f"--plot {stem}: {path} is a folder; choose another name")
    check_writable(stem.parent)
    return files


def _write(files: Mapping[str, Path], data: Mapping[str, Any], scenarios: list[Scenario]) -> None:
    from sentinel_bench import plots

    try:
        text = json.dumps(data, indent=2, allow_nan=False) + "\n"
        write_atomically(files["json"], text)
        for kind, content in plots.render(data, _title(scenarios)).items():
            plots.save(files[kind], content)
    except OSError as error:
        raise RunError(f"{files['json'].parent}: cannot write the sweep: {error}") from error
    click.echo(f"written: {', '.join(map(str, files.values()))}", err=True)


def _title(scenarios: list[Scenario]) -> str:
    s, n = scenarios[0], len(scenarios)
    return (
        f"track {s.track}: {s.model.preset}, {s.grid.stages} stages x {s.grid.replicas} replicas, "
        f"{s.train.steps} steps, attack mode {s.threat.mode}, {n} seed{'s' * (n > 1)}"
    )


# The table.


def _print(data: Mapping[str, Any]) -> None:
    console = _output.stdout()
    console.print(_table(data["points"], seeds=len(data["settings"]["seeds"])))
    console.print()
    for row in data["undetected"]:
        console.print(_verdict(row))
    for run in data["unmeasured"]:
        reason = f": {run['reason']}" if run["reason"] else ""
        seeds = "/".join(map(str, dict.fromkeys(run["seeds"].values())))
        console.print(
            f"{run['attack']} vs {run['defense']}, seed {seeds}: {run['why']}{reason}",
            soft_wrap=True,
        )


def _table(points: list[dict[str, Any]], *, seeds: int) -> Table:
    """Return one row per attack, strength and defense: means, below them the spread of seeds."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("attack", "strength", "defense"):
        table.add_column(name, overflow="fold")
    for name in ("recall", "F1", "false bans", "damage", "damage\nunprotected", "val. loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for row in points:
        strength = "" if row["strength"] is None else f"{row['parameter']}={row['strength']:g}"
        table.add_row(
            row["name"],
            strength,
            row["defense"],
            _spread(row["recall"], ".1f"),
            _spread(row["f1"], ".1f"),
            _spread(row["false_bans"], "g" if seeds == 1 else ".1f"),
            _spread(row["damage"], "+z.3f"),
            _spread(row["unprotected"], "+z.3f"),
            _spread(row["validation_loss"], ".3f"),
            _outcome(row),
        )
    return table


def _spread(spread: Mapping[str, Any], style: str) -> str:
    missing = engine.missing_text(spread) if spread.get("missing") else ""
    if spread["mean"] is None:
        return missing or "-"
    lines = [format(spread["mean"], style)]
    if spread["n"] > 1:
        lines.append(f"{spread['min']:{style}}..{spread['max']:{style}}")
    return "\n".join([*lines, *([missing] if missing else [])])


def _outcome(row: Mapping[str, Any]) -> str:
    parts = [f"{number} {outcome}" for outcome, number in sorted(row["outcomes"].items())]
    if row["idle"] and row["cell"] != "none":
        parts.append(f"nobody acted in {row['idle']}")
    return ", ".join(parts)


def _verdict(row: Mapping[str, Any]) -> str:
    """Return the line of the largest undetected damage, with what may hide a larger one."""
    share = f"{row['undetected']} of {row['points']} undetected"
    if row["damage"] is not None:
        text = f"largest undetected damage {row['damage']:+z.3f} at {row['cell']} ({share})"
    elif row["undetected"]:
        text = f"largest undetected damage not measured ({share})"
    elif len(row["unknown"]) < row["points"]:
        text = "largest undetected damage: none, all detected"
    else:
        text = "largest undetected damage not known"
    for cell, missing in row["unmeasured"].items():
        text += f"; undetected as well: {cell}, {missing}"
    if row["unknown"]:
        text += f"; without a valid run: {', '.join(row['unknown'])}"
    return f"{row['attack']} vs {row['defense']}: {text}"
