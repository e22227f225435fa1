"""JSON, YAML and gzip as a submission may hold them: small, flat, without anything twice."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import yaml

from sentinel_bench.submit.rules import DEPTH, ROW, ROWS, STRING, RefusedError, odd

LARGEST = 2**128
_GZIP = 31  # a window of 2**15, with the header and the check sums of gzip


def read_json(content: bytes) -> Any:
    """Return the value of strict JSON.

    Raises:
        RefusedError: it is not JSON, holds NaN, a number without a finite value, a key twice, or is
            nested too deep; a text in it is too long or holds what cannot be shown.
    """
    try:
        value = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_number,
        )
    except (ValueError, RecursionError) as error:
        raise RefusedError("format", f"is not strict JSON: {error}") from error
    _check(value)
    return value


def read_json_object(content: bytes) -> dict[str, Any]:
    """Return the value of strict JSON that is an object; see `read_json`."""
    value = read_json(content)
    if not isinstance(value, dict):
        raise RefusedError("format", "is not a JSON object")
    return value


def read_yaml(content: bytes) -> Any:
    """Return the value of YAML.

    Raises:
        RefusedError: as `read_json`; or it has an anchor, an alias or a tag of its own.
    """
    try:
        value = yaml.load(content.decode("utf-8"), Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise RefusedError(
            "format", f"is not plain YAML: {' '.join(str(error).split())}"
        ) from error
    _check(value)
    return value


def read_rows(content: bytes, largest: int) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of gzip'd JSON lines, and their bytes; `largest` is the most of these.

    Raises:
        RefusedError: as `read_json`; or the archive is damaged, goes on after its end, or is too
            large.
    """
    text = _unpacked(content, largest)
    lines = text.split(b"\n")
    if lines.pop():
        raise RefusedError("format", "does not end with a whole line")
    if len(lines) > ROWS:
        raise RefusedError("file-size", f"has {len(lines):,} events; at most {ROWS:,} are taken")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if len(line) > ROW:
            raise RefusedError("file-size", f"row {number} is larger than {ROW:,} bytes")
        try:
            rows.append(read_json_object(line))
        except RefusedError as refused:
            raise RefusedError(refused.rule, f"row {number} {refused}") from refused
    return rows, len(text)


def _unpacked(content: bytes, largest: int) -> bytes:
    unpacker = zlib.decompressobj(_GZIP)
    try:
        data = unpacker.decompress(content, largest + 1)
    except zlib.error as error:
        raise RefusedError("format", f"is not gzip: {error}") from error
    if len(data) > largest:
        raise RefusedError("file-size", f"holds more than {largest:,} bytes once it is unpacked")
    if not unpacker.eof:
        raise RefusedError("format", "is cut off")
    if unpacker.unused_data:
        raise RefusedError("format", "goes on after its end")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _check(value: Any) -> None:
    """Refuse what is nested too deep, and texts that are too long or cannot be shown."""
    level = [value]
    for _ in range(DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, int) and abs(item) >= LARGEST:
                raise RefusedError("format", "has a number that is too large")
            elif isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below
    if level:
        raise RefusedError("format", f"is nested deeper than {DEPTH} levels")


def _check_text(text: str) -> None:
    if len(text) > STRING:
        what = f"has a text of {len(text):,} characters; at most {STRING:,} are taken"
        raise RefusedError("text", what)
    if odd(text):
        raise RefusedError("text", f"has a text with signs that are not shown: {text!r}")


class _Loader(yaml.SafeLoader):
    """Safe YAML without aliases, and without a key twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, and anchors, which are of no use without them."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.YAMLError("anchors and aliases are not taken")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse keys that are not text, or there twice."""
        keys = [key.value for key, _ in node.value]
        if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
            raise yaml.YAMLError("a key is there twice, or is no text")
        return super().construct_mapping(node, deep)
