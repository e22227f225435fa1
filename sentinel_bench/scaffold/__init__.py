"""Writes a small package with one plugin, to start from: `sentinel-bench new`.

What it writes are the templates beside this file: an installable package whose tests pass at once.
"""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sentinel_bench import __version__, api, registry
from sentinel_bench.errors import ConfigError

Kind = Literal["attack", "defense", "aggregator"]
LONGEST = 30
"""Letters of a name."""
_FILES = {
    "pyproject.toml": "pyproject.toml.jinja",
    "README.md": "README.md.jinja",
    "src/{module}.py": "{kind}.py.jinja",
    "tests/test_{module}.py": "test_{kind}.py.jinja",
}
_IMPORTED = {"Field", "Tensor", "TYPE_CHECKING", "ClassVar"}
"""Names that the templates use, beside those of `sentinel_bench.api`."""


def create(kind: Kind, name: str, folder: Path) -> list[Path]:
    """Write a package with an example plugin, and return its files.

    Args:
        kind: of the plugin.
        name: of the plugin and of the package.
        folder: of the package; made if missing.

    Raises:
        ConfigError: the name cannot be used, or the folder is not empty or cannot be written.
    """
    values = _values(kind, name)
    texts = {
        folder / path.format(**values): _render(template.format(**values), values)
        for path, template in _FILES.items()
    }
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: is there, and no empty folder; give another --dir")
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{folder}: cannot write here: {reason}; give another --dir") from error
    return list(texts)


def module_of(name: str) -> str:
    """Return the name of the module that holds the plugin."""
    return name.replace("-", "_")


def _values(kind: Kind, name: str) -> dict[str, Any]:
    """Return what the templates are filled with.

    Raises:
        ConfigError: the name cannot be used.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > LONGEST:
        raise ConfigError(
            f"{name!r} is no name for a plugin: write lower-case words with hyphens between them, "
            f"at most {LONGEST} letters, for example soft-flip"
        )
    every = (registry.attacks, registry.defenses, registry.aggregators)
    taken = next((reg.kind for reg in every if name in reg.builtins()), None)
    if taken:
        raise ConfigError(f"{name!r} is the name of a built-in {taken}: choose another")
    module, words = module_of(name), [word.capitalize() for word in name.split("-")]
    cls = "".join(words)
    known = {*vars(api), *_IMPORTED}
    if keyword.iskeyword(module) or keyword.iskeyword(cls) or {cls, f"{cls}Params"} & known:
        raise ConfigError(f"{name!r} is called like a part of Python or of the api: add a word")
    spec = find_spec(module)
    if spec is not None and spec.origin is not None:
        raise ConfigError(f"{name!r}: a module {module!r} is installed already: choose another")
    return {
        "kind": kind,
        "name": name,
        "module": module,
        "cls": cls,
        "version": __version__,
        "article": "a" if kind == "defense" else "an",
    }


def _render(template: str, values: dict[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("sentinel_bench.scaffold"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    return environment.get_template(template).render(values)
