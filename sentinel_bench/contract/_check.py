"""What a check is, and how it says what is wrong."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentinel_bench.errors import SentinelBenchError
from sentinel_bench.registry import Registry

Property = Callable[[str], str | None]
"""A function of the name of a plugin. It raises a `Violation`, or returns why it does not apply."""


class Violation(SentinelBenchError):  # noqa: N818
    """A plugin does not keep what it owes.

    Attributes:
        reason: what was seen, and where.
        remedy: what to do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class Check:
    """One property of one plugin. Call it."""

    registry: Registry[Any]
    plugin: str
    check: Property

    @property
    def name(self) -> str:
        """Name of the property, for ids and JSON."""
        return self.check.__name__.replace("_", "-")

    @property
    def text(self) -> str:
        """The property in one sentence."""
        return (self.check.__doc__ or "").split("\n")[0].removesuffix(".")

    def __call__(self) -> str | None:
        """Return None if the plugin has the property, or a sentence: why that is not asked of it.

        Raises:
            Violation: it has not, or it raised while it was tried.
        """
        try:
            return self.check(self.plugin)
        except SentinelBenchError as error:
            if isinstance(error, Violation):
                raise
            raise Violation(str(error), "mend that first") from error
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            raise Violation(
                f"it raised {type(error).__name__}{self._where(error)}: {error}",
                "a plugin must take all that the check sends",
            ) from error

    def __str__(self) -> str:
        return self.name

    def _where(self, error: BaseException) -> str:
        """Return the last line of the plugin's own file that the error passed."""
        module = sys.modules.get(self.registry.get(self.plugin).__module__)
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.filename == getattr(module, "__file__", None)]
        frame = (own or frames)[-1]
        return f" at {Path(frame.filename).name}:{frame.lineno}"


def require(holds: object, reason: str, remedy: str) -> None:
    """Refuse what does not hold.

    Raises:
        Violation: with the reason and what to do.
    """
    if not holds:
        raise Violation(reason, remedy)
