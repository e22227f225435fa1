"""The malicious side: attackers replace what their workers send, contribute or hold.

Holds the ground truth; nothing of it is passed on to a defense.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeGuard, overload

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import (
    Attack,
    AttackContext,
    Colluders,
    Direction,
    Judgement,
    Knowledge,
    Late,
    Message,
    Place,
    Private,
    Silence,
    UpdateContext,
    Verdict,
)
from sentinel_bench.config import Verifiers
from sentinel_bench.errors import KnowledgeError, PluginError
from sentinel_bench.threat import Attacker

Past = Direction | Literal["received"]
"""Which signals of a worker: those that it sends in a direction, or gradients that it receives."""
Key = tuple[int, Past, int]
"""Stage, kind and replica of a worker's signals."""
Look = Callable[[Tensor], Verdict | None]
"""Returns what the running defense would say of signals `[replicas, batch, tokens, hidden]`."""
OnAct = Callable[[int, int, int, Place], None]
"""Called with step, stage, replica and place at every corrupted signal."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What the replicas of one stage sent.

    Attributes:
        x: `[replicas, batch, tokens, hidden]`; zeros where a message could not be read or did not
            come.
        tampered: `[replicas]`, differs from the honest signal, or comes later.
        readable: `[replicas]`, there, and of the right shape, dtype and device.
        missing: `[replicas]`, did not come, or not by the deadline; empty: all did.
        late: `[replicas]`, seconds that it comes later than an honest one; empty: none does.
    """

    x: Tensor
    tampered: list[bool]
    readable: list[bool]
    missing: list[bool] = field(default_factory=list)
    late: list[float] = field(default_factory=list)


class History:
    """The honest signals of the workers that will need them, oldest first.

    Args:
        microbatches: of a step; each has a past of its own.
    """

    def __init__(self, microbatches: int = 1) -> None:
        self._past: dict[tuple[Key, int], deque[Tensor]] = {}
        self._microbatches = microbatches

    @property
    def empty(self) -> bool:
        """True if no worker needs its past."""
        return not self._past

    def watch(self, key: Key, depth: int) -> None:
        """Keep the last `depth` signals of a worker."""
        for microbatch in range(self._microbatches if depth > 0 else 0):
            old = self._past.get((key, microbatch))
            longest = max(depth, (old.maxlen or 0) if old is not None else 0)
            self._past[key, microbatch] = deque(old or (), maxlen=longest)

    def record(self, stage: int, kind: Past, x: Tensor, microbatch: int = 0) -> None:
        """Append this step's honest signals `[replicas, batch, tokens, hidden]` of a stage."""
        for ((s, k, replica), m), past in self._past.items():
            if (s, k, m) == (stage, kind, microbatch):
                past.append(x[replica].detach().clone())

    def get(self, key: Key, microbatch: int = 0) -> Sequence[Tensor]:
        """Return the past signals of a worker, oldest first, as copies."""
        return _Copies([*self._past.get((key, microbatch), ())])

    def fork(self, attacks: Sequence[tuple[Attacker, Attack[Any]]]) -> History:
        """Return an independent history with the past that these attacks need, and no more."""
        copy = History(self._microbatches)
        watch(attacks, copy)
        for key, past in copy._past.items():
            past.extend(self._past.get(key, ()))
        return copy


class _Copies(Sequence[Tensor]):
    """A sequence of tensors, each copied when it is asked for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> _Copies: ...
    def __getitem__(self, index: int | slice) -> Tensor | _Copies:
        if isinstance(index, slice):
            return _Copies(self._tensors[index])
        return self._tensors[index].clone()


def directions(mode: str) -> tuple[Direction, ...]:
    """Return the directions in which an attacker of a mode acts on signals."""
    if mode == "both":
        return ("activation", "gradient")
    if mode == "update":
        return ()
    return ("activation",) if mode == "activation" else ("gradient",)


class Workplace(Protocol):
    """A stage as the tampering side sees it, for attacks on weights."""

    @property
    def targets(self) -> Tensor:
        """What the replicas have to predict, `[replicas, batch, tokens]`."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""

    def gradient(self, replica: int) -> Tensor:
        """Return the weight gradients `[parameters]` of a replica's own mean loss."""

    def relabel(self, replica: int, targets: Tensor) -> Tensor:
        """Return the same for other targets `[batch, tokens]`."""


@dataclass(slots=True)
class Harm:
    """What one attacker has done: corrupted signals, and the sum of their sizes (see `size_of`)."""

    signals: int = 0
    size: float = 0.0


class _Villain:
    """An attacker with its running attack and its own random numbers."""

    def __init__(self, attacker: Attacker, device: str) -> None:
        self.attacker = attacker
        self.attack: Attack[Any] = registry.attacks.create(attacker.attack)
        self.knowledge = needs(self.attack)
        self.directions = directions(attacker.mode)
        self._generators = [
            torch.Generator(device).manual_seed(_seed_of(attacker.seed, n))
            for n in range(max(1, len(self.directions)))
        ]
        self.harm = Harm()
        self._drawn: tuple[tuple[int, int], bool] = ((-1, 0), True)

    def generator(self, where: Place) -> torch.Generator:
        """Return the random numbers for a place, which do not depend on what it does elsewhere.

        A schedule may interleave the two directions as it likes.
        """
        second = len(self.directions) == 2 and where == self.directions[1]
        return self._generators[second]

    def awake(self, context: AttackContext) -> bool:
        """Tell whether it acts in this pass: drawn once a pass, for both directions."""
        now = (context.step, context.attempt)
        if self.attacker.rate < 1 and self._drawn[0] != now:
            self._drawn = (now, context.chance(self.attacker.rate))
        return self._drawn[1]

    def overrides(self, method: str) -> bool:
        """Tell whether the attack has a method of its own."""
        return getattr(type(self.attack), method) is not getattr(Attack, method)

    def act(self, method: str, given: Tensor, context: AttackContext) -> Tensor | None:
        """Return what one method of the attack makes of `given`, None if it stays honest.

        Raises:
            PluginError: it raised, changed its input, or returned something else than a tensor.
        """
        made = self.send(method, given, context)
        if made is None or isinstance(made, Tensor):
            return made
        hint = ": set threat.poison_self to false" if method == "gradient" else ""
        raise PluginError(
            f"{self._where(context)} returned {type(made).__name__}, no tensor, where nothing is "
            f"sent that could be missing or late{hint}",
            party="attack",
        )

    def send(self, method: str, given: Tensor, context: AttackContext) -> Message | None:
        """Return what is sent for the signal `given`, None if that is honest and in time.

        What is honest but late is `given` itself.

        Raises:
            PluginError: as `act` does, but `Silence` and `Late` are allowed.
        """
        if not self.awake(context):
            return None
        # A copy: whatever the attack does to it, the pipeline's own tensor stays as it is.
        honest = given.clone()
        version = honest._version
        where = self._where(context)
        try:
            sent = getattr(self.attack, method)(honest, context)
        except PluginError:
            raise
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            raise PluginError(
                f"{where} raised {type(error).__name__}: {error}", party="attack"
            ) from error
        if honest._version != version:
            raise PluginError(f"{where} changed the tensor it was given", party="attack")
        if isinstance(sent, Silence):
            return sent
        sent, seconds = (sent.signal, sent.seconds) if isinstance(sent, Late) else (sent, 0.0)
        if not isinstance(sent, Tensor):
            raise PluginError(f"{where} returned {type(sent).__name__}, no tensor", party="attack")
        if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
            raise PluginError(f"{where} is late by {seconds!r}: no seconds", party="attack")
        same = _readable(sent, given) and torch.equal(sent, given)
        sent = given if same else sent.detach()
        if seconds:
            return Late(sent, float(seconds))
        return None if same else sent

    def _where(self, context: AttackContext) -> str:
        a = self.attacker
        place = f"step {context.step}, stage {a.stage}, replica {a.replica}"
        return f"attack {a.attack.name} ({place})"

    def did(self, sent: Tensor | Silence, honest: Tensor) -> None:
        """Count a corrupted signal."""
        self.harm.signals += 1
        self.harm.size += size_of(sent, honest)


def _seen_by(villain: _Villain) -> set[tuple[int, Direction]]:
    """Return whose signals an attacker changes, or receives."""
    stage = villain.attacker.stage
    sender: dict[Direction, int] = {"activation": stage - 1, "gradient": stage + 1}
    return {(s, d) for d in villain.directions for s in (stage, sender[d])}


class Tamperer:
    """All attackers of a cell.

    Args:
        attackers: the ground truth.
        history: signals of the honest warm-up; what these attackers need of it is copied.
        device: where the signals live.
        banned: tells whether a worker (stage, replica) is banned: it then sends nothing any more.
        on_act: is told of every corrupted signal.
        deadline: seconds after which a late message is as good as none.
    """

    def __init__(
        self,
        attackers: Sequence[Attacker],
        history: History,
        device: str,
        banned: Callable[[int, int], bool],
        on_act: OnAct = lambda *_: None,
        deadline: float | None = None,
    ) -> None:
        self._deadline = math.inf if deadline is None else deadline
        self._villains = [_Villain(a, device) for a in attackers]
        self._history = history.fork([(v.attacker, v.attack) for v in self._villains])
        self._device = device
        self._banned = banned
        self._on_act = on_act
        self._malicious: dict[int, list[int]] = {}
        for villain in self._villains:
            a = villain.attacker
            self._malicious.setdefault(a.stage, []).append(a.replica)
        self.seen = {place for v in self._villains for place in _seen_by(v)}
        """What stages send in which directions that attackers change, or receive."""
        self.receives = {(v.attacker.stage, d) for v in self._villains for d in v.directions}
        """Stages whose attackers receive something in a direction in which they act."""
        self.poisoned = {
            v.attacker.stage
            for v in self._villains
            if v.attacker.poison_self and "gradient" in v.directions
        }
        """Stages with attackers that corrupt what they receive."""
        self.faulty = any(
            plugin.fault for a in attackers for plugin in registry.attacks.nested(a.attack)
        )
        """True if a message may not come, or come late."""
        self._plan: dict[str, Any] = {}
        self._poisoned: set[tuple[int, int, int, int]] = set()
        self._attempt = 0
        self.update_stages = sorted(
            {v.attacker.stage for v in self._villains if v.overrides("update")}
        )
        self.inject_stages = sorted(
            {v.attacker.stage for v in self._villains if v.overrides("inject")}
        )

    @property
    def idle(self) -> bool:
        """True if no attacker needs the boundaries."""
        return not self.update_stages and not any(v.directions for v in self._villains)

    def harms(self) -> dict[tuple[int, int], Harm]:
        """Return what each attacker (stage, replica) has done."""
        return {(v.attacker.stage, v.attacker.replica): v.harm for v in self._villains}

    def triggers(self, vocabulary: int) -> list[tuple[tuple[int, ...], int]]:
        """Return the triggers of backdoors and their targets, each once.

        Raises:
            PluginError: an attack raised, or its trigger is none.
        """
        found: dict[tuple[tuple[int, ...], int], None] = {}
        for villain in self._villains:
            trigger = _trigger(villain.attack, vocabulary)
            if trigger is not None:
                found[trigger] = None
        return list(found)

    def begin_pass(self, attempt: int) -> None:
        """Begin a pass of a step, which was done `attempt` times before: attackers act anew.

        What they sent before stays in their histories: one signal a pass.
        """
        self._attempt = attempt
        self._poisoned.clear()

    def send(
        self,
        stage: int,
        direction: Direction,
        step: int,
        x: Tensor,
        received: Tensor | None,
        look: Look = lambda _: None,
        microbatch: int = 0,
    ) -> Sent:
        """Return what the replicas of `stage` send for the honest signals `x`.

        Args:
            stage, direction, step: where and when.
            x: `[replicas, batch, tokens, hidden]`.
            received: what they received in this direction, same shape, or None.
            look: asks the running defense.
            microbatch: which part of the step's batch these are.

        Raises:
            PluginError: an attack raised, changed its input, or returned something else than a
                tensor.
        """
        n = len(x)
        tampered, readable, missing, late = [False] * n, [True] * n, [False] * n, [0.0] * n
        out = x
        for villain in self._at(stage, step):
            replica = villain.attacker.replica
            if direction not in villain.directions:
                continue
            if villain.attacker.poison_self and direction == "gradient" and received is not None:
                tampered[replica] = (step, stage, replica, microbatch) in self._poisoned
                continue
            honest = x[replica]
            context = self._context(villain, direction, step, x, received, look, out, microbatch)
            message = villain.send(direction, honest, context)
            if message is None:
                continue
            tampered[replica] = True
            if isinstance(message, Late):
                late[replica] = message.seconds
                message = Silence() if message.seconds > self._deadline else message.signal
            villain.did(message, honest)
            missing[replica] = isinstance(message, Silence)
            readable[replica] = _readable(message, honest)
            if message is not honest:
                out = x.clone() if out is x else out
                out[replica] = message if _readable(message, honest) else 0.0
        for replica in [r for r, acted in enumerate(tampered) if acted]:
            self._on_act(step, stage, replica, direction)
        self._history.record(stage, direction, x, microbatch)
        return Sent(out, tampered, readable, missing, late)

    def answer(
        self,
        stage: int,
        direction: Direction,
        step: int,
        sent: Tensor,
        of: Sequence[int],
        by: Sequence[int],
        honest: Tensor,
    ) -> Tensor:
        """Return what replicas `by` answer when they are asked for the work of `of`.

        An attacker answers honestly until it has corrupted something: a lie is not its first act,
        so that no ban can come before it.

        Args:
            stage, direction, step: where and when.
            sent: `[replicas, batch, tokens, hidden]`, what was sent in the first place.
            of, by: n replicas each.
            honest: `[n, batch, tokens, hidden]`, the true answers.
        """
        liars = self._liars(stage, step)
        return _answers(liars, liars.keys(), sent, of, by, honest)

    def testify(
        self,
        stage: int,
        holder: int,
        step: int,
        sent: Tensor,
        of: Sequence[int],
        by: Sequence[int],
        honest: Tensor,
    ) -> Tensor:
        """Return what replicas `by` of `holder` say that replicas `of` of `stage` should send.

        They lie as in `answer`, and cover for those of their own kind in `stage`.

        Args:
            stage, holder, step: whose work, who holds a copy of it, and when.
            sent: `[replicas, batch, tokens, hidden]`, what was sent in the first place.
            of, by: n replicas each.
            honest: `[n, batch, tokens, hidden]`, what the copies say.
        """
        malicious = {v.attacker.replica for v in self._at(stage, step)}
        liars = self._liars(holder, step)
        return _answers(liars, malicious, sent, of, by, honest)

    def hear(self, stage: int, x: Tensor, microbatch: int) -> None:
        """Take in the gradients that `stage` receives: some have them as a past."""
        self._history.record(stage, "received", x, microbatch)

    def poison(
        self,
        stage: int,
        step: int,
        arrived: Tensor,
        excluded: Sequence[bool],
        microbatch: int = 0,
    ) -> Tensor:
        """Return the gradients that `stage` lets into its own backward pass.

        Those `arrived` `[replicas, batch, tokens, hidden]`, corrupted by attackers with
        `poison_self`; of ranks that are `excluded` `[replicas]` from the update they stay.
        """
        out = arrived
        for villain in self._at(stage, step):
            a = villain.attacker
            acts = a.poison_self and "gradient" in villain.directions
            if not acts or excluded[a.replica]:
                continue
            context = self._context(
                villain, "gradient", step, arrived, None, lambda _: None, out, microbatch
            )
            sent = villain.act("gradient", arrived[a.replica], context)
            if sent is None:
                continue
            if not _readable(sent, arrived[a.replica]):
                raise PluginError(
                    f"attack {a.attack.name}: with threat.poison_self, what it makes of a gradient "
                    "must have the shape and dtype of the gradient",
                    party="attack",
                )
            if out is arrived:
                out = arrived.clone()
            out[a.replica] = sent
            self._poisoned.add((step, stage, a.replica, microbatch))
            villain.did(sent, arrived[a.replica])
        return out

    def contribute(
        self, stage: int, step: int, excluded: Sequence[bool], place: Workplace
    ) -> dict[int, Tensor]:
        """Return what attackers contribute to the weight gradients of `stage`.

        Args:
            stage, step: where and when.
            excluded: `[replicas]`, left out of this step's average.
            place: gives gradients of the replicas.

        Returns:
            Replica to what it sends, `[parameters]`; the others are honest.
        """
        contributed: dict[int, Tensor] = {}
        for villain in self._at(stage, step):
            a = villain.attacker
            if not villain.overrides("update") or excluded[a.replica]:
                continue
            own = place.gradient(a.replica)
            context = UpdateContext(
                step=step,
                stage=stage,
                replica=a.replica,
                direction="update",
                received=None,
                history=(),
                generator=villain.generator("update"),
                age=step - a.start,
                attempt=self._attempt,
                name=a.attack.name,
                granted=self._granted_update(villain, step, excluded, place),
                targets=place.targets[a.replica].clone(),
                vocabulary=place.vocabulary,
                relabel=partial(place.relabel, a.replica),
            )
            sent = villain.act("update", own, context)
            if sent is None:
                continue
            if not _readable(sent, own):
                raise PluginError(
                    f"attack {a.attack.name}: update returned {_form(sent)}, not {_form(own)}",
                    party="attack",
                )
            villain.did(sent, own)
            self._on_act(step, stage, a.replica, "update")
            contributed[a.replica] = sent
        return contributed

    def inject(
        self,
        stage: int,
        step: int,
        weights: Tensor,
        lost: Sequence[bool],
        private: Callable[[int], Private],
    ) -> dict[int, Tensor]:
        """Return the weights that attackers of `stage` hold after this step.

        Args:
            stage, step: where and when.
            weights: of the stage, `[parameters]`.
            lost: `[replicas]`, ranks that have no part any more.
            private: makes a private copy of the model for a replica.

        Returns:
            Replica to its weights, `[parameters]`; the others hold `weights`.
        """
        held: dict[int, Tensor] = {}
        for villain in self._at(stage, step):
            a = villain.attacker
            if not villain.overrides("inject") or lost[a.replica]:
                continue
            granted: dict[Knowledge, Callable[[], Any]] = {
                Knowledge.MODEL: partial(private, a.replica)
            }
            context = AttackContext(
                step=step,
                stage=stage,
                replica=a.replica,
                direction="update",
                received=None,
                history=(),
                generator=villain.generator("update"),
                age=step - a.start,
                attempt=self._attempt,
                name=a.attack.name,
                granted=_grant(villain, granted, "update"),
            )
            changed = villain.act("inject", weights, context)
            if changed is None:
                continue
            if not _readable(changed, weights):
                raise PluginError(
                    f"attack {a.attack.name}: inject returned {_form(changed)}, not "
                    f"{_form(weights)}",
                    party="attack",
                )
            villain.did(changed, weights)
            self._on_act(step, stage, a.replica, "update")
            held[a.replica] = changed
        return held

    def _liars(self, stage: int, step: int) -> dict[int, Verifiers]:
        """Return replica to habit of the attackers of a stage that have corrupted something."""
        begun = (v.attacker for v in self._at(stage, step) if v.harm.signals)
        return {a.replica: a.verifiers for a in begun}

    def _at(self, stage: int, step: int) -> list[_Villain]:
        """Return the attackers of a stage that have begun and are not banned."""
        return [
            v
            for v in self._villains
            if v.attacker.stage == stage
            and step >= v.attacker.start
            and not self._banned(stage, v.attacker.replica)
        ]

    def _context(
        self,
        villain: _Villain,
        direction: Direction,
        step: int,
        x: Tensor,
        received: Tensor | None,
        look: Look,
        out: Tensor,
        microbatch: int = 0,
    ) -> AttackContext:
        a = villain.attacker
        granted: dict[Knowledge, Callable[[], Any]] = {
            Knowledge.COLLUDERS: lambda: self._colluders(
                a, direction, step, x[self._malicious[a.stage]], microbatch
            ),
            Knowledge.HONEST: lambda: x[self._honest(a.stage, len(x))],
            Knowledge.DETECTOR: lambda: _Oracle(look, out, a.replica),
        }
        return AttackContext(
            step=step,
            stage=a.stage,
            replica=a.replica,
            direction=direction,
            received=None if received is None else received[a.replica].clone(),
            history=self._past(a, direction, microbatch),
            generator=villain.generator(direction),
            age=step - a.start,
            attempt=self._attempt,
            name=a.attack.name,
            granted=_grant(villain, granted, direction),
        )

    def _granted_update(
        self, villain: _Villain, step: int, excluded: Sequence[bool], place: Workplace
    ) -> Mapping[Knowledge, Callable[[], Any]]:
        a = villain.attacker
        honest = [r for r in self._honest(a.stage, len(excluded)) if not excluded[r]]

        def rows(replicas: list[int]) -> Tensor:
            found = [place.gradient(r) for r in replicas]
            return torch.stack(found) if found else place.gradient(a.replica).new_empty(0, 0)

        granted: dict[Knowledge, Callable[[], Any]] = {
            Knowledge.COLLUDERS: lambda: self._colluders(
                a, "update", step, rows(self._malicious[a.stage])
            ),
            Knowledge.HONEST: lambda: rows(honest),
        }
        return _grant(villain, granted, "update")

    def _past(self, attacker: Attacker, direction: Direction, microbatch: int) -> Sequence[Tensor]:
        """Return the past signals of an attacker, without those of this step."""
        past = self._history.get(_past_of(attacker, direction), microbatch)
        return past[:-1] if _poisons(attacker, direction) else past

    def _honest(self, stage: int, replicas: int) -> list[int]:
        return [r for r in range(replicas) if r not in self._malicious[stage]]

    def _colluders(
        self, a: Attacker, where: Place, step: int, signals: Tensor, microbatch: int = 0
    ) -> Colluders:
        what = f"{self._villains[0].attacker.seed} {a.stage} {where} {step}"
        seed = zlib.crc32((f"{what} {microbatch}" if microbatch else what).encode())
        return Colluders(
            signals=signals,
            index=self._malicious[a.stage].index(a.replica),
            plan=self._plan,
            generator=torch.Generator(self._device).manual_seed(seed),
        )


class _Oracle:
    """Asks the running defense about one replica's signal."""

    def __init__(self, look: Look, out: Tensor, replica: int) -> None:
        self._look = look
        self._out = out
        self._replica = replica

    def judge(self, x: Tensor) -> Judgement | None:
        """Say what the defense would make of `x` `[batch, tokens, hidden]`."""
        x, sent = x.detach(), self._out.clone()
        if not _readable(x, sent[self._replica]) or not bool(x.isfinite().all()):
            return Judgement(flagged=True, statistics={})
        sent[self._replica] = x
        verdict = self._look(sent)
        if verdict is None:
            return None
        r = self._replica
        return Judgement(
            flagged=bool(verdict.flagged[r]),
            statistics={
                name: (float(values[r]), float(low), float(high))
                for name, (values, low, high) in verdict.statistics.items()
            },
        )


def _grant(
    villain: _Villain, offered: Mapping[Knowledge, Callable[[], Any]], place: Place
) -> dict[Knowledge, Callable[[], Any]]:
    """Return what an attack may ask for: of what is offered, what it declares to know."""

    def missing(what: Knowledge) -> None:
        raise KnowledgeError(
            f"attack {villain.attacker.attack.name} asks for {what.value!r}, which there is not "
            f"when it acts on a signal of the kind {place!r}"
        )

    return {
        what: offered.get(what, partial(missing, what))
        for what in villain.knowledge
        if what is not Knowledge.OWN
    }


def _seed_of(seed: int, n: int) -> int:
    """Return the n-th seed that follows from one; the first is that one."""
    return zlib.crc32(f"{seed} {n}".encode()) if n else seed


def size_of(sent: Tensor | Silence, honest: Tensor) -> float:
    """Return how much of what was sent is corruption: |d| / (|d| + |honest|), d = sent - honest.

    0 for an honest signal, 1 for one that is missing, not finite or cannot be read.
    """
    if not _readable(sent, honest):
        return 1.0
    honest = honest.float()
    norms = torch.stack([(sent - honest).norm(), honest.norm()]).tolist()
    difference, whole = norms[0], sum(norms)
    share = 0.0 if whole == 0 else difference / whole
    return share if 0 <= share <= 1 else 1.0  # NaN: not finite


def watch(attacks: Sequence[tuple[Attacker, Attack[Any]]], history: History) -> None:
    """Have `history` keep what the attacks will need."""
    for attacker, attack in attacks:
        for direction in directions(attacker.mode):
            depth, late = memory(attack), _poisons(attacker, direction)
            history.watch(_past_of(attacker, direction), depth + late if depth else 0)


def _poisons(attacker: Attacker, direction: Direction) -> bool:
    """Tell whether an attacker corrupts what it receives, and not what it sends."""
    return attacker.poison_self and direction == "gradient"


def _past_of(attacker: Attacker, direction: Direction) -> Key:
    """Return which signals are an attacker's past: those that it would have sent.

    Of one that corrupts the gradients that it receives, these.
    """
    kind: Past = "received" if _poisons(attacker, direction) else direction
    return attacker.stage, kind, attacker.replica


def memory(attack: Attack[Any]) -> int:
    """Ask an attack how many past signals it needs.

    Raises:
        PluginError: it raised, or the answer is no count.
    """
    depth = _ask(attack, "memory")
    if not isinstance(depth, int) or depth < 0:
        raise PluginError(f"attack {attack.name}: memory returned {depth!r}", party="attack")
    return depth


def needs(attack: Attack[Any]) -> frozenset[Knowledge]:
    """Ask an attack what it has to know.

    Raises:
        PluginError: it raised.
    """
    return frozenset(_ask(attack, "needs"))


def _trigger(attack: Attack[Any], vocabulary: int) -> tuple[tuple[int, ...], int] | None:
    trigger = _ask(attack, "trigger", vocabulary)
    if trigger is None:
        return None
    try:
        tokens, target = tuple(map(int, trigger[0])), int(trigger[1])
    except (TypeError, ValueError, LookupError):
        tokens, target = (), -1
    if not tokens or not all(0 <= t < vocabulary for t in (*tokens, target)):
        raise PluginError(
            f"attack {attack.name}: trigger returned {trigger!r} for {vocabulary} tokens",
            party="attack",
        )
    return tokens, target


def _ask(attack: Attack[Any], method: str, *args: Any) -> Any:
    try:
        return getattr(attack, method)(*args)
    except (Exception, SystemExit) as error:  # a plugin may raise anything
        raise PluginError(
            f"attack {attack.name}: {method} raised {type(error).__name__}: {error}", party="attack"
        ) from error


def _form(x: Tensor) -> str:
    return f"{x.dtype} {[*x.shape]}"


def _readable(sent: Tensor | Silence, like: Tensor) -> TypeGuard[Tensor]:
    """Tell whether a receiver that expects `like` can read `sent`."""
    return isinstance(sent, Tensor) and (sent.shape, sent.dtype, sent.device, sent.layout) == (
        *(like.shape, like.dtype, like.device, like.layout),
    )


def _answers(
    liars: Mapping[int, Verifiers],
    colluders: Collection[int],
    sent: Tensor,
    of: Sequence[int],
    by: Sequence[int],
    honest: Tensor,
) -> Tensor:
    """Return what replicas `by` say of the signals of `of`; see `Tamperer.answer`.

    Args:
        liars: replica to habit, of those that are asked.
        colluders: replicas among those whose signals are asked for.
        sent, of, by, honest: see there.
    """
    out = honest
    for i, (asked, answering) in enumerate(zip(of, by, strict=True)):
        habit = liars.get(answering, "honest")
        if habit == "honest":
            continue
        out = honest.clone() if out is honest else out
        out[i] = _lie(habit, asked in colluders, sent[asked], honest[i])
    return out


def _lie(habit: Verifiers, colluder: bool, sent: Tensor, honest: Tensor) -> Tensor:
    """Return what a malicious replica that is not honest says of a signal.

    Args:
        habit: see `ThreatConfig.verifiers`.
        colluder: whether the signal is that of another attacker.
        sent, honest: `[batch, tokens, hidden]`, what was sent, and the truth.
    """
    if colluder and habit in ("cover", "collude"):
        return sent
    return honest if habit == "cover" else -honest
