"""Plugins in single files: `--plugin FILE.py` on the command line, `use` in a program.

A class of `my.py` whose name is `foo` is called `my/foo`. The file stands alone: it may import what
is installed, and nothing that lies beside it, because `run --resume` looks for changes in the file
itself. Plugins that need several files are packages: `sentinel-bench new` makes one.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.abc import SourceLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from sentinel_bench import registry
from sentinel_bench.errors import ConfigError
from sentinel_bench.provenance import imported

PREFIX = "sentinel_bench_file_"
"""What the names of the modules of plugin files begin with."""


class _Held(SourceLoader):
    """Runs a file as it was when it was read, and keeps that source for its digest."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path = path
        self.source = source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.source


@dataclass
class _Loaded:
    """A file in use, and what it added."""

    loader: _Held
    module: str
    plugins: list[tuple[registry.Registry[Any], str]] = field(default_factory=list)


_loaded: list[_Loaded] = []


def use(files: Iterable[Path] | Mapping[Path, bytes]) -> None:
    """Make the plugins of these files known, in place of those of the last call.

    A process that runs cells of another one calls this with what `in_use` said there: files with
    their sources, which are then not read again.

    Raises:
        ConfigError: a file is missing, no Python, raises when it is imported, imports what lies
            beside it, or holds no plugin; or a name is taken. No file is in use then.
    """
    for item in _loaded:
        _forget(item)
    _loaded.clear()
    try:
        sources = files if isinstance(files, Mapping) else {}
        for file in dict.fromkeys(files):
            _load(file.absolute(), sources.get(file))
    except BaseException:
        use(())
        raise


def in_use() -> dict[Path, bytes]:
    """Return the files whose plugins are known, with their sources."""
    return {item.loader.path: item.loader.source for item in _loaded}


def _forget(item: _Loaded) -> None:
    for reg, name in item.plugins:
        reg.drop(name)
    sys.modules.pop(item.module, None)


def _load(file: Path, source: bytes | None) -> None:
    if any(item.loader.path == file for item in _loaded):
        return
    source = _read(file) if source is None else source
    _stands_alone(file, source)
    item = _Loaded(_Held(file, source), PREFIX + file.stem)
    if item.module in sys.modules:
        raise ConfigError(f"{file}: another plugin file is called {file.name}; rename one")
    _loaded.append(item)
    module = _run(item.module, item.loader)
    for plugin in _plugins(module):
        reg, name = registry.home(plugin), f"{file.stem}/{plugin.name}"
        if not (isinstance(plugin.name, str) and re.fullmatch(r"[\w.-]+", plugin.name)):
            raise ConfigError(f"{file}: {plugin.name!r} is no name; write letters, digits and -")
        assert reg is not None
        try:
            reg.add(name, plugin)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}; rename the class or the file") from error
        item.plugins.append((reg, name))
    if not item.plugins:
        raise ConfigError(
            f"{file}: no plugin in it: a class that extends Attack, Defense or Aggregator "
            "(sentinel_bench.api) and has a `name`"
        )


def _read(file: Path) -> bytes:
    if not re.fullmatch(r"[\w-]+", file.stem) or file.suffix != ".py":
        raise ConfigError(f"{file}: a plugin file is called NAME.py, of letters, digits, - and _")
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file}: is no file; install a package with pip instead")
    try:
        return file.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{file}: cannot be read: {reason}") from error


def _stands_alone(file: Path, source: bytes) -> None:
    """Refuse a file that is not Python, or that imports what lies beside it."""
    try:
        names = imported(source, "")
    except SyntaxError as error:
        raise ConfigError(f"{file}:{error.lineno or 1}: not Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file}: not Python: {error or type(error).__name__}") from error
    except ImportError:
        beside: str | None = "in a relative import"
    else:
        tops = dict.fromkeys(name.partition(".")[0] for name in names)
        beside = next((top for top in tops if _is_beside(file, top)), None)
    if beside is not None:
        raise ConfigError(
            f"{file}: imports what lies beside it ({beside}), and a plugin file stands alone: "
            "make a package of it (sentinel-bench new)"
        )


def _is_beside(file: Path, top: str) -> bool:
    """Tell whether a top-level module is a file or a folder beside the plugin's."""
    if top == "sentinel_bench" or top in sys.builtin_module_names:
        return False
    folder = file.resolve().parent
    near = {folder / f"{top}.py", folder / top, folder / top / "__init__.py"}
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return any(path.exists() for path in near)
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return any(Path(place).resolve() in near for place in places if place)


def _run(name: str, loader: _Held) -> ModuleType:
    """Import a file under a name. What it prints goes to stderr: stdout is for data.

    Raises:
        ConfigError: it raised.
    """
    spec = spec_from_loader(name, loader, origin=str(loader.path))
    assert spec is not None
    module = module_from_spec(spec)
    module.__file__ = str(loader.path)
    sys.modules[name] = module
    try:
        with contextlib.redirect_stdout(sys.stderr):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it may raise anything
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
                 if f.filename == str(loader.path)]  # fmt: skip
        where = f":{lines[-1]}" if lines else ""
        raise ConfigError(
            f"{loader.path}{where}: cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def _plugins(module: ModuleType) -> list[type[Any]]:
    """Return the classes that a module defines and names, in the order of their definition."""
    found = [
        thing
        for thing in vars(module).values()
        if registry.home(thing) and thing.__module__ == module.__name__ and "name" in vars(thing)
    ]
    return list(dict.fromkeys(found))
