"""Runs the checks of a plugin, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sentinel_bench.contract._check import Check, Violation

Status = Literal["passed", "failed", "not asked"]


@dataclass(frozen=True)
class Outcome:
    """What became of one check.

    Attributes:
        name: of the property.
        text: the property in one sentence.
        status: "not asked" if it does not apply, or could not be tried.
        reason: why it failed or was not asked.
        remedy: what to do.
    """

    name: str
    text: str
    status: Status
    reason: str = ""
    remedy: str = ""


def judge(checks: Sequence[Check], tick: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Run all checks; if the first one fails, the others are not tried.

    `tick` is called after each.
    """
    outcomes: list[Outcome] = []
    for check in checks:
        if outcomes and outcomes[0].status == "failed":
            outcomes.append(Outcome(check.name, check.text, "not asked", "it cannot be made"))
        else:
            outcomes.append(_judged(check))
        tick()
    return outcomes


def _judged(check: Check) -> Outcome:
    try:
        reason = check()
    except Violation as violation:
        return Outcome(check.name, check.text, "failed", violation.reason, violation.remedy)
    return Outcome(check.name, check.text, "not asked" if reason else "passed", reason or "")
