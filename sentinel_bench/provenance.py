"""What a run is and what made it: digests of settings and of source, versions, machine kind."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from sentinel_bench.errors import ConfigError

_PARTS = ("sentinel_bench.attacks", "sentinel_bench.defenses", "sentinel_bench.aggregators")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digest(identity: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of the canonical JSON of `identity`; the order of keys is ignored.

    Raises:
        ConfigError: a value is not JSON, such as NaN.
    """
    return hashlib.sha256(_canonical(identity).encode()).hexdigest()


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys that only one of two identities has, or that differ; sorted."""
    from sentinel_bench.config import flatten  # pydantic: not at import

    one, two = flatten(a), flatten(b)
    return sorted(
        key
        for key in one.keys() | two.keys()
        if key not in one or key not in two or _canonical(one[key]) != _canonical(two[key])
    )


def provenance() -> dict[str, Any]:
    """Return what made a result: versions and machine kind; no host, user or path."""
    from importlib import metadata

    packages: dict[str, str | None] = {}
    for name in ("sentinel-bench", "torch", "transformers", "numpy", "scikit-learn"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
    }


def source_digest(paths: Iterable[Path]) -> str:
    """Return the sha256 (hex) of the code of Python files, in any order.

    Comments, layout and docstrings do not count; file names do, folders do not. Comparable only
    within one minor version of Python, whose syntax trees it is taken of.

    Raises:
        ConfigError: a file cannot be read or is not Python.
    """
    return code_digest({path: _read(path) for path in paths})


def code_digest(sources: Mapping[Path, bytes]) -> str:
    """Return the same for sources that were read before, by the file that they stand in.

    Raises:
        ConfigError: one is not Python.
    """
    parts = []
    for path, source in sources.items():
        try:
            parts.append([path.name, _tree_digest(source)])
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as Python: {error}") from error
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()


@lru_cache(maxsize=1024)  # a suite asks for the same files once for each cell
def _tree_digest(source: bytes) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def module_sources(module: str) -> dict[Path, bytes]:
    """Return the sources of a module and of all that it imports from its own package, by file.

    The package of `a.b.c` is `a`; for ours it is `sentinel_bench.attacks` and its kin, since the
    rest of ours is in the digest of the engine. Plugins of others may use parts of these too.
    """
    first = module.partition(".")[0]
    own = module.rpartition(".")[0] if first == "sentinel_bench" else first
    packages = (own,) if first == "sentinel_bench" else (own, *_PARTS)
    found: dict[str, tuple[Path, bytes]] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        spec = find_spec(name) if name not in found else None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        found[name] = Path(spec.origin), _source(spec)
        try:
            names = imported(found[name][1], spec.parent or "")
        except (SyntaxError, ValueError, ImportError):  # `code_digest` says so, if it matters
            continue
        inside = [n for n in names if n.startswith(tuple(f"{p}." for p in packages))]
        todo += [n for n in inside if _is_module(n)]
    return dict(found.values())


@lru_cache(maxsize=1024)
def imported(source: bytes, package: str) -> tuple[str, ...]:
    """Return all modules that a source may import, and names in them that may be modules too.

    Args:
        source: Python.
        package: of the module, for relative imports.

    Raises:
        SyntaxError: it is not Python.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)


def _source(spec: ModuleSpec) -> bytes:
    """Return the source of a module, from its loader if that keeps what it ran."""
    kept: bytes | None = getattr(spec.loader, "source", None)
    return _read(Path(spec.origin or "")) if kept is None else kept


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as Python: {error}") from error


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # a name inside a module, not a module
        return False


def to_json(value: Any, **style: Any) -> str:
    """Return strict JSON of settings.

    Raises:
        ConfigError: a value is not JSON, such as NaN.
    """
    try:
        return json.dumps(value, allow_nan=False, **style)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"settings must be plain JSON values: {error}") from error


def _canonical(value: Any) -> str:
    return to_json(value, sort_keys=True, separators=(",", ":"))


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
