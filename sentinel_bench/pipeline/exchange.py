"""What happens to the signals of all replicas at a boundary, in both directions.

Two kinds: `LiveExchange` (attackers send, the defense inspects) and `WarmupExchange` (all honest;
any number of defenses and histories watch, so that cells can share one warm-up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from sentinel_bench.api import Again, Defense, Direction
from sentinel_bench.pipeline.inspect import Inspector, check, end_step, learn, row_mask, show
from sentinel_bench.pipeline.tamper import History, Sent, Tamperer


Redo = Callable[[int, Direction, Sequence[int]], Tensor]
"""Returns what some replicas of a stage should have sent in a direction."""


class Exchange(Protocol):
    """What a boundary needs."""

    redo: Redo | None
    """Set by the trainer, which has the stages."""

    @property
    def idle(self) -> bool:
        """True if no signal is looked at or changed: the boundaries are then left out."""

    def looks(self, stage: int, direction: Direction) -> bool:
        """Tell whether what `stage` sends in a direction is looked at or changed."""

    def cross(
        self, stage: int, direction: Direction, x: Tensor, tainted: list[bool]
    ) -> tuple[Tensor, list[bool]]:
        """Let the signals `x` `[replicas, batch, tokens, hidden]` that `stage` sends cross."""


class WarmupExchange:
    """Honest workers, watched by defenses whose flags do not count."""

    def __init__(self, defenses: Sequence[Defense[Any]], history: History) -> None:
        self._defenses = [d for d in defenses if not d.passive and d.learns]
        self._history = history
        self._received: dict[tuple[int, Direction], Tensor] = {}
        self.step = 0
        self.redo: Redo | None = None

    @property
    def idle(self) -> bool:
        """True if nobody watches."""
        return not self._defenses and self._history.empty

    def looks(self, stage: int, direction: Direction) -> bool:
        """All signals are watched."""
        return True

    def cross(
        self, stage: int, direction: Direction, x: Tensor, tainted: list[bool]
    ) -> tuple[Tensor, list[bool]]:
        """Show the signals to all that watch, and pass them on."""
        self._history.record(stage, direction, x)
        all_of_them = row_mask([True] * len(x), x)
        received = self._received.get((stage, direction))
        for defense in self._defenses:
            before = received if type(defense).needs_received else None
            again = self._again(stage, direction) if type(defense).needs_again else None
            signals = show(stage, direction, self.step, x, before, all_of_them, again)
            check(defense, signals)
            learn(defense, signals, all_of_them)
        self._received[_next_stage(stage, direction), direction] = x
        return x, tainted

    def _again(self, stage: int, direction: Direction) -> Again | None:
        return None if self.redo is None else Rerun(self.redo, stage, direction)

    def end_step(self) -> None:
        """Close a step."""
        for defense in self._defenses:
            end_step(defense, self.step)
        self._received.clear()


class LiveExchange:
    """Attackers send, the defense inspects.

    Args:
        tamperer, inspector: the two sides.
    """

    def __init__(self, tamperer: Tamperer, inspector: Inspector) -> None:
        self.tamperer = tamperer
        self.inspector = inspector
        self.step = 0
        self.redo: Redo | None = None
        self._received: dict[tuple[int, Direction], Tensor] = {}

    @property
    def idle(self) -> bool:
        """True if neither an attacker nor a defense looks at a signal."""
        return self.tamperer.idle and self.inspector.passive

    def looks(self, stage: int, direction: Direction) -> bool:
        """Tell whether a defense or an attacker needs to see a signal."""
        return not self.inspector.passive or (stage, direction) in self.tamperer.seen

    def cross(
        self, stage: int, direction: Direction, x: Tensor, tainted: list[bool]
    ) -> tuple[Tensor, list[bool]]:
        """Let attackers tamper and the defense inspect; return what arrives."""
        received = self._received.get((stage, direction))
        look = partial(
            self.inspector.preview, stage, direction, self.step, received=received, tainted=tainted
        )
        sent: Sent = self.tamperer.send(stage, direction, self.step, x, received, look)
        again = self._again(stage, direction, sent.x)
        out, tainted = self.inspector.inspect(
            stage, direction, self.step, sent, received, tainted, again
        )
        receiver = _next_stage(stage, direction)
        if direction == "gradient":
            out = self.tamperer.poison(receiver, self.step, out)
        self._received[receiver, direction] = out
        return out, tainted

    def _again(self, stage: int, direction: Direction, sent: Tensor) -> Again | None:
        if self.redo is None or not self.inspector.needs_again:
            return None
        answer = partial(self.tamperer.answer, stage, direction, self.step, sent)
        return Rerun(self.redo, stage, direction, answer)

    def end_step(self) -> None:
        """Forget the signals of this step."""
        self._received.clear()


class Rerun:
    """Work done a second time; see `api.Again`.

    Args:
        redo: does the work of replicas of a stage.
        stage, direction: whose work.
        answer: what malicious replicas make of it when they are asked; None: all are honest.
    """

    def __init__(
        self,
        redo: Redo,
        stage: int,
        direction: Direction,
        answer: Callable[[Sequence[int], Sequence[int], Tensor], Tensor] | None = None,
    ) -> None:
        self._redo = redo
        self._stage = stage
        self._direction = direction
        self._answer = answer

    def recompute(self, of: Sequence[int]) -> Tensor:
        """Return what replicas `of` should have sent."""
        return self._redo(self._stage, self._direction, of)

    def ask(self, of: Sequence[int], by: Sequence[int]) -> Tensor:
        """Return what replicas `by` say that replicas `of` should have sent."""
        honest = self.recompute(of)
        return honest if self._answer is None else self._answer(of, by, honest)


def _next_stage(stage: int, direction: Direction) -> int:
    """Return the stage that receives what `stage` sends."""
    return stage + 1 if direction == "activation" else stage - 1
