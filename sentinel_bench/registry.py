"""Names to plugin classes, loaded when they are asked for.

Built-in names are listed in `sentinel_bench.attacks`, `.defenses` and `.aggregators`; other
packages add theirs through the entry-point groups of the same names, and are then called
`package/name`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from sentinel_bench.aggregators import AGGREGATORS
from sentinel_bench.api import (
    Aggregator,
    AggregatorParams,
    Attack,
    Defense,
    Plugin,
    ResponseParams,
)
from sentinel_bench.attacks import ATTACKS
from sentinel_bench.config import Component, Frozen, build
from sentinel_bench.defenses import DEFENSES
from sentinel_bench.errors import ConfigError, PluginError, nearest
from sentinel_bench.provenance import module_sources, source_digest

T = TypeVar("T", bound=Plugin[Any])
_SHARED = {"builtins", "typing", "sentinel_bench.api"}
"""Modules that are not part of a plugin: their code is in the digest of the engine."""


class Registry(Generic[T]):
    """The plugins of one kind.

    Args:
        kind: "attack", "defense" or "aggregator", for messages.
        base: class that every plugin must extend.
        settings: class that the parameters of every plugin must extend.
        builtins: name to "module:Class".
        group: entry-point group of third-party plugins.
    """

    def __init__(
        self,
        kind: str,
        base: type[T],
        settings: type[Frozen],
        builtins: Mapping[str, str],
        group: str,
    ) -> None:
        self.kind = kind
        self._base = base
        self._settings = settings
        self._builtins = builtins
        self._group = group

    @cached_property
    def _targets(self) -> dict[str, str | EntryPoint]:
        targets: dict[str, str | EntryPoint] = dict(self._builtins)
        for point in entry_points(group=self._group):
            package = point.dist.name if point.dist else "unknown"
            targets[f"{package}/{point.name}"] = point
        return targets

    def names(self) -> list[str]:
        """Return all names, built-in ones first, each part in the order of its list."""
        return list(self._targets)

    def get(self, name: str) -> type[T]:
        """Return the class called `name`.

        Raises:
            ConfigError: no such name; the nearest ones are named.
            PluginError: the plugin cannot be imported, or is not of this kind.
        """
        target = self._targets.get(name)
        if target is None:
            raise ConfigError(f"unknown {self.kind} {name!r}{nearest(name, self._targets)}")
        try:
            plugin = target.load() if isinstance(target, EntryPoint) else _load(target)
        except Exception as error:  # a plugin may raise anything while it is imported
            raise PluginError(
                f"{self.kind} {name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not (inspect.isclass(plugin) and issubclass(plugin, self._base)):
            raise PluginError(f"{self.kind} {name!r} is not a subclass of {self._base.__name__}")
        missing = [a for a in ("name", "goal", "formula", "source") if not hasattr(plugin, a)]
        if missing:
            raise PluginError(
                f"{self.kind} {name!r} lacks {', '.join(missing)}; see the api module"
            )
        if not issubclass(plugin.Params, self._settings):
            raise PluginError(f"{self.kind} {name!r}: Params must extend {self._settings.__name__}")
        return plugin

    def params(self, component: Component) -> Frozen:
        """Validate the parameters of `component`.

        Raises:
            ConfigError: an unknown or impossible parameter.
        """
        plugin = self.get(component.name)
        params = build(plugin.Params, component.params, f"{self.kind} {component.name}")
        for inner in self._wrapped(plugin, params):
            self.params(inner)
        return params

    def nested(self, component: Component) -> Iterator[type[T]]:
        """Yield the class of a plugin, and those of all plugins that its parameters name."""
        plugin = self.get(component.name)
        yield plugin
        for inner in plugin.wraps(self.params(component)):
            yield from self.nested(inner)

    def create(self, component: Component) -> T:
        """Return a new instance with validated parameters.

        Raises:
            ConfigError: an unknown name, an unknown or impossible parameter.
            PluginError: the class cannot be loaded, or its constructor raised.
        """
        plugin, params = self.get(component.name), self.params(component)
        try:
            return plugin(params)
        except Exception as error:  # a plugin may raise anything
            raise PluginError(
                f"{self.kind} {component.name} cannot be made: {type(error).__name__}: {error}",
                party=self.kind,
            ) from error

    def _wrapped(self, plugin: type[T], params: Frozen) -> Sequence[Component]:
        try:
            return plugin.wraps(params)
        except Exception as error:  # a plugin may raise anything
            raise PluginError(
                f"{self.kind} {plugin.name}: wraps raised {type(error).__name__}: {error}",
                party=self.kind,
            ) from error

    def identity(self, component: Component) -> dict[str, Any]:
        """Return all that makes results of this plugin comparable: settings, version, source."""
        plugin = self.get(component.name)
        modules = {c.__module__ for c in plugin.__mro__} - _SHARED
        sources = set().union(*(module_sources(m) for m in modules))
        params = self.params(component)
        identity = {
            "name": component.name,
            "params": params.model_dump(mode="json", by_alias=True),
            "version": plugin.version,
            "source": source_digest(sorted(sources)),
        }
        inner = [self.identity(c) for c in self._wrapped(plugin, params)]
        return {**identity, "wraps": inner} if inner else identity


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


attacks: Registry[Attack[Any]] = Registry(
    "attack", Attack, Frozen, ATTACKS, "sentinel_bench.attacks"
)
defenses: Registry[Defense[Any]] = Registry(
    "defense", Defense, ResponseParams, DEFENSES, "sentinel_bench.defenses"
)
aggregators: Registry[Aggregator[Any]] = Registry(
    "aggregator", Aggregator, AggregatorParams, AGGREGATORS, "sentinel_bench.aggregators"
)
