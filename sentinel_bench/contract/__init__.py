"""What every plugin owes, as checks that run over any plugin.

`sentinel-bench validate NAME` runs them. In the tests of a package that holds plugins:

    import pytest
    from sentinel_bench.contract import checks

    from my_package import MyAttack

    @pytest.mark.parametrize("check", checks(MyAttack), ids=str)
    def test_my_attack_keeps_the_contract(check):
        check()

The properties are plain functions in `attacks`, `defenses` and `aggregators` here: each has a
docstring, and raises a `Violation` that says what was seen and what to do.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sentinel_bench import registry
from sentinel_bench.api import Plugin
from sentinel_bench.contract._check import Check, Violation
from sentinel_bench.contract._timing import Cost, measure
from sentinel_bench.contract._verdict import Outcome, judge
from sentinel_bench.errors import ConfigError, PluginError

__all__ = ["Check", "Cost", "Outcome", "Violation", "checks", "checks_of", "judge", "measure"]


def checks(plugin: type[Plugin[Any]]) -> list[Check]:
    """Return the checks of a class, whether it is installed as a plugin or not.

    Raises:
        ConfigError: it extends neither `Attack` nor `Defense` nor `Aggregator`.
    """
    reg = registry.home(plugin)
    if reg is None:
        raise ConfigError(f"{plugin!r} extends neither Attack nor Defense nor Aggregator")
    return checks_of(reg, _name_of(reg, plugin))


def checks_of(reg: registry.Registry[Any], name: str) -> list[Check]:
    """Return the checks of the plugin called `name`, the simplest first."""
    properties = import_module(f"sentinel_bench.contract.{reg.kind}s").CHECKS
    return [Check(reg, name, check) for check in properties]


def _name_of(reg: registry.Registry[Any], plugin: type[Plugin[Any]]) -> str:
    """Return the name of a class; one that has none yet is added under that of its module."""
    own = getattr(plugin, "name", plugin.__name__)
    for name in reg.names():
        if name.rpartition("/")[2] == own:
            try:
                if reg.get(name) is plugin:
                    return name
            except PluginError:  # another one that is broken
                continue
    name = f"{plugin.__module__.partition('.')[0]}/{own}"
    reg.add(name, plugin)
    return name
