"""`sentinel-bench list` and `show`: what there is, and what each plugin does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from sentinel_bench import registry, tracks
from sentinel_bench.api import Aggregator, Attack, Plugin
from sentinel_bench.cli import _options, _output
from sentinel_bench.data.corpora import CORPORA
from sentinel_bench.errors import PluginError, RunError
from sentinel_bench.models.presets import PRESETS
from sentinel_bench.record import find_runs, read_config, read_result
from sentinel_bench.reference import REGISTRIES, Kind, condition, describe, knowledge

Rows = list[dict[str, Any]]
_RUN = ("track", "attack", "defense", "seed", "outcome", "f1", "validation_loss")


@click.command("list")
@click.argument(
    "what",
    type=click.Choice(
        ["attacks", "defenses", "aggregators", "models", "datasets", "runs", "tracks"]
    ),
)
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of a table")
@click.option(
    "--runs", "folder", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
    help="folder of the run folders, for 'list runs'",
)  # fmt: skip
@_options.plugin_option
def list_(what: str, as_json: bool, folder: Path) -> None:
    """List attacks, defenses, aggregators, models, datasets, runs or tracks."""
    sources: dict[str, Callable[[], Rows]] = {
        "attacks": lambda: _plugins(registry.attacks),
        "defenses": lambda: _plugins(registry.defenses),
        "aggregators": lambda: _plugins(registry.aggregators),
        "models": _models,
        "datasets": _datasets,
        "tracks": _tracks,
        "runs": lambda: _runs(folder),
    }
    rows = sources[what]()
    if as_json:
        _output.print_json(rows)
        return
    if not rows:
        click.echo(f"no {what}" + (f" in {folder}" if what == "runs" else ""))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if v is None else str(v) for v in row.values()))
    _output.stdout().print(table, markup=False)


@click.command()
@click.argument("kind", type=click.Choice(get_args(Kind)))
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of text")
@_options.plugin_option
def show(kind: Kind, name: str, as_json: bool) -> None:
    """Show goal, formula, parameters with defaults, and what else a plugin says of itself."""
    plugin = REGISTRIES[kind].get(name)
    try:
        data = {**describe(plugin), "name": name}
    except Exception as error:  # a plugin may declare anything
        raise _unfit(kind, name, error) from error
    if as_json:
        _output.print_json(data)
        return
    parameters = data.pop("parameters")
    for key, value in data.items():
        click.echo(f"{key:<10} {value}")
    click.echo("parameters" if parameters else "parameters none")
    for p in parameters:
        click.echo(f"  {p['name']} = {p['default']}   {p['type']}; {p['description']}")


def _plugins(reg: registry.Registry[Any]) -> Rows:
    rows = []
    for name in reg.names():
        try:
            rows.append(_plugin(name, reg.get(name)))
        except PluginError as error:  # shown here, and again when the name is used
            rows.append({"name": name, "does": str(error)})
        except Exception as error:  # a plugin may declare anything
            rows.append({"name": name, "does": str(_unfit(reg.kind, name, error))})
    return rows


def _plugin(name: str, plugin: type[Plugin[Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "does": (plugin.__doc__ or "").split("\n")[0]}
    if issubclass(plugin, Attack):
        row |= {"knowledge": knowledge(plugin), "adaptive": "yes" if plugin.adaptive else "no"}
    elif issubclass(plugin, Aggregator):
        row["condition"] = condition(plugin)
    return row | {"source": plugin.source}


def _unfit(kind: str, name: str, error: Exception) -> PluginError:
    if isinstance(error, PluginError):
        return error
    return PluginError(f"{kind} {name!r} cannot be described: {type(error).__name__}: {error}")


def _models() -> Rows:
    return [
        {
            "name": name,
            "family": shape.family,
            "hidden": shape.hidden_size,
            "layers": shape.layers or "one a stage",
            "heads": f"{shape.heads}/{shape.kv_heads}",
            "feed-forward": shape.intermediate_size,
            "does": shape.summary,
            "source": shape.source,
        }
        for name, shape in PRESETS.items()
    ]


def _datasets() -> Rows:
    return [{"name": n, "does": c.summary, "source": c.source} for n, c in CORPORA.items()]


def _tracks() -> Rows:
    return [{"name": n, "does": t.summary} for n, t in tracks.load().tracks.items()]


def _runs(folder: Path) -> Rows:
    rows = []
    for path in find_runs(folder):
        row: dict[str, Any] = {"run": path.name, **dict.fromkeys(_RUN)}
        try:
            cell, result = read_config(path)["cell"], read_result(path)
            scores = {} if result is None else result["scores"]
            row["track"] = cell["scenario"]["track"]
            row["attack"], row["defense"] = cell["attack"]["name"], cell["defense"]["name"]
            row["seed"] = cell["scenario"]["seeds"]["model"]
            row["outcome"] = scores.get("outcome", "unfinished")
            row["f1"], row["validation_loss"] = scores.get("f1"), scores.get("validation_loss")
        except (RunError, KeyError, TypeError, AttributeError):
            row |= {**dict.fromkeys(_RUN), "outcome": "unreadable"}
        rows.append(row)
    return rows
