"""What a run is and what made it: digests of settings and of source, versions, machine kind."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from sentinel_bench.errors import ConfigError

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
    parts = []
    for path in paths:
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as Python: {error}") from error
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        parts.append([path.name, hashlib.sha256(ast.dump(tree).encode()).hexdigest()])
    return hashlib.sha256(json.dumps(sorted(parts)).encode()).hexdigest()


def module_sources(module: str) -> set[Path]:
    """Return the source files of a module and of all that it imports from its own package.

    The package of `a.b.c` is `a`; for ours it is `sentinel_bench.attacks` or `.defenses`, since the
    rest of ours is in the digest of the engine.
    """
    first = module.partition(".")[0]
    package = module.rpartition(".")[0] if first == "sentinel_bench" else first
    found: dict[str, Path] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        spec = find_spec(name) if name not in found else None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        found[name] = Path(spec.origin)
        for node in ast.walk(ast.parse(found[name].read_bytes())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                relative = "." * node.level + (node.module or "")
                base = resolve_name(relative, spec.parent)
                names += [base, *(f"{base}.{a.name}" for a in node.names)]
            todo += [n for n in names if n.startswith(package + ".") and _is_module(n)]
    return set(found.values())


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
