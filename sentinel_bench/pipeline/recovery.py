"""The passes of one step: a defense that raised an alarm can have it done again, or skipped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sentinel_bench.api import Recovery
from sentinel_bench.pipeline.stages import Stage

MAX_PASSES = 100
"""Passes of a step; a defense that asks for more never ends."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass gave.

    Attributes:
        loss: mean over the tokens of the ranks that count; None if it is in another process.
        excluded: how many ranks were left out of the weight gradients.
        again: what becomes of it; None: it counts, and the weight gradients are there.
    """

    loss: Tensor | None
    excluded: int
    again: Recovery | None


def run(stages: Mapping[int, Stage], one: Callable[[], Pass]) -> tuple[Pass, Recovery]:
    """Do the passes of a step, until one counts or the step is given up.

    Args:
        stages: by their index; those that a pass leaves out are bypassed while it runs.
        one: does a pass.

    Returns:
        The last pass, and what it left out or whether it is skipped. Weights that stay as they are
        have no gradient.
    """
    recovery = Recovery()
    while True:
        with bypassing(stages, recovery.bypass):
            done = one()
        if done.again is None:
            break
        recovery = done.again
        if recovery.skip:
            break
    for index in recovery.still:
        stages[index].zero_grad(set_to_none=True)
    return done, recovery


@contextmanager
def bypassing(stages: Mapping[int, Stage], indices: Collection[int]) -> Iterator[None]:
    """Leave the layers of some stages out within the `with` block."""
    try:
        for index in indices:
            stages[index].bypassed = True
        yield
    finally:
        for index in indices:
            stages[index].bypassed = False


def problem(answer: Any, passes: int, stages: int) -> str | None:
    """Say why the answer of a defense cannot be followed; None if it can.

    Args:
        answer: what `Defense.recover` returned.
        passes: how many this step has had.
        stages: their number.
    """
    if answer is None:
        return None
    if not isinstance(answer, Recovery):
        return f"returned {answer!r}, neither None nor a Recovery"
    unknown = answer.still - set(range(stages))
    if unknown:
        return f"names stages {sorted(unknown)} of {stages}"
    if passes >= MAX_PASSES and not answer.skip:
        return f"asks for more than {MAX_PASSES} passes of one step"
    return None
