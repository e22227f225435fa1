"""What a plugin author needs: `Attack`, `Defense`, and what they are given.

Nothing here imports torch when it is imported, and a plugin file should not either: tensors come
in, and their own methods (`x.new_zeros`, `x.square`) do nearly everything. So `list` and `show`
stay instant. Import torch inside a function where you need more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from sentinel_bench.config import Frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Direction = Literal["activation", "gradient"]


class Knowledge(StrEnum):
    """What an attack can see. Declared on the class; the harness gives no more."""

    OWN = "own"
    """Its own signals, past and present, and what it received."""


class NoParams(Frozen):
    """For a plugin without parameters."""


P = TypeVar("P", bound=Frozen)


class Plugin(Generic[P]):
    """What attacks and defenses have in common: a name, documentation and parameters.

    `Params` is a `Frozen` pydantic model: its fields, defaults and descriptions are what the
    command line accepts and shows.
    """

    name: ClassVar[str]
    goal: ClassVar[str]
    formula: ClassVar[str]
    source: ClassVar[str]
    version: ClassVar[str] = "1"
    Params: ClassVar[type[Frozen]] = NoParams

    def __init__(self, params: P) -> None:
        self.params = params


# --- attacks --------------------------------------------------------------------------------------


@dataclass(slots=True)
class AttackContext:
    """What one malicious worker knows when it is about to send one signal.

    Attributes:
        step: training step, from 0.
        stage, replica: which worker this is.
        direction: "activation" (sent forward) or "gradient" (sent backward).
        received: what this worker received in the same direction, `[batch, tokens, hidden]`;
            None at the ends of the pipeline.
        history: its own honest signals of earlier steps in this direction, oldest first, at most
            as many as `Attack.memory` asks for.
        generator: this worker's own random numbers.
    """

    step: int
    stage: int
    replica: int
    direction: Direction
    received: Tensor | None
    history: Sequence[Tensor]
    generator: torch.Generator

    def normal(self, like: Tensor) -> Tensor:
        """Return standard normal noise of the shape, dtype and device of `like`."""
        return like.new_empty(like.shape).normal_(generator=self.generator)

    def uniform(self, like: Tensor) -> Tensor:
        """Return noise from U[0, 1) of the shape, dtype and device of `like`."""
        return like.new_empty(like.shape).uniform_(generator=self.generator)

    def chance(self, p: float) -> bool:
        """Return True with probability `p`."""
        import torch

        draw = torch.rand((), generator=self.generator, device=self.generator.device)
        return float(draw) < p


class Attack(Plugin[P]):
    """What one malicious worker sends instead of its honest signal. One instance per worker.

    Override `signal`, or `activation` and `gradient` where they differ. Return a new tensor of the
    same shape, dtype and device, or the argument itself to be honest in this step. Never change
    the argument.
    """

    knowledge: ClassVar[Knowledge] = Knowledge.OWN
    adaptive: ClassVar[bool] = False

    def memory(self) -> int:
        """Return how many of its own past honest signals the attack needs."""
        return 0

    def signal(self, x: Tensor, ctx: AttackContext) -> Tensor:
        """Return what is sent for the honest signal `x` `[batch, tokens, hidden]`."""
        return x

    def activation(self, h: Tensor, ctx: AttackContext) -> Tensor:
        """Return what is sent forward for the honest activation `h` `[batch, tokens, hidden]`."""
        return self.signal(h, ctx)

    def gradient(self, g: Tensor, ctx: AttackContext) -> Tensor:
        """Return what is sent backward for the honest gradient `g` `[batch, tokens, hidden]`."""
        return self.signal(g, ctx)


# --- defenses -------------------------------------------------------------------------------------


class ResponseParams(Frozen):
    """What follows a flag: the published response (SENTINEL, arXiv 2603.03592, section 4)."""

    violations: int = Field(5, ge=1, description="violations until a ban")
    forgive_after: int = Field(100, ge=1, description="clean steps that take one violation back")
    severity: float = Field(100.0, gt=1, description="a deviation of so many fences bans at once")
    amnesty: bool = Field(True, description="more than half flagged at once is a natural shift")
    amnesty_rollback: bool = Field(True, description="an amnesty takes its violations back")
    quarantine: bool = Field(False, description="leave tainted ranks out of the weight gradients")
    substitute: Literal["reference", "zeros"] = Field(
        "reference", description="what replaces the gradient of a tainted rank"
    )
    on_ban: Literal["reroute", "drop"] = Field(
        "reroute", description="honest replicas of the stage take over, or the rank's data is lost"
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """What a defense is told once, before the first signal."""

    stages: int
    replicas: int
    shape: tuple[int, int, int]
    """batch, tokens, hidden of one worker's signal"""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Signals:
    """All replicas' signals at one boundary, as the verifier sees them.

    Attributes:
        stage: the stage that sent.
        direction: "activation" or "gradient".
        step: training step.
        sent: `[replicas, batch, tokens, hidden]`. Gradients are those of each replica's own mean
            loss. A signal that could not be read or was not finite is zeros, and not active.
        received: what the senders received in the same direction, same shape; None at the ends, and
            for a defense that does not ask for it (`needs_received`).
        active: `[replicas]` bool: neither banned nor tainted nor unreadable; only these are tested.
    """

    stage: int
    direction: Direction
    step: int
    sent: Tensor
    received: Tensor | None
    active: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a detector makes of the signals at one boundary.

    Attributes:
        flagged: `[replicas]` bool.
        severe: `[replicas]` bool; a flag that bans at once.
        reference: `[batch, tokens, hidden]` in place of a tainted gradient, or None.
        statistics: name to (value `[replicas]`, low, high), for the record.
    """

    flagged: Tensor
    severe: Tensor
    reference: Tensor | None = None
    statistics: Mapping[str, tuple[Tensor, float, float]] = field(default_factory=dict)


class Defense(Plugin[P]):
    """Looks at all replicas of one stage at once and says which signals are odd.

    What follows (violations, taint, bans) is the ledger's business, so `Params` must extend
    `ResponseParams`. In warm-up steps everything is called as usual, but no flag counts.
    """

    Params: ClassVar[type[Frozen]] = ResponseParams
    passive: ClassVar[bool] = False
    """True if it never looks at a signal: the boundaries are then left out."""
    needs_received: ClassVar[bool] = False
    """True if it compares with what the senders received; others are not given a copy of it."""

    def start(self, setup: Setup) -> None:
        """Prepare the state for a grid."""

    def check(self, signals: Signals) -> Verdict:
        """Judge the signals at one boundary, without changing them."""
        raise NotImplementedError

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Take in the signals just checked; `clean` `[replicas]` bool are the trusted ones."""

    def end_step(self, step: int) -> None:
        """Called once after all boundaries of a step."""

    def state_bytes(self) -> int:
        """Return the bytes of memory that the defense keeps from step to step."""
        return 0
