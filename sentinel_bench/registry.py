"""Names to plugin classes, loaded when they are asked for.

Built-in names are listed in `sentinel_bench.attacks`, `.defenses` and `.aggregators`; other
packages add theirs through the entry-point groups of the same names, and are then called
`package/name`. Single files are added by `sentinel_bench.plugins`, as `file/name`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
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
from sentinel_bench.provenance import code_digest, module_sources

T = TypeVar("T", bound=Plugin[Any])
Target = str | EntryPoint | type[Any]
"""What a name stands for: "module:Class", an entry point of a package, or a class."""
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
        self._broken: dict[str, str] = {}

    @cached_property
    def _targets(self) -> dict[str, Target]:
        targets: dict[str, Target] = dict(self._builtins)
        for point in entry_points(group=self._group):
            package = point.dist.name if point.dist else "unknown"
            targets[f"{package}/{point.name}"] = point
        return targets

    def names(self) -> list[str]:
        """Return all names, built-in ones first, each part in the order of its list."""
        return list(self._targets)

    def builtins(self) -> list[str]:
        """Return the names of the plugins of this package."""
        return list(self._builtins)

    def add(self, name: str, plugin: type[T]) -> None:
        """Make a class known as `name`.

        Raises:
            ConfigError: the name is taken.
        """
        if name in self._targets:
            origin = _origin(self._targets[name])
            raise ConfigError(f"{self.kind} {name!r} is there already, from {origin}")
        self._targets[name] = plugin

    def drop(self, name: str) -> None:
        """Forget a class that was added."""
        self._targets.pop(name, None)

    def get(self, name: str) -> type[T]:
        """Return the class called `name`.

        Raises:
            ConfigError: no such name; the nearest ones are named.
            PluginError: the plugin cannot be loaded, or is not of this kind.
        """
        target = self._targets.get(name)
        if target is None:
            raise ConfigError(f"unknown {self.kind} {name!r}{self._hint(name)}")
        plugin = self._loaded(name, target)
        if not (inspect.isclass(plugin) and issubclass(plugin, self._base)):
            raise PluginError(f"{self.kind} {name!r} is not a subclass of {self._base.__name__}")
        missing = [a for a in ("name", "goal", "formula", "source") if not hasattr(plugin, a)]
        if missing:
            raise PluginError(
                f"{self.kind} {name!r} lacks {', '.join(missing)}; see the api module"
            )
        if not (inspect.isclass(plugin.Params) and issubclass(plugin.Params, self._settings)):
            raise PluginError(f"{self.kind} {name!r}: Params must extend {self._settings.__name__}")
        return plugin

    def _loaded(self, name: str, target: Target) -> Any:
        """Return what a name stands for. The first error of a package's plugin is kept.

        Raises:
            PluginError: it cannot be loaded.
        """
        if isinstance(target, type):
            return target
        reason = self._broken.get(name)
        if reason is None:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # stdout is for data
                    return target.load() if isinstance(target, EntryPoint) else _load(target)
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                reason = f"{type(error).__name__}: {error}"
            if isinstance(target, EntryPoint):
                self._broken[name] = reason
        raise PluginError(f"{self.kind} {name!r} cannot be loaded: {reason}")

    def _hint(self, name: str) -> str:
        """Say which names may be meant, and how plugins become known."""
        alike = [n for n in self._targets if n.rpartition("/")[2] == name]
        if alike:
            return f"; did you mean {', '.join(alike)}?"
        hint = nearest(name, self._targets)
        package, slash, _ = name.rpartition("/")
        if slash and not any(n.startswith(f"{package}/") for n in self._targets):
            hint = hint if "did you mean" in hint else ""
            hint += f"; nothing is known of {package!r}: install it, or give --plugin {package}.py"
        return hint

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
        sources: dict[Path, bytes] = {}
        for module in modules:
            sources |= module_sources(module)
        params = self.params(component)
        identity = {
            "name": component.name,
            "params": params.model_dump(mode="json", by_alias=True),
            "version": plugin.version,
            "source": code_digest(sources),
        }
        inner = [self.identity(c) for c in self._wrapped(plugin, params)]
        return {**identity, "wraps": inner} if inner else identity


def _origin(target: Target) -> str:
    """Say where a plugin comes from."""
    if isinstance(target, EntryPoint):
        return f"the package {target.dist.name}" if target.dist else "a package"
    module = target.partition(":")[0] if isinstance(target, str) else target.__module__
    return str(getattr(sys.modules.get(module), "__file__", None) or module)


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


def home(plugin: Any) -> Registry[Any] | None:
    """Return the registry for classes of this kind; None for what is no plugin."""
    kinds: dict[type[Any], Registry[Any]]
    kinds = {Attack: attacks, Defense: defenses, Aggregator: aggregators}
    if not inspect.isclass(plugin):
        return None
    return next((reg for base, reg in kinds.items() if issubclass(plugin, base)), None)
