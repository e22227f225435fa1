"""`sentinel-bench validate`: whether a plugin keeps the contract, and what it costs."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

import click

from sentinel_bench.cli import _options, _output
from sentinel_bench.errors import ConfigError, nearest
from sentinel_bench.reference import REGISTRIES, Kind
from sentinel_bench.registry import Registry

if TYPE_CHECKING:
    from sentinel_bench.contract import Cost, Outcome

_MARKS = {"passed": "passed   ", "failed": "FAILED   ", "not asked": "not asked"}


@click.command()
@click.argument("name")
@click.option("--kind", type=click.Choice(get_args(Kind)), help="if the name is of several kinds")
@click.option("--json", "as_json", is_flag=True, help="print JSON instead of text")
@_options.plugin_option
def validate(name: str, kind: Kind | None, as_json: bool) -> int:
    """Check what an attack, a defense or an aggregator owes, property by property.

    It also times the plugin, for information. Exit status: 0 all passed, 1 a check failed, 2 there
    is no such plugin.

    Example: sentinel-bench validate my/twist --plugin my.py
    """
    reg = _find(name, kind)
    plugin = reg.get(name)
    from sentinel_bench import contract

    with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints is no data
        progress = _output.Reporter()
        checks = contract.checks_of(reg, name)
        progress.start(f"{reg.kind} {name}", len(checks))
        outcomes = contract.judge(checks, progress.advance)
        progress.finish()
        costs, reason = _timed(reg, name, outcomes)
    failed = [o for o in outcomes if o.status == "failed"]
    if as_json:
        _output.print_json(
            {
                "kind": reg.kind,
                "name": name,
                "version": plugin.version,
                "passed": not failed,
                "checks": [asdict(outcome) for outcome in outcomes],
                "timing": {"informative": True, "reason": reason, "calls": [*map(asdict, costs)]},
            }
        )
    else:
        _print(f"{reg.kind} {name}", outcomes, costs, reason)
    return 1 if failed else 0


def _find(name: str, kind: Kind | None) -> Registry[Any]:
    """Return the registry that knows a name.

    Raises:
        ConfigError: none does, or more than one.
    """
    if kind is not None:
        return REGISTRIES[kind]
    found = [kind for kind, reg in REGISTRIES.items() if name in reg.names()]
    if not found:
        known = {n for reg in REGISTRIES.values() for n in reg.names()}
        raise ConfigError(
            f"unknown plugin {name!r}{nearest(name, known)}; for a plugin in a file "
            "add --plugin FILE.py"
        )
    if len(found) > 1:
        options = " or ".join(f"--kind {kind}" for kind in found)
        raise ConfigError(f"{name!r} is of several kinds: add {options}")
    return REGISTRIES[found[0]]


def _timed(reg: Registry[Any], name: str, outcomes: list[Outcome]) -> tuple[list[Cost], str | None]:
    """Return the costs, or why they were not measured."""
    from sentinel_bench import contract

    if outcomes[0].status == "failed":
        return [], "it cannot be made"
    try:
        return contract.measure(reg, name), None
    except (Exception, SystemExit) as error:  # a plugin may raise anything
        return [], f"it raised {type(error).__name__}: {error}"


def _print(title: str, outcomes: list[Outcome], costs: list[Cost], reason: str | None) -> None:
    click.echo(title)
    for outcome in outcomes:
        why = f" ({outcome.reason})" if outcome.status == "not asked" else ""
        click.echo(f"  {_MARKS[outcome.status]}  {outcome.text}{why}")
        if outcome.status == "failed":
            click.echo(f"             {' '.join(outcome.reason.split())}")
            click.echo(f"             what to do: {outcome.remedy}")
    count = {s: sum(o.status == s for o in outcomes) for s in _MARKS}
    click.echo(", ".join(f"{number} {status}" for status, number in count.items() if number))
    if reason:
        click.echo(f"\nnot timed: {reason}")
        return
    click.echo("\nmicroseconds per call, medians, side by side; for information only:")
    width = max(len(cost.name) for cost in costs)
    for cost in costs:
        click.echo(f"  {cost.name:<{width}}  {cost.microseconds:>10,.1f}  {cost.call}")
