"""The trusted side of a boundary: a defense looks, the ledger decides, the signal is passed on."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from sentinel_bench.api import (
    Again,
    Defense,
    Direction,
    Recovery,
    Redundancy,
    Setup,
    Signals,
    Updates,
    Verdict,
)
from sentinel_bench.errors import PluginError
from sentinel_bench.ledger import Ban, Ledger, Ruling
from sentinel_bench.pipeline import cost
from sentinel_bench.pipeline.recovery import problem
from sentinel_bench.pipeline.tamper import Sent
from sentinel_bench.pipeline.updates import Handed, showing


class Log(Protocol):
    """Where events go."""

    def append(self, kind: str, /, **fields: Any) -> None:
        """Add one row."""


class Tracer(Protocol):
    """Where the statistics of all tested workers go, if somebody wants them."""

    def append(
        self,
        step: int,
        stage: int,
        direction: str,
        statistics: Mapping[int, Mapping[str, Sequence[float]]],
    ) -> None:
        """Add one boundary: replica to name to value, low and high."""


@dataclass(slots=True)
class Tally:
    """Counts of one step; pairs are [honest, tampered]."""

    checked: list[int] = field(default_factory=lambda: [0, 0])
    flagged: list[int] = field(default_factory=lambda: [0, 0])
    tampered: int = 0


class Inspector:
    """Checks all signals of a cell with one defense.

    Args:
        defense: started, and warmed up.
        ledger: the response.
        log: gets flags and amnesties.
        microbatches: of a step.
        trace: gets the statistics of all tested workers.
    """

    deferred: ClassVar[bool] = False
    """True if tainted ranks are given and taken as tensors."""

    def __init__(
        self,
        defense: Defense[Any],
        ledger: Ledger,
        log: Log,
        microbatches: int = 1,
        trace: Tracer | None = None,
    ) -> None:
        self.ledger = ledger
        self.tally = Tally()
        self.late: dict[int, int] = {}
        """Ranks first tainted in this step's backward pass, and the stage that sent the lie."""
        self.tainted = [[False] * ledger.replicas for _ in range(microbatches)]
        """`[microbatches][replicas]`, as far as it is known in this process."""
        self.passive = type(defense).passive
        """True if the defense never looks at a signal."""
        self.needs_again = defense.needs_again
        """True if the defense has work done a second time."""
        self.needs_updates = defense.needs_updates
        """True if the defense looks at weight gradients and weights."""
        self.needs_received = defense.needs_received or defense.needs_again or defense.needs_updates
        """True if what workers received is compared with, or worked on again."""
        self._recovers = type(defense).recover is not Defense.recover
        self.redundancy = redundancy(defense)
        """How stages keep copies of blocks, if they do."""
        self._suspects: set[int] = set()
        self._lied: set[tuple[int, int]] = set()
        self._copied: dict[tuple[Direction, int], tuple[Tensor, Tensor]] = {}
        self._defense = defense
        self._asked: tuple[tuple[int, int, str, int], Defense[Any]] | None = None
        self._log = log
        self._trace = trace

    def inspect(
        self,
        stage: int,
        direction: Direction,
        step: int,
        sent: Sent,
        received: Tensor | None,
        tainted: list[bool],
        again: Again | None = None,
        microbatch: int = 0,
    ) -> tuple[Tensor, list[bool]]:
        """Check what `stage` sent; return what is passed on, and the tainted ranks."""
        self._counted(stage, sent)
        missing = sent.missing or [False] * len(tainted)
        if self.passive:
            return self._unseen(stage, direction, sent.x, tainted, missing, microbatch)
        intact = intact_rows(sent)
        x = sent.x if all(intact) else zero_rows(sent.x, [not i for i in intact])
        tested = [t and not m for t, m in zip(self._tested(stage, tainted), missing, strict=True)]
        active = [t and i for t, i in zip(tested, intact, strict=True)]
        mask = row_mask(active, x)
        signals = self._signals(stage, direction, step, x, received, mask, again, microbatch)
        verdict = check(self._defense, signals)
        flagged = [f or not i for f, i in zip(verdict.flagged.tolist(), intact, strict=True)]
        severe = [s or not i for s, i in zip(verdict.severe.tolist(), intact, strict=True)]
        ruling = self._ruled(
            stage, direction, step, sent.tampered, flagged, severe, tested, verdict, microbatch
        )
        if any(missing):
            self._suspects.add(stage)
        clean = [c and i for c, i in zip(ruling.clean, intact, strict=True)]
        learn(self._defense, signals, mask if clean == active else row_mask(clean, x))
        now = self._now(tainted, ruling, tested, intact, missing)
        self._taint(stage, direction, now, microbatch)
        if direction == "gradient":
            lost = [self.ledger.lost(r) for r in range(len(now))]
            if any(lost):  # nobody looks at what a lost rank sends: it sends nothing
                x = zero_rows(x, lost)
            if any(now):
                x = self._substitute(x, now, verdict.reference)
        return x, now

    def weigh(
        self, stage: int, step: int, kind: Literal["gradient", "weights"], handed: Handed
    ) -> list[bool]:
        """Check what the workers of `stage` hand in; return who has no part in the mean."""
        if not self.needs_updates:
            return [False] * handed.replicas
        if kind == "gradient":
            kept = [not e for e in self.excluded()]
            tainted = [any(parts) for parts in zip(*self.tainted, strict=True)]
            tested = [t and k for t, k in zip(self._tested(stage, tainted), kept, strict=True)]
        else:  # what a worker holds does not follow from what its rank was sent
            tested = self._tested(stage, [False] * handed.replicas)
        mask = torch.tensor(tested, device=handed.device)
        with showing(handed) as work:
            updates = Updates(stage, step, kind, mask, work)
            verdict = check_updates(self._defense, updates)
            flagged, severe = verdict.flagged.tolist(), verdict.severe.tolist()
            ruling = self.ledger.judge(stage, flagged, severe, tested)
            lied = [  # a flag is right if anything that the worker sent in this step was wrong
                r in handed.tampered or (f and (stage, r) in self._lied)
                for r, f in enumerate(flagged)
            ]
            self._count(stage, "update", step, lied, flagged, tested, verdict)
            self._pardoned(stage, "update", step, ruling)
            learn_updates(self._defense, updates, torch.tensor(ruling.clean, device=handed.device))
        return ruling.flagged

    def preview(
        self,
        stage: int,
        direction: Direction,
        step: int,
        x: Tensor,
        *,
        received: Tensor | None,
        tainted: list[bool],
        microbatch: int = 0,
    ) -> Verdict | None:
        """Return what the defense would say of signals `x`, all of them readable; nothing changes.

        A copy of the defense is asked, made once for each boundary: the defense must not learn who
        asks. None if it offers no statistics.
        """
        if self.passive:
            return None
        where = (step, stage, direction, microbatch)
        if self._asked is None or self._asked[0] != where:
            self._asked = where, fork(self._defense)
        intact = intact_rows(Sent(x, [False] * len(x), [True] * len(x)))
        x = x if all(intact) else zero_rows(x, [not i for i in intact])
        tested = self._tested(stage, tainted)
        mask = row_mask([t and i for t, i in zip(tested, intact, strict=True)], x)
        before = received if self._defense.needs_received else None
        return preview(
            self._asked[1], show(stage, direction, step, x, before, mask, None, microbatch)
        )

    def recover(self, step: int, passes: int, last: Recovery) -> Recovery | None:
        """Ask the defense what becomes of this pass, if signals were flagged. None: it counts.

        Raises:
            PluginError: the defense raised, or its answer is none that can be followed.
        """
        if not (self._recovers and self._suspects):
            return None
        answer = recover(self._defense, frozenset(self._suspects), passes, last, self.ledger.stages)
        if answer is not None:
            self._log.append(
                "recovery",
                step=step,
                suspects=sorted(self._suspects),
                bypass=sorted(answer.bypass),
                freeze=sorted(answer.freeze),
                skip=answer.skip,
            )
        return answer

    def hear(self, tainted: list[bool], microbatch: int) -> None:
        """Take in the ranks that another process has found to be tainted."""
        known = self.tainted[microbatch]
        self.tainted[microbatch] = [a or b for a, b in zip(known, tainted, strict=True)]

    def begin_pass(self) -> None:
        """Forget the taints and suspects of a pass; what was counted stays."""
        self.tainted = [[False] * self.ledger.replicas for _ in self.tainted]
        self.late = {}
        self._suspects.clear()
        self._lied.clear()
        self._copied.clear()

    def end_step(self, step: int) -> list[Ban]:
        """Close a step: fences move, workers are banned; counts and taints start anew."""
        if not self.passive:
            end_step(self._defense, step)
        bans = self.ledger.end_step()
        for ban in bans:
            self._log.append(
                "ban", step=step, stage=ban.stage, replica=ban.replica, reason=ban.reason
            )
        self.tally = Tally()
        self.begin_pass()
        return bans

    def excluded(self, microbatch: int | None = None) -> list[bool]:
        """Return the ranks that are left out of this step's weight gradients.

        With a microbatch: those that are left out of its loss.
        """
        parts = self.tainted if microbatch is None else [self.tainted[microbatch]]
        tainted = [self.ledger.policy.quarantine and any(t) for t in zip(*parts, strict=True)]
        return [t or self.ledger.lost(r) for r, t in enumerate(tainted)]

    def _unseen(
        self,
        stage: int,
        direction: Direction,
        x: Tensor,
        tainted: list[bool],
        missing: list[bool],
        microbatch: int,
    ) -> tuple[Tensor, list[bool]]:
        """Return what is passed on where no defense looks, and the tainted ranks."""
        now = [t or m for t, m in zip(tainted, missing, strict=True)]
        self._taint(stage, direction, now, microbatch)
        gone = [self.ledger.lost(r) or (t and direction == "gradient") for r, t in enumerate(now)]
        return (zero_rows(x, gone) if any(gone) else x), now

    def _tested(self, stage: int, tainted: list[bool]) -> list[bool]:
        """Return the replicas that are tested: neither tainted, nor lost, nor banned."""
        return [
            not (t or self.ledger.lost(r) or self.ledger.banned(stage, r))
            for r, t in enumerate(tainted)
        ]

    def _before(
        self, direction: Direction, received: Tensor | None, microbatch: int
    ) -> Tensor | None:
        """Return a copy of what the senders received: the one that was made when it was sent."""
        if received is None or not self._defense.needs_received:
            return None
        sent, copied = self._copied.get((direction, microbatch), (None, received))
        return copied if sent is received else received.clone()

    def _taint(self, stage: int, direction: Direction, now: list[bool], microbatch: int) -> None:
        known = self.tainted[microbatch]
        for replica, tainted in enumerate(now):
            if tainted and not known[replica]:
                known[replica] = True
                if direction == "gradient":
                    self.late[replica] = stage

    def _substitute(self, x: Tensor, rows: list[bool], reference: Tensor | None) -> Tensor:
        """Replace the gradients of tainted ranks; quarantined ones leave no trace in any weight."""
        if self.substitutes_zeros or reference is None:
            return zero_rows(x, rows)
        if not reference.isfinite().all():
            self._refuse_reference()
        return torch.where(row_mask(rows, x).view(-1, 1, 1, 1), reference.to(x), x)

    def _part(self, microbatch: int) -> dict[str, int]:
        """Return the field that says of which microbatch a row is, if there are several."""
        return {"microbatch": microbatch} if len(self.tainted) > 1 else {}

    @property
    def substitutes_zeros(self) -> bool:
        """True if zeros replace tainted gradients, and no reference."""
        return self.ledger.policy.quarantine or self.ledger.policy.substitute == "zeros"

    def _refuse_reference(self) -> NoReturn:
        raise PluginError(
            f"defense {self._defense.name}: the reference of a Verdict is not finite",
            party="defense",
        )

    def _counted(self, stage: int, sent: Sent) -> None:
        """Remember who of a stage has tampered."""
        self.tally.tampered += sum(sent.tampered)
        self._lied.update((stage, r) for r, lied in enumerate(sent.tampered) if lied)

    def _signals(
        self,
        stage: int,
        direction: Direction,
        step: int,
        x: Tensor,
        received: Tensor | None,
        active: Tensor,
        again: Again | None,
        microbatch: int,
    ) -> Signals:
        """Return what the defense is shown: copies."""
        before = self._before(direction, received, microbatch)
        signals = Signals(stage, direction, step, x.clone(), before, active, again, microbatch)
        self._copied[direction, microbatch] = x, signals.sent
        return signals

    def _ruled(
        self,
        stage: int,
        direction: Direction,
        step: int,
        tampered: list[bool],
        flagged: list[bool],
        severe: list[bool],
        tested: list[bool],
        verdict: Verdict,
        microbatch: int,
    ) -> Ruling:
        """Let the ledger rule, and write down what happened."""
        if any(f and t for f, t in zip(flagged, tested, strict=True)):
            self._suspects.add(stage)
        ruling = self.ledger.judge(stage, flagged, severe, tested)
        self._count(stage, direction, step, tampered, flagged, tested, verdict, microbatch)
        self._pardoned(stage, direction, step, ruling, microbatch)
        return ruling

    @staticmethod
    def _now(
        tainted: list[bool],
        ruling: Ruling,
        tested: list[bool],
        intact: list[bool],
        missing: list[bool],
    ) -> list[bool]:
        """Return the ranks that are tainted after a check."""
        broken = [m or (t and not i) for m, t, i in zip(missing, tested, intact, strict=True)]
        return [a or b or c for a, b, c in zip(tainted, ruling.flagged, broken, strict=True)]

    def _pardoned(
        self, stage: int, direction: str, step: int, ruling: Ruling, microbatch: int = 0
    ) -> None:
        if ruling.amnesty:
            self._log.append(
                "amnesty",
                step=step,
                stage=stage,
                direction=direction,
                replicas=ruling.amnesty,
                **self._part(microbatch),
            )

    def _count(
        self,
        stage: int,
        direction: Direction | Literal["update"],
        step: int,
        tampered: list[bool],
        flagged: list[bool],
        tested: list[bool],
        verdict: Verdict,
        microbatch: int = 0,
    ) -> None:
        if self._trace is not None:
            with cost.aside():
                said = {
                    r: statistics_of(self._defense, verdict, r) for r, t in enumerate(tested) if t
                }
                self._trace.append(step, stage, direction, said)
        for replica, lied in enumerate(tampered):
            if not tested[replica]:
                continue
            self.tally.checked[lied] += 1
            if flagged[replica]:
                self.tally.flagged[lied] += 1
                self._log.append(
                    "flag",
                    step=step,
                    stage=stage,
                    replica=replica,
                    direction=direction,
                    tampered=lied,
                    statistics=statistics_of(self._defense, verdict, replica),
                    **self._part(microbatch),
                )


def intact_rows(sent: Sent) -> list[bool]:
    """Tell which messages are readable and finite. A sum that overflows counts as not finite."""
    if math.isfinite(float(sent.x.sum())):  # one number: the usual case
        return sent.readable
    finite = sent.x.flatten(1).sum(1).isfinite().tolist()
    return [f and r for f, r in zip(finite, sent.readable, strict=True)]


def zero_rows(x: Tensor, rows: list[bool]) -> Tensor:
    """Return a copy of `x` with some replicas set to zeros."""
    return x.masked_fill(row_mask(rows, x).view(-1, 1, 1, 1), 0.0)


def row_mask(rows: list[bool], like: Tensor) -> Tensor:
    """Return `[replicas]` bool on the device of `like`."""
    return torch.tensor(rows, device=like.device)


def show(
    stage: int,
    direction: Direction,
    step: int,
    sent: Tensor,
    received: Tensor | None,
    active: Tensor,
    again: Again | None = None,
    microbatch: int = 0,
) -> Signals:
    """Return signals for a defense: copies.

    What it does to them changes nothing, and neither base nor version tells who has tampered.
    """
    before = None if received is None else received.clone()
    return Signals(stage, direction, step, sent.clone(), before, active, again, microbatch)


def check(defense: Defense[Any], signals: Signals) -> Verdict:
    """Ask a defense for its verdict, and check the verdict's form.

    Raises:
        PluginError: the defense raised, changed a signal, or returned something else.
    """
    return _checked(defense, "check", _look(defense, "check", signals), signals)


def preview(defense: Defense[Any], signals: Signals) -> Verdict | None:
    """Ask a defense what it would say, if it offers that.

    Raises:
        PluginError: as `check` does.
    """
    verdict = _look(defense, "preview", signals)
    return None if verdict is None else _checked(defense, "preview", verdict, signals)


def check_updates(defense: Defense[Any], updates: Updates) -> Verdict:
    """Ask a defense for its verdict on updates, and check the verdict's form.

    Raises:
        PluginError: the defense raised, changed the mask, or returned something else.
    """
    verdict = _weigh(defense, "check_updates", updates)
    return _formed(defense, "check_updates", verdict, updates.active.shape)


def learn_updates(defense: Defense[Any], updates: Updates, clean: Tensor) -> None:
    """Let a defense learn from the clean updates."""
    _weigh(defense, "learn_updates", updates, clean)


def _checked(defense: Defense[Any], method: str, verdict: Any, signals: Signals) -> Verdict:
    """Return the verdict that `method` gave on signals, if it has the form of one."""
    formed = _formed(defense, method, verdict, signals.active.shape)
    reference = formed.reference
    expected = signals.sent.shape[1:]
    if reference is not None and not (
        isinstance(reference, Tensor)
        and reference.shape == expected
        and reference.is_floating_point()
    ):
        raise PluginError(
            f"defense {defense.name}: the reference of a Verdict must be None or a tensor "
            f"[batch, tokens, hidden] = {[*expected]}",
            party="defense",
        )
    return formed


def _formed(defense: Defense[Any], method: str, verdict: Any, shape: torch.Size) -> Verdict:
    """Return the verdict that `method` gave, if its flags are `shape` `[replicas]` bool."""
    if not (
        isinstance(verdict, Verdict)
        and all(
            isinstance(t, Tensor) and t.shape == shape and t.dtype == torch.bool
            for t in (verdict.flagged, verdict.severe)
        )
    ):
        raise PluginError(
            f"defense {defense.name}: {method} must return a Verdict with bool tensors [replicas]",
            party="defense",
        )
    return verdict


def learn(defense: Defense[Any], signals: Signals, clean: Tensor) -> None:
    """Let a defense learn from the clean signals.

    Raises:
        PluginError: the defense raised, or changed a signal.
    """
    _look(defense, "learn", signals, clean)


def fork(defense: Defense[Any]) -> Defense[Any]:
    """Return a copy with a state of its own.

    Raises:
        PluginError: it cannot be copied.
    """
    try:
        return copy.deepcopy(defense)
    except Exception as error:  # a plugin may hold anything
        raise PluginError(
            f"defense {defense.name} cannot be copied: {type(error).__name__}: {error}",
            party="defense",
        ) from error


def start(defense: Defense[Any], setup: Setup) -> None:
    """Tell a defense the grid."""
    _call(defense, "start", setup)


def redundancy(defense: Defense[Any]) -> Redundancy | None:
    """Ask a defense how stages keep copies of blocks.

    Raises:
        PluginError: it raised, or returned something else.
    """
    answer = _call(defense, "redundancy")
    if not (answer is None or isinstance(answer, Redundancy)):
        raise PluginError(
            f"defense {defense.name}: redundancy returned {answer!r}", party="defense"
        )
    return answer


def recover(
    defense: Defense[Any], suspects: frozenset[int], passes: int, last: Recovery, stages: int
) -> Recovery | None:
    """Ask a defense what becomes of a pass.

    Raises:
        PluginError: it raised, or its answer is none that can be followed.
    """
    answer: Recovery | None = _call(defense, "recover", suspects, passes, last)
    wrong = problem(answer, passes, stages)
    if wrong is not None:
        raise PluginError(f"defense {defense.name}: recover {wrong}", party="defense")
    return answer


def state_bytes(defense: Defense[Any]) -> int:
    """Ask a defense for the memory that it keeps."""
    return int(_call(defense, "state_bytes"))


def statistics_of(defense: Defense[Any], verdict: Verdict, replica: int) -> dict[str, list[float]]:
    """Return what a verdict says about a replica, for the record: value, low and high.

    Raises:
        PluginError: the statistics are not in the form of `Verdict`.
    """
    try:
        return {
            name: [float(values[replica]), float(low), float(high)]
            for name, (values, low, high) in verdict.statistics.items()
        }
    except Exception as error:  # a plugin may return anything
        raise PluginError(
            f"defense {defense.name}: the statistics of a Verdict must be name to "
            f"(value [replicas], low, high): {type(error).__name__}: {error}",
            party="defense",
        ) from error


def end_step(defense: Defense[Any], step: int) -> None:
    """Tell a defense that a step is over."""
    _call(defense, "end_step", step)


def _look(defense: Defense[Any], method: str, signals: Signals, *args: Any) -> Any:
    """Call a method that is shown signals, which it must leave as they are."""
    shown = [t for t in (signals.sent, signals.received, signals.active) if t is not None]
    versions = [t._version for t in shown]
    answer = _call(defense, method, signals, *args)
    if [t._version for t in shown] != versions:
        raise PluginError(f"defense {defense.name}: {method} changed a signal", party="defense")
    return answer


def _weigh(defense: Defense[Any], method: str, updates: Updates, *args: Any) -> Any:
    """Call a method that is shown updates, whose mask it must leave as it is."""
    version = updates.active._version
    answer = _call(defense, method, updates, *args)
    if updates.active._version != version:
        raise PluginError(
            f"defense {defense.name}: {method} changed who is active", party="defense"
        )
    return answer


def _call(defense: Defense[Any], method: str, *args: Any) -> Any:
    try:
        return getattr(defense, method)(*args)
    except (Exception, SystemExit) as error:  # a plugin may raise anything
        raise PluginError(
            f"defense {defense.name}: {method} raised {type(error).__name__}: {error}",
            party="defense",
        ) from error
