"""Reading from the Hugging Face hub: quietly, and quick to fail off-line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType

from sentinel_bench.data._files import group

PROBE_SECONDS = 5.0
_LOGGERS = ("datasets", "fsspec", "huggingface_hub", "transformers")


class UnreachableError(Exception):
    """The hub does not answer, or off-line mode is on."""


def check_reachable() -> None:
    """Ask the hub once, with the client that the libraries use.

    Without this, they repeat each request for 20 seconds or more; their number of retries cannot
    be set. Any answer will do, also one that says no.

    Raises:
        UnreachableError: no answer.
    """
    import huggingface_hub as hub

    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=PROBE_SECONDS)
    # The class depends on the HTTP library below, which has changed with the hub's versions.
    except Exception as error:
        raise UnreachableError(reason(error)) from error


def stream_texts(
    path: str,
    config: str | None,
    *,
    split: str,
    revision: str | None,
    column: str,
    limit: int,
    lines: bool,
) -> list[str]:
    """Read the first `limit` documents of a hub data set (or a local folder of its files).

    Blank rows are left out. With `lines`, rows are joined to documents.

    Raises:
        UnreachableError: the hub does not answer.
        Exception: whatever the libraries below raise.
    """
    if not Path(path).is_dir():
        check_reachable()
    import datasets
    import huggingface_hub.utils

    with quiet(datasets, huggingface_hub.utils):
        rows = datasets.load_dataset(path, config, split=split, streaming=True, revision=revision)
        texts = _column(rows, column)
        return list(islice(group(texts, "") if lines else texts, limit))


def reason(error: BaseException) -> str:
    """Return the class and the first line of an error, shortened."""
    text = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    text = text if len(text) <= 160 else f"{text[:157]}..."
    if isinstance(error, UnreachableError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def quiet(*libraries: ModuleType) -> Iterator[None]:
    """Silence warnings and the progress bars of `libraries`, and set them back afterwards.

    The messages are about retries and downloads; what matters of them is in the exception. The
    libraries must be imported before: they set their log levels when they are imported.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown = [library for library in libraries if not library.are_progress_bars_disabled()]
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            for library in shown:
                library.disable_progress_bars()
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            for library in shown:
                library.enable_progress_bars()


def _column(rows: object, column: str) -> Iterator[str]:
    for row in rows:  # type: ignore[attr-defined]
        if column not in row:
            raise LookupError(f"no column {column!r} among {', '.join(row)}")
        if row[column] and row[column].strip():
            yield row[column]
