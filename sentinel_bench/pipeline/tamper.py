"""The malicious side of a boundary: attackers replace what their workers send.

Holds the ground truth; nothing of it is passed on to a defense.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Attack, AttackContext, Direction
from sentinel_bench.errors import PluginError
from sentinel_bench.threat import Attacker

Key = tuple[int, Direction, int]


@dataclass(frozen=True, slots=True)
class Sent:
    """What the replicas of one stage sent.

    Attributes:
        x: `[replicas, batch, tokens, hidden]`; zeros where a message could not be read.
        tampered: `[replicas]`, differs from the honest signal.
        readable: `[replicas]`, has the right shape, dtype and device.
    """

    x: Tensor
    tampered: list[bool]
    readable: list[bool]


class History:
    """The honest signals of the workers that will need them, oldest first."""

    def __init__(self) -> None:
        self._past: dict[Key, deque[Tensor]] = {}

    @property
    def empty(self) -> bool:
        """True if no worker needs its past."""
        return not self._past

    def watch(self, key: Key, depth: int) -> None:
        """Keep the last `depth` signals of a worker in a direction."""
        if depth > 0:
            old = self._past.get(key)
            depth = max(depth, (old.maxlen or 0) if old is not None else 0)
            self._past[key] = deque(old or (), maxlen=depth)

    def record(self, stage: int, direction: Direction, x: Tensor) -> None:
        """Append this step's honest signals `[replicas, batch, tokens, hidden]` of a stage."""
        for (s, d, replica), past in self._past.items():
            if (s, d) == (stage, direction):
                past.append(x[replica].detach().clone())

    def get(self, key: Key) -> Sequence[Tensor]:
        """Return the past signals of a worker, oldest first, as copies."""
        return _Copies([*self._past.get(key, ())])

    def fork(self, attacks: Sequence[tuple[Attacker, Attack[Any]]]) -> History:
        """Return an independent history with the past that these attacks need, and no more."""
        copy = History()
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
    """Return the directions in which an attacker of a mode acts."""
    if mode == "both":
        return ("activation", "gradient")
    return ("activation",) if mode == "activation" else ("gradient",)


class _Villain:
    """An attacker with its running attack and its own random numbers."""

    def __init__(self, attacker: Attacker, device: str) -> None:
        self.attacker = attacker
        self.attack: Attack[Any] = registry.attacks.create(attacker.attack)
        self.generator = torch.Generator(device).manual_seed(attacker.seed)
        self.directions = directions(attacker.mode)
        self._drawn: tuple[int, bool] = (-1, True)

    def awake(self, context: AttackContext) -> bool:
        """Tell whether it acts in this step: drawn once a step, for both directions."""
        if self.attacker.rate < 1 and self._drawn[0] != context.step:
            self._drawn = (context.step, context.chance(self.attacker.rate))
        return self._drawn[1]


class Tamperer:
    """All attackers of a cell.

    Args:
        attackers: the ground truth.
        history: signals of the honest warm-up; what these attackers need of it is copied.
        device: where the signals live.
        banned: tells whether a worker (stage, replica) is banned: it then sends nothing any more.
    """

    def __init__(
        self,
        attackers: Sequence[Attacker],
        history: History,
        device: str,
        banned: Callable[[int, int], bool],
    ) -> None:
        self._villains = [_Villain(a, device) for a in attackers]
        self._history = history.fork([(v.attacker, v.attack) for v in self._villains])
        self._banned = banned

    @property
    def idle(self) -> bool:
        """True if there is no attacker at all."""
        return not self._villains

    def send(
        self, stage: int, direction: Direction, step: int, x: Tensor, received: Tensor | None
    ) -> Sent:
        """Return what the replicas of `stage` send for the honest signals `x`.

        Raises:
            PluginError: an attack raised, changed its input, or returned something else than a
                tensor.
        """
        replicas = len(x)
        tampered, readable = [False] * replicas, [True] * replicas
        out = x
        for villain in self._villains:
            a = villain.attacker
            if a.stage != stage or direction not in villain.directions:
                continue
            if step < a.start or self._banned(stage, a.replica):
                continue
            sent = self._act(villain, direction, step, x, received)
            if sent is None:
                continue
            if out is x:
                out = x.clone()
            tampered[a.replica] = True
            readable[a.replica] = _readable(sent, x[a.replica])
            out[a.replica] = sent if readable[a.replica] else 0.0
        self._history.record(stage, direction, x)
        return Sent(out, tampered, readable)

    def _act(
        self, villain: _Villain, direction: Direction, step: int, x: Tensor, received: Tensor | None
    ) -> Tensor | None:
        """Return what one attacker sends, or None if it is honest in this step."""
        a = villain.attacker
        # Copies: whatever the attack does to them, the pipeline's own tensors stay as they are.
        original, honest = x[a.replica], x[a.replica].clone()
        context = AttackContext(
            step=step,
            stage=a.stage,
            replica=a.replica,
            direction=direction,
            received=None if received is None else received[a.replica].clone(),
            history=self._history.get((a.stage, direction, a.replica)),
            generator=villain.generator,
        )
        if not villain.awake(context):
            return None
        version = honest._version
        act = villain.attack.activation if direction == "activation" else villain.attack.gradient
        where = f"attack {a.attack.name} (step {step}, stage {a.stage}, replica {a.replica})"
        try:
            sent = act(honest, context)
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            raise PluginError(
                f"{where} raised {type(error).__name__}: {error}", party="attack"
            ) from error
        if honest._version != version:
            raise PluginError(f"{where} changed the tensor it was given", party="attack")
        if not isinstance(sent, Tensor):
            raise PluginError(f"{where} returned {type(sent).__name__}, no tensor", party="attack")
        if _readable(sent, original) and torch.equal(sent, original):
            return None
        return sent.detach()


def watch(attacks: Sequence[tuple[Attacker, Attack[Any]]], history: History) -> None:
    """Have `history` keep what the attacks will need."""
    for attacker, attack in attacks:
        for direction in directions(attacker.mode):
            history.watch((attacker.stage, direction, attacker.replica), memory(attack))


def memory(attack: Attack[Any]) -> int:
    """Ask an attack how many past signals it needs.

    Raises:
        PluginError: it raised, or the answer is no count.
    """
    try:
        depth = attack.memory()
    except (Exception, SystemExit) as error:  # a plugin may raise anything
        raise PluginError(
            f"attack {attack.name}: memory raised {type(error).__name__}: {error}", party="attack"
        ) from error
    if not isinstance(depth, int) or depth < 0:
        raise PluginError(f"attack {attack.name}: memory returned {depth!r}", party="attack")
    return depth


def _readable(sent: Tensor, like: Tensor) -> bool:
    """Tell whether a receiver that expects `like` can read `sent`."""
    return (sent.shape, sent.dtype, sent.device, sent.layout) == (
        *(like.shape, like.dtype, like.device, like.layout),
    )
