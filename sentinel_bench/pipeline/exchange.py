"""What happens to the signals of all replicas at a boundary, in both directions.

Two kinds: `LiveExchange` (attackers send, the defense inspects) and `WarmupExchange` (all honest;
any number of defenses and histories watch, so that cells can share one warm-up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from sentinel_bench.api import (
    Again,
    Defense,
    Direction,
    LinearCheck,
    Private,
    Recovery,
    Redone,
    Updates,
)
from sentinel_bench.config import FaultConfig
from sentinel_bench.pipeline import cost
from sentinel_bench.pipeline.inspect import (
    Inspector,
    check,
    check_updates,
    end_step,
    learn,
    learn_updates,
    show,
)
from sentinel_bench.pipeline.tamper import History, Tamperer
from sentinel_bench.pipeline.transport import Transport
from sentinel_bench.pipeline.updates import Handed, showing
from sentinel_bench.pipeline.weights import StageWork

F = TypeVar("F", bound=Callable[..., Any])
Redo = Callable[[int, Direction, Sequence[int], Tensor | None], Tensor]
"""Returns what replicas of a stage should have sent in a direction, given what all received.

What makes it takes a `microbatch` too, by name."""
Answer = Callable[[Sequence[int], Sequence[int], Tensor], Tensor]
"""Returns what replicas answer when they are asked for the work of others, given the truth."""
CheckLinears = Callable[
    [int, Direction, Sequence[int], Tensor | None, Mapping[int, Tensor], int, int], LinearCheck
]
"""Tests what replicas of a stage claim of their linear layers, see `Trainer.check_linears`."""
Privately = Callable[[int], Private]
"""Makes a private copy of the model for a replica."""


@dataclass(frozen=True, slots=True)
class Contributed:
    """What workers contribute to the weight gradients of their stage.

    Attributes:
        sent: replica to what an attacker sends, `[parameters]`; the others are honest.
        dropped: `[replicas]`, who has no part in the mean.
    """

    sent: Mapping[int, Tensor]
    dropped: list[bool]


class Exchange(Protocol):
    """What a boundary needs."""

    step: int
    redo: Redo | None
    """Set by the trainer, which has the stages."""
    check_linears: CheckLinears | None
    """Set by the trainer; None: all work is done again where linear layers should be tested."""

    @property
    def idle(self) -> bool:
        """True if no signal is looked at or changed: the boundaries are then left out."""

    @property
    def taints(self) -> bool:
        """True if ranks can be tainted: the boundaries then tell one another."""

    def looks(self, stage: int, direction: Direction) -> bool:
        """Tell whether what `stage` sends in a direction is looked at or changed."""

    def minds(self, stage: int, direction: Direction) -> bool:
        """Tell whether what arrives at `stage` in a direction is looked at or changed."""

    def depart(
        self, stage: int, direction: Direction, x: Tensor, taint: Tensor, microbatch: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Let `stage` send the signals `x` `[replicas, batch, tokens, hidden]`.

        Args:
            stage, direction: the sender.
            x: the signals.
            taint: `[replicas]`, 1 for a rank that is tainted, else 0.
            microbatch: which part of the step's batch.

        Returns:
            What is passed on, and the taint by now.
        """

    def arrive(self, stage: int, direction: Direction, x: Tensor, microbatch: int = 0) -> Tensor:
        """Let the neighbour of `stage` receive what `stage` has sent; return what it makes of it.

        Args:
            stage, direction: the sender.
            x: `[replicas, batch, tokens, hidden]`.
            microbatch: which part of the step's batch.
        """

    def hear(self, taint: Tensor, microbatch: int) -> None:
        """Take in the ranks that another process has found to be tainted."""

    @property
    def weighs(self) -> bool:
        """True if somebody looks at the weight gradients and weights of all stages."""

    def contribute(self, stage: int, excluded: Sequence[bool], work: StageWork) -> Contributed:
        """Let the workers of `stage` contribute to its weight gradients."""

    def hold(self, stage: int, weights: Tensor, replicas: int, private: Privately) -> Tensor:
        """Return the weights `[parameters]` of `stage` when its replicas are equal again.

        Args:
            stage: of the workers.
            weights: after the optimizer's step.
            replicas: how many hold them.
            private: makes a private copy of the model for a replica.
        """


class WarmupExchange:
    """Honest workers, watched by defenses whose flags do not count."""

    def __init__(self, defenses: Sequence[Defense[Any]], history: History) -> None:
        self._defenses = [d for d in defenses if not d.passive and d.learns]
        self._history = history
        self._received: dict[tuple[int, Direction, int], Tensor] = {}
        self.step = 0
        self.redo: Redo | None = None
        self.check_linears: CheckLinears | None = None

    @property
    def idle(self) -> bool:
        """True if nobody watches."""
        return not self._defenses and self._history.empty

    @property
    def taints(self) -> bool:
        """Flags do not count."""
        return False

    def looks(self, stage: int, direction: Direction) -> bool:
        """All signals are watched."""
        return True

    def minds(self, stage: int, direction: Direction) -> bool:
        """What arrives matters where a defense compares with it, and to histories."""
        needed = any(d.needs_received or d.needs_again or d.needs_updates for d in self._defenses)
        return needed or not self._history.empty

    def depart(
        self, stage: int, direction: Direction, x: Tensor, taint: Tensor, microbatch: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Show the signals to all that watch, and pass them on."""
        self._history.record(stage, direction, x, microbatch)
        all_of_them = torch.ones(len(x), dtype=torch.bool, device=x.device)
        received = self._received.get((stage, direction, microbatch))
        redo, test = _bound(self.redo, microbatch), _bound(self.check_linears, microbatch)
        for defense in self._defenses:
            before = received if defense.needs_received else None
            can = redo if defense.needs_again else None
            with rerun(can, stage, direction, received, check_linears=test) as again:
                signals = show(
                    stage, direction, self.step, x, before, all_of_them, again, microbatch
                )
                check(defense, signals)
                learn(defense, signals, all_of_them)
        return x, taint

    def arrive(self, stage: int, direction: Direction, x: Tensor, microbatch: int = 0) -> Tensor:
        """Remember what arrives until the end of the step."""
        receiver = _next_stage(stage, direction)
        if direction == "gradient":
            self._history.record(receiver, "received", x, microbatch)
        self._received[receiver, direction, microbatch] = x
        return x

    def hear(self, taint: Tensor, microbatch: int) -> None:
        """Nobody is tainted."""

    @property
    def weighs(self) -> bool:
        """True if a defense looks at weight gradients and weights."""
        return any(d.needs_updates for d in self._defenses)

    def contribute(self, stage: int, excluded: Sequence[bool], work: StageWork) -> Contributed:
        """Show weight gradients to all that look at them."""
        self._show(stage, "gradient", _gradients(stage, work, {}, excluded, None))
        return Contributed({}, [False] * len(excluded))

    def hold(self, stage: int, weights: Tensor, replicas: int, private: Privately) -> Tensor:
        """Show weights to all that look at them."""
        self._show(stage, "weights", _weights(weights, replicas, {}))
        return weights

    def _show(self, stage: int, kind: Literal["gradient", "weights"], handed: Handed) -> None:
        active = torch.ones(handed.replicas, dtype=torch.bool, device=handed.device)
        for defense in self._defenses:
            if defense.needs_updates:
                with showing(handed) as work:
                    updates = Updates(stage, self.step, kind, active, work)
                    check_updates(defense, updates)
                    learn_updates(defense, updates, active)

    def end_step(self) -> None:
        """Close a step."""
        for defense in self._defenses:
            end_step(defense, self.step)
        self._received.clear()


class LiveExchange:
    """Attackers send, the defense inspects.

    Args:
        tamperer, inspector: the two sides.
        faults: what becomes of messages that are lost between them.
    """

    def __init__(
        self, tamperer: Tamperer, inspector: Inspector, faults: FaultConfig | None = None
    ) -> None:
        self.tamperer = tamperer
        self.inspector = inspector
        self.transport = Transport(faults or FaultConfig(), inspector.ledger)
        self.step = 0
        self.keeps = False
        """True if gradients are kept at the boundaries, though nobody looks at them."""
        self.redo: Redo | None = None
        self.check_linears: CheckLinears | None = None
        self.recovery = Recovery()
        """What this pass leaves out."""
        self._passes = 1
        self._received: dict[tuple[int, Direction, int], Tensor] = {}

    @property
    def idle(self) -> bool:
        """True if neither an attacker nor a defense looks at a signal."""
        return self.tamperer.idle and self.inspector.passive and not self.keeps

    @property
    def taints(self) -> bool:
        """True if a defense looks, or a message may be lost."""
        return not self.inspector.passive or (self.tamperer.faulty and self.transport.survives)

    def looks(self, stage: int, direction: Direction) -> bool:
        """Tell whether a defense or an attacker needs to see a signal, or a taint what follows."""
        return self.taints or (stage, direction) in self.tamperer.seen

    def minds(self, stage: int, direction: Direction) -> bool:
        """Tell whether the defense compares with what arrives, or an attacker receives it."""
        return self.inspector.needs_received or (stage, direction) in self.tamperer.receives

    def depart(
        self, stage: int, direction: Direction, x: Tensor, taint: Tensor, microbatch: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Let attackers tamper and the defense inspect.

        A bypassed stage sends nothing. What the first or last one still has to do is done by those
        that hold a copy of it: nobody tampers with that, and nobody checks it.
        """
        if stage in self.recovery.bypass:
            return x, taint
        if self.inspector.deferred:
            return self._inspected(stage, direction, x, taint, microbatch)
        tainted = taint.bool().tolist()
        out, now = self._inspected(stage, direction, x, tainted, microbatch)
        return out, taint if now == tainted else taint.new_tensor(now)

    def arrive(self, stage: int, direction: Direction, x: Tensor, microbatch: int = 0) -> Tensor:
        """Let the next stage receive; of gradients, return what it lets into its backward pass."""
        if stage in self.recovery.bypass and stage != self._source(direction):
            return x
        receiver = self._receiver(stage, direction)
        if direction == "gradient":
            self.tamperer.hear(receiver, x, microbatch)
        # what arrives, not what an attacker makes of it
        self._received[receiver, direction, microbatch] = x
        if direction == "gradient" and receiver in self.tamperer.poisoned:
            if receiver in self.recovery.bypass:
                return x
            excluded = self.inspector.excluded(microbatch)
            return self.tamperer.poison(receiver, self.step, x, excluded, microbatch)
        return x

    def hear(self, taint: Tensor, microbatch: int) -> None:
        """Take in the ranks that another process has found to be tainted."""
        heard: Any = taint if self.inspector.deferred else taint.bool().tolist()
        self.inspector.hear(heard, microbatch)

    @property
    def weighs(self) -> bool:
        """True if the defense looks at weight gradients and weights."""
        return self.inspector.needs_updates

    def contribute(self, stage: int, excluded: Sequence[bool], work: StageWork) -> Contributed:
        """Let attackers change what they contribute, and the defense look at it."""
        with cost.aside():  # attackers compute on their own machines
            sent = self.tamperer.contribute(stage, self.step, excluded, work)
        received = self._received_whole(stage, "gradient")
        handed = _gradients(stage, work, sent, excluded, received)
        return Contributed(sent, self.inspector.weigh(stage, self.step, "gradient", handed))

    def hold(self, stage: int, weights: Tensor, replicas: int, private: Privately) -> Tensor:
        """Let attackers change the weights that they hold, and the defense look at them.

        Replicas of a stage are made equal again: what one adds reaches all of them.
        """
        lost = [self.inspector.ledger.lost(r) for r in range(replicas)]
        with cost.aside():
            held = self.tamperer.inject(stage, self.step, weights, lost, private)
        handed = _weights(weights, replicas, held)
        dropped = self.inspector.weigh(stage, self.step, "weights", handed)
        kept = [changed for replica, changed in held.items() if not dropped[replica]]
        if not kept:
            return weights
        return kept[0] + sum((changed - weights for changed in kept[1:]), weights.new_zeros(()))

    def arrived(self, stage: int, direction: Direction) -> Tensor:
        """Return what `stage` was sent in this pass, `[replicas, batch, tokens, hidden]`."""
        return self._received[stage, direction, 0]

    def _received_whole(self, stage: int, direction: Direction) -> Tensor | None:
        """Return what `stage` was sent in all microbatches, `[replicas, batch, tokens, hidden]`."""
        parts = sorted(m for s, d, m in self._received if (s, d) == (stage, direction))
        found = [self._received[stage, direction, m] for m in parts]
        return torch.cat(found, 1) if len(found) > 1 else next(iter(found), None)

    def settle(self) -> Recovery | None:
        """Ask what becomes of this pass: None if it counts; else the next one is made ready."""
        answer = self.inspector.recover(self.step, self._passes, self.recovery)
        if answer is not None:
            self._begin_pass(answer, self._passes + 1)
        return answer

    def _inspected(
        self, stage: int, direction: Direction, x: Tensor, tainted: Any, microbatch: int
    ) -> tuple[Tensor, Any]:
        received = self._received.get((stage, direction, microbatch))
        look = partial(
            self.inspector.preview,
            stage,
            direction,
            self.step,
            received=received,
            tainted=tainted,
            microbatch=microbatch,
        )
        sent = self.tamperer.send(stage, direction, self.step, x, received, look, microbatch)
        sent = self.transport.deliver(stage, direction, self.step, sent)
        if self.inspector.redundancy is None:
            answer = partial(self.tamperer.answer, stage, direction, self.step, sent.x)
        else:
            holder = (stage + 1) % self.inspector.ledger.stages
            answer = partial(self.tamperer.testify, stage, holder, self.step, sent.x)
        redo = _bound(self.redo, microbatch) if self.inspector.needs_again else None
        copied = self.inspector.redundancy is not None
        lies = {r: sent.x[r] for r, tampered in enumerate(sent.tampered) if tampered}
        test = _bound(self.check_linears, microbatch)
        with rerun(redo, stage, direction, received, answer, copied, test, lies) as again:
            return self.inspector.inspect(
                stage, direction, self.step, sent, received, tainted, again, microbatch
            )

    def _source(self, direction: Direction) -> int:
        """Return the stage at which a direction begins."""
        return 0 if direction == "activation" else self.inspector.ledger.stages - 1

    def _receiver(self, stage: int, direction: Direction) -> int:
        """Return the next stage that is not bypassed, or the end of the pipeline."""
        ends = (0, self.inspector.ledger.stages - 1)
        receiver = _next_stage(stage, direction)
        while receiver in self.recovery.bypass and receiver not in ends:
            receiver = _next_stage(receiver, direction)
        return receiver

    def _begin_pass(self, recovery: Recovery, number: int) -> None:
        self.recovery, self._passes = recovery, number
        self._received.clear()
        self.tamperer.begin_pass(number - 1)
        self.inspector.begin_pass()

    def end_step(self) -> None:
        """Forget the signals of this step."""
        self._begin_pass(Recovery(), 1)


class Rerun:
    """Work done a second time; see `api.Again`.

    A defense holds a number and nothing else. What it stands for leads to the attackers, and to a
    state of the stages that the rest of the step changes: it is kept by this module, until the
    boundary is closed.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def recompute(self, of: Sequence[int]) -> Tensor:
        """Return what replicas `of` should have sent."""
        work = self._work()
        cost.recomputed(work.stage)
        return work.redo(of)

    def ask(self, of: Sequence[int], by: Sequence[int]) -> Tensor:
        """Return what replicas `by` say that replicas `of` should have sent."""
        work = self._work()
        answers = work.redo(of)
        cost.asked(work.stage, work.direction, answers, copied=work.copied)
        if work.answer is not None:
            answers = work.answer(of, by, answers)
        return answers.clone()  # its version would tell whether somebody lied

    def check_linears(self, of: Sequence[int], projections: int, seed: int) -> LinearCheck:
        """Test what replicas `of` claim of their linear layers."""
        work = self._work()
        cost.recomputed(work.stage)
        if work.check_linears is None:
            result = work.redo(of)
            return LinearCheck(result, result.new_zeros(len(of)).double())
        return work.check_linears(of, projections, seed)

    def _work(self) -> _Work:
        if self._number not in _OPEN:
            raise RuntimeError("work can be done again only while its signals are checked")
        return _OPEN[self._number]


@dataclass(frozen=True, slots=True)
class _Work:
    stage: int
    direction: Direction
    redo: Callable[[Sequence[int]], Tensor]
    answer: Answer | None
    copied: bool
    check_linears: Callable[[Sequence[int], int, int], LinearCheck] | None


_OPEN: dict[int, _Work] = {}
_NUMBERS = count()


@contextmanager
def rerun(
    redo: Redo | None,
    stage: int,
    direction: Direction,
    received: Tensor | None,
    answer: Answer | None = None,
    copied: bool = False,
    check_linears: CheckLinears | None = None,
    lies: Mapping[int, Tensor] | None = None,
) -> Iterator[Again | None]:
    """Let work be done a second time within the `with` block.

    Args:
        redo: does the work of replicas of a stage; None: nobody asks for it.
        stage, direction: whose work.
        received: `[replicas, batch, tokens, hidden]`, what the stage received in this direction.
        answer: what malicious replicas make of it when they are asked; None: all are honest.
        copied: True if it is the work of a copy that another stage keeps.
        check_linears: tests what replicas claim of their linear layers; None: all work is redone.
        lies: replica to what it sent, `[batch, tokens, hidden]`, of those who tampered with it.
    """
    if redo is None:
        yield None
        return
    number = next(_NUMBERS)
    test = check_linears
    _OPEN[number] = _Work(
        stage,
        direction,
        lambda of: redo(stage, direction, of, received),
        answer,
        copied,
        test and (lambda of, k, seed: test(stage, direction, of, received, lies or {}, k, seed)),
    )
    try:
        yield Rerun(number)
    finally:
        del _OPEN[number]


def _bound(work: F | None, microbatch: int) -> F | None:
    """Return `work` for a microbatch."""
    return (
        cast(F, partial(work, microbatch=microbatch)) if work is not None and microbatch else work
    )


def _gradients(
    stage: int,
    work: StageWork,
    sent: Mapping[int, Tensor],
    excluded: Sequence[bool],
    received: Tensor | None,
) -> Handed:
    """Return the weight gradients of a stage, to be done again from what it `received`.

    That is not always what it let into its own backward pass (`threat.poison_self`).
    """
    priced = _Priced(stage, work, received)
    return Handed(
        replicas=work.replicas,
        tampered=sent,
        honest=cost.aside()(work.gradient),
        again=lambda replica: priced.redo([replica]).update,
        losses=cost.aside()(work.losses),
        work=priced,
        excluded=excluded,
        device=work.fed.device,
    )


@dataclass(frozen=True, slots=True)
class _Priced:
    """Work of a stage that is counted when it is done again."""

    stage: int
    work: StageWork
    received: Tensor | None

    def mean(self, excluded: Sequence[bool]) -> tuple[list[int], Tensor]:
        """Return who is not excluded, and the mean of their honest weight gradients."""
        return self.work.mean(excluded)

    def redo(self, of: Sequence[int]) -> Redone:
        """Do the work of replicas `of` again."""
        cost.recomputed(self.stage)
        return self.work.redo(of, self.received)


def _weights(weights: Tensor, replicas: int, held: Mapping[int, Tensor]) -> Handed:
    return Handed(
        replicas=replicas,
        tampered=held,
        honest=lambda _: weights,
        again=lambda _: weights,
        losses=lambda: None,
        work=None,
        excluded=(),
        device=weights.device,
    )


def _next_stage(stage: int, direction: Direction) -> int:
    """Return the stage that receives what `stage` sends."""
    return stage + 1 if direction == "activation" else stage - 1
