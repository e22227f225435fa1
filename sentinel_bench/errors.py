"""Errors that a user can mend: printed as one line, without a traceback.

A message says what is wrong, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SentinelBenchError(Exception):
    """Base of all errors of this package. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(SentinelBenchError):
    """A setting, a name, a file or a folder that cannot be used. Nothing was run."""

    exit_code = 2


class PluginError(SentinelBenchError):
    """An attack or a defense broke its contract, or could not be imported.

    `party` is who is at fault: "attack" or "defense".
    """

    def __init__(self, message: str, party: str = "plugin") -> None:
        super().__init__(message)
        self.party = party


class KnowledgeError(PluginError):
    """An attack asked for something that it does not declare to know."""

    def __init__(self, message: str) -> None:
        super().__init__(message, party="attack")


class FaultError(SentinelBenchError):
    """A simulated fault of a worker ended the run, as it would have ended a real one."""


class RunError(SentinelBenchError):
    """A run could not be finished or read."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known names look like `name`: '; did you mean a, b?', or the whole list."""
    names = sorted(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; known: {', '.join(names)}"
