"""What a plugin author needs: `Attack`, `Defense`, and what they are given.

Nothing here imports torch when it is imported, and a plugin file should not either: tensors come
in, and their own methods (`x.new_zeros`, `x.square`) do nearly everything. So `list` and `show`
stay instant. Import torch inside a function where you need more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

from pydantic import Field

from sentinel_bench.config import Component, Frozen, Mode
from sentinel_bench.errors import ConfigError, KnowledgeError, PluginError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

Direction = Literal["activation", "gradient"]


Place = Literal["activation", "gradient", "update"]
"""Where an attack acts: on a signal, or on what a worker contributes to its stage's all-reduce."""


class Knowledge(StrEnum):
    """What an attack can see. Declared on the class; the harness gives no more."""

    OWN = "own"
    """Its own signals, past and present, and what it received. Everybody has it."""
    COLLUDERS = "colluders"
    """The honest signals of the other attackers of its stage, and a plan that all share."""
    HONEST = "honest"
    """The signals of all honest replicas of its stage."""
    DETECTOR = "detector"
    """What the running defense would say of a signal, before it is sent."""
    MODEL = "model"
    """A copy of the whole model, and the training data of its own replica."""


OWN: frozenset[Knowledge] = frozenset({Knowledge.OWN})


def tier(knowledge: Iterable[Knowledge]) -> str:
    """Return what is known in one word, `own` left out beside more: "own", "honest+detector"."""
    known = set(knowledge) - {Knowledge.OWN}
    more = [k.value for k in Knowledge if k in known]
    return "+".join(more) or Knowledge.OWN.value


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

    @classmethod
    def wraps(cls, params: Any) -> Sequence[Component]:
        """Return the plugins of the same kind that the parameters name.

        They are checked with the parameters, and belong to the identity of a run.
        """
        return ()


# --- attacks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Silence:
    """In place of a signal: nothing is sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Late:
    """In place of a signal: one that is sent, but late. Nobody sleeps: the seconds are added.

    Attributes:
        signal: what is sent, `[batch, tokens, hidden]`.
        seconds: how much later than an honest one; finite, at least 0.
    """

    signal: Tensor
    seconds: float


Message: TypeAlias = "Tensor | Silence | Late"
"""What a worker sends at one boundary."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the running defense would say of one signal: for attacks that know the detector.

    Attributes:
        flagged: True if it would flag the signal.
        statistics: name to (value, low, high): it is flagged outside of an open interval.
    """

    flagged: bool
    statistics: Mapping[str, tuple[float, float, float]]


class Detector(Protocol):
    """The running defense, as a white-box attacker may ask it. Asking changes nothing."""

    def judge(self, x: Tensor) -> Judgement | None:
        """Say what it would make of `x` `[batch, tokens, hidden]` in place of this signal.

        None: it offers no statistics (see `Defense.preview`).
        """


@dataclass(frozen=True, slots=True)
class Colluders:
    """The attackers of one stage, who act as one.

    Attributes:
        signals: what the malicious replicas of the stage would honestly send, `[n, batch, tokens,
            hidden]` (updates: `[n, parameters]`), in the order of the replicas.
        index: which of them is oneself.
        plan: a dictionary that all attackers of the run share, to keep and to change (over several
            processes: those of the stages of one).
        generator: random numbers that come out the same for every attacker of this stage, in
            this step and direction.
    """

    signals: Tensor
    index: int
    plan: dict[str, Any]
    generator: torch.Generator


class Private(Protocol):
    """A worker's private copy of the model, to learn on offline. It starts as the model is now."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters of its own stage, trainable, in the order of a flat update."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""

    def logits(self, ids: Tensor) -> Tensor:
        """Run the whole model on token ids `[n, tokens]`; return `[n, tokens, vocabulary]`."""

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets `[batch, tokens]` of its own replica's data at a step."""


@dataclass(slots=True)
class AttackContext:
    """What one malicious worker knows when it is about to send one signal.

    `colluders`, `honest`, `detector` and `model` are there for an attack that declares to know
    them; the others get a `KnowledgeError` that names what is missing.

    Attributes:
        step: training step, from 0.
        stage, replica: which worker this is.
        direction: "activation" (sent forward), "gradient" (sent backward), or "update" (weight
            gradients).
        received: what this worker received in the same direction, `[batch, tokens, hidden]`;
            None at the ends of the pipeline.
        history: its own honest signals of earlier steps in this direction, oldest first, at most
            as many as `Attack.memory` asks for.
        generator: this worker's own random numbers.
        age: steps since this worker's attack began, from 0.
        name: of the attack, for messages.
        granted: what the harness gives beyond that, made when it is asked for.
        attempt: how often the pass was done before in this step, because of an alarm.
    """

    step: int
    stage: int
    replica: int
    direction: Place
    received: Tensor | None
    history: Sequence[Tensor]
    generator: torch.Generator
    age: int = 0
    name: str = "attack"
    granted: Mapping[Knowledge, Callable[[], Any]] = field(default_factory=dict)
    attempt: int = 0

    @property
    def colluders(self) -> Colluders:
        """The attackers of this stage, with what they share."""
        found: Colluders = self._known(Knowledge.COLLUDERS)
        return found

    @property
    def honest(self) -> Tensor:
        """What the honest replicas of this stage send now, `[n, batch, tokens, hidden]`.

        For an update `[n, parameters]`.
        """
        found: Tensor = self._known(Knowledge.HONEST)
        return found

    @property
    def detector(self) -> Detector:
        """The running defense."""
        found: Detector = self._known(Knowledge.DETECTOR)
        return found

    @property
    def model(self) -> Private:
        """A private copy of the model as it is now; a new one each time."""
        found: Private = self._known(Knowledge.MODEL)
        return found

    def narrow(self, attack: Attack[Any]) -> AttackContext:
        """Return the context for an attack inside of this one: it sees what it declares."""
        seen = attack.needs()
        granted = {k: v for k, v in self.granted.items() if k in seen}
        return replace(self, name=attack.name, granted=granted)

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

    def _known(self, what: Knowledge) -> Any:
        if what not in self.granted:
            raise KnowledgeError(
                f"attack {self.name} asks for {what.value!r}, which it does not declare: "
                f"add Knowledge.{what.name} to its `knowledge`"
            )
        return self.granted[what]()


@dataclass(slots=True)
class UpdateContext(AttackContext):
    """What one malicious worker knows when it contributes weight gradients.

    Attributes:
        targets: the tokens that its replica has to predict, `[batch, tokens]`.
        vocabulary: number of tokens that the model knows.
        relabel: returns its own weight gradients `[parameters]` for other targets.
    """

    targets: Tensor = None  # type: ignore[assignment]
    vocabulary: int = 0
    relabel: Callable[[Tensor], Tensor] = None  # type: ignore[assignment]


class Attack(Plugin[P]):
    """What one malicious worker sends instead of its honest signal. One instance per worker.

    Override `signal`, or `activation` and `gradient` where they differ; `update` for an attack on
    weight gradients, and `inject` for one on the weights themselves (both with `axis =
    "weights"`). Return a new tensor of the same shape, dtype and device, or the argument itself to
    be honest in this step. In place of a signal it may also return `Silence()` or `Late(signal,
    seconds)`; what follows is up to `faults` in the scenario. Never change the argument.
    """

    knowledge: ClassVar[frozenset[Knowledge]] = OWN
    adaptive: ClassVar[bool] = False
    """True if it was made to evade a defense."""
    axis: ClassVar[Literal["signals", "weights"]] = "signals"
    finite: ClassVar[bool] = True
    """False if it sends NaN or Inf on purpose."""
    whole_model: ClassVar[bool] = False
    """True if it runs stages that are not its own (`UpdateContext.relabel`, `Knowledge.MODEL`)."""
    fault: ClassVar[bool] = False
    """True if it does not change what is sent, but whether or when."""
    note: ClassVar[str] = ""
    """What else has to be known to run it or to read its scores, in some sentences."""

    @classmethod
    def deal(cls, own: Component, mode: Mode, rng: np.random.Generator) -> tuple[Component, Mode]:
        """Return what one attacker does for the whole run: an attack, and a mode.

        Called once for each attacker before the run, in a fixed order. By default all do the same.
        """
        return own, mode

    def needs(self) -> frozenset[Knowledge]:
        """Return all that this instance has to know; a wrapper adds what it wraps."""
        return self.knowledge | OWN

    def memory(self) -> int:
        """Return how many of its own past honest signals the attack needs."""
        return 0

    def signal(self, x: Tensor, ctx: AttackContext) -> Message:
        """Return what is sent for the honest signal `x` `[batch, tokens, hidden]`.

        A tensor; or `Silence()`: nothing; or `Late(signal, seconds)`: a tensor, but so much later.
        """
        return x

    def activation(self, h: Tensor, ctx: AttackContext) -> Message:
        """Return what is sent forward for the honest activation `h` `[batch, tokens, hidden]`."""
        return self.signal(h, ctx)

    def gradient(self, g: Tensor, ctx: AttackContext) -> Message:
        """Return what is sent backward for the honest gradient `g` `[batch, tokens, hidden]`."""
        return self.signal(g, ctx)

    def update(self, grad: Tensor, ctx: UpdateContext) -> Tensor:
        """Return what is contributed to the stage's all-reduce for `grad` `[parameters]`.

        That is the gradient of its replica's own mean loss with respect to all parameters of its
        stage, flattened one after the other.
        """
        return grad

    def inject(self, weights: Tensor, ctx: AttackContext) -> Tensor:
        """Return the weights of its stage after this step, for `weights` `[parameters]`."""
        return weights

    def trigger(self, vocabulary: int) -> tuple[Sequence[int], int] | None:
        """Return the tokens that trigger a backdoor, and the token that should then follow.

        The harness measures how often it does, on held-out text. None: there is no backdoor.
        """
        return None

    def send(self, x: Tensor, ctx: AttackContext) -> Message:
        """Return what is sent in the direction of `ctx`."""
        return self.activation(x, ctx) if ctx.direction == "activation" else self.gradient(x, ctx)


# --- defenses -------------------------------------------------------------------------------------


class ResponseParams(Frozen):
    """What follows a flag: the published response (SENTINEL, arXiv 2603.03592, section 4)."""

    bans: bool = Field(True, description="false: flags are recorded, and nobody is ever banned")
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
    """batch, tokens, hidden of one worker's signal: of one microbatch"""
    device: str = "cpu"
    seed: int = 0
    """for what a verifier draws; differs from run to run with the seeds of model and data, while
    attackers, which must not know it, depend on that of the threat"""
    microbatches: int = 1
    """equal parts of a step's batch; each crosses every boundary as a message of its own"""


@dataclass(frozen=True, slots=True)
class Signals:
    """All replicas' signals at one boundary, as the verifier sees them.

    Attributes:
        stage: the stage that sent.
        direction: "activation" or "gradient".
        step: training step.
        sent: `[replicas, batch, tokens, hidden]`. Gradients are those of each replica's own mean
            loss. A signal that did not come, could not be read or was not finite is zeros, and not
            active.
        received: what the senders received in the same direction, same shape; None at the ends, and
            for a defense that does not ask for it (`needs_received`).
        active: `[replicas]` bool: neither banned nor tainted nor missing nor unreadable; only
            these are tested.
        again: the same work done a second time, for a defense that asks for it (`needs_again`).
        microbatch: which part of the step's batch this is, from 0. In each stage and direction
            they come in this order.
    """

    stage: int
    direction: Direction
    step: int
    sent: Tensor
    received: Tensor | None
    active: Tensor
    again: Again | None = None
    microbatch: int = 0


class Again(Protocol):
    """Does the work of workers a second time, from what they received and the stage's weights.

    Equal to what an honest worker sent up to rounding: other shapes of a batch take other kernels.
    Only good within the `check` that it was given to; name at least one replica.
    """

    def recompute(self, of: Sequence[int]) -> Tensor:
        """Return what replicas `of` should have sent, computed by the verifier itself.

        `[n, batch, tokens, hidden]`, in the order of `of`.
        """

    def ask(self, of: Sequence[int], by: Sequence[int]) -> Tensor:
        """Return what replica `by[i]` of the same stage answers when asked for the work of `of[i]`.

        `[n, batch, tokens, hidden]`. A malicious one may lie (`threat.verifiers`). Where stages
        keep copies (`Defense.redundancy`), `by[i]` is of the stage that holds the copy.
        """

    def check_linears(self, of: Sequence[int], projections: int, seed: int) -> LinearCheck:
        """Ask replicas `of` for what their linear layers put out, and test that at random.

        A malicious one tells a story that ends in what it sent. Each claim is tested with so many
        random vectors, drawn from `seed` after it was made. Where stages keep copies
        (`Defense.redundancy`) nobody is asked: these compute the results.
        """


@dataclass(frozen=True, slots=True)
class LinearCheck:
    """What became of the claims of n replicas about their linear layers.

    Attributes:
        result: `[n, batch, tokens, hidden]`, the signals that follow from the claims; the verifier
            computed all that is not a linear layer.
        error: `[n]` float64, how far the worst claim of each is from the product that it stands
            for, relative to its size, as random vectors see it: 0 to some units.
    """

    result: Tensor
    error: Tensor


@dataclass(frozen=True, slots=True)
class Updates:
    """What the workers of one stage hand in when a step ends, one flat vector each.

    Attributes:
        stage: of the workers.
        step: training step, from 0.
        kind: "gradient", their weight gradients, before the stage takes the mean of them; or
            "weights", what each holds after the optimizer's step, before the replicas of the stage
            are made equal again.
        active: `[replicas]` bool: neither banned nor lost, and for gradients neither tainted nor
            left out; only these count.
        work: gives the vectors; computing one costs a forward and a backward pass of the stage.
    """

    stage: int
    step: int
    kind: Literal["gradient", "weights"]
    active: Tensor
    work: Contributions


class Contributions(Protocol):
    """Gives what workers hand in; only good within the `check_updates` it was given to.

    Gradients are those of each replica's own mean loss. Name at least one replica.
    """

    def sent(self, of: Sequence[int]) -> Tensor:
        """Return what replicas `of` hand in, `[n, parameters]`."""

    def recompute(self, of: Sequence[int]) -> Tensor:
        """Return what they should hand in, computed by the verifier itself, `[n, parameters]`."""

    def mean(self) -> tuple[list[int], Tensor]:
        """Return the replicas whose gradients are averaged, and their mean `[parameters]`.

        Costs nothing: it is what the stage is about to use. For gradients, not for weights.
        """

    def redo(self, of: Sequence[int]) -> Redone:
        """Do all the work of n replicas in this step again, as one batch; for gradients only."""

    def project(self, of: Sequence[int], onto: Tensor) -> Tensor:
        """Return inner products of what replicas `of` hand in with vectors: a cheap digest.

        `onto` is `[k, parameters]`, in float32; the answer is `[n, k]`.
        """

    def losses(self) -> Tensor | None:
        """Return the mean loss of each replica, `[replicas]`; None before the last stage."""


@dataclass(frozen=True, slots=True)
class Redone:
    """What n workers of a stage should have sent in a step, from what they received.

    The batch is that of the whole step: the microbatches one after the other, scaled as they are
    sent.

    Attributes:
        activation: `[n, batch, tokens, hidden]`; None at the last stage.
        gradient: of each replica's own mean loss, `[n, batch, tokens, hidden]`; None at the first.
        update: the mean of their weight gradients, `[parameters]`.
    """

    activation: Tensor | None
    gradient: Tensor | None
    update: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a detector makes of the signals at one boundary, or of the updates of one stage.

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


@dataclass(frozen=True, slots=True)
class Redundancy:
    """How stages keep trained copies of blocks: stage s one of s - 1, the first one of the last.

    A copy does all the work of its block a second time: what a defense asks of `Signals.again`
    comes from it, and its own optimizer trains it. It is told the norm of all gradients, by which
    everybody clips.

    Attributes:
        resync: steps between two comparisons of the copies with their originals.
        rtol: relative distance of all weights beyond which a copy is replaced by its original.
    """

    resync: int
    rtol: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """What becomes of a pass in which signals were flagged: it is thrown away, and done again.

    Attributes:
        bypass: stages that the new pass leaves out. They send nothing; in their place comes the
            identity, and for the first and last stage what is no layer: embedding, norm and head.
        freeze: other stages whose weights stay as they are in this step.
        skip: there is no new pass, and the step changes no weight at all.
    """

    bypass: frozenset[int] = frozenset()
    freeze: frozenset[int] = frozenset()
    skip: bool = False

    @property
    def still(self) -> frozenset[int]:
        """All stages whose weights stay as they are."""
        return self.bypass | self.freeze


class Defense(Plugin[P]):
    """Looks at all replicas of one stage at once and says which signals are odd.

    What follows (violations, taint, bans) is the ledger's business, so `Params` must extend
    `ResponseParams`. In warm-up steps everything is called as usual, but no flag counts.

    Which stages an instance sees, and in which order their microbatches and directions alternate,
    follows from how a run is placed, and must not show in a verdict: what is drawn or remembered
    depends on seeds, step, stage, direction and microbatch only (`defenses/draws.py`). A `check` is
    followed by its own `learn` before anything else is called, and so are those of updates.
    """

    Params: ClassVar[type[Frozen]] = ResponseParams
    passive: ClassVar[bool] = False
    """True if it never looks at a signal: the boundaries are then left out."""
    needs_received: bool = False
    """True if it compares with what the senders received; others are not given a copy of it."""
    needs_again: bool = False
    """True if it has work done a second time; others are not given the means."""
    needs_updates: bool = False
    """True if `check_updates` is to be called."""
    across_stages: bool = False
    """True if it compares stages with each other: it then runs in one process only."""
    whole_batch: bool = False
    """True if it needs the whole batch of a step in one message."""
    learns: ClassVar[bool] = True
    """False if nothing of the warm-up matters to it: it is then not shown."""
    blind_to: ClassVar[str] = ""
    """What it does not protect against, in one sentence; empty: it does not say."""

    def start(self, setup: Setup) -> None:
        """Prepare the state for a grid."""

    def check(self, signals: Signals) -> Verdict:
        """Judge the signals at one boundary, without changing them."""
        raise NotImplementedError

    def preview(self, signals: Signals) -> Verdict | None:
        """Say what `check` would say, and change nothing: for attacks that know the detector.

        Its `statistics` are what such an attack steers by. None (the default) offers nothing; so
        does whatever a verifier draws after the signals were sent.
        """
        return None

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Take in the signals just checked; `clean` `[replicas]` bool are the trusted ones."""

    def check_updates(self, updates: Updates) -> Verdict:
        """Judge what the workers of a stage hand in, after the backward pass and after the step.

        Who is flagged has no part in this step's mean. There is no reference.
        """
        raise NotImplementedError

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        """Take in the updates just checked; `clean` `[replicas]` bool are the trusted ones."""

    def redundancy(self) -> Redundancy | None:
        """Say how stages keep copies of blocks; None: they keep none. Called after `start`."""
        return None

    def recover(self, suspects: frozenset[int], passes: int, last: Recovery) -> Recovery | None:
        """Say what becomes of a pass in which signals of the stages `suspects` were flagged.

        Called after the forward and after the backward part of a pass, if there are any.

        Args:
            suspects: stages that sent what was flagged.
            passes: how many passes this step has had, with this one.
            last: what the last answer was in this step; at first an empty one.

        Returns:
            None: the pass counts, and goes on.
        """
        return None

    def end_step(self, step: int) -> None:
        """Called once after all boundaries of a step."""

    def state_bytes(self) -> int:
        """Return the bytes of memory that the defense keeps from step to step, without copies."""
        return 0


# --- aggregators ----------------------------------------------------------------------------------


class AggregatorParams(Frozen):
    """What every aggregator can be told."""

    f: int | None = Field(
        None, ge=0, description="faulty rows to withstand; default: what the harness says"
    )
    strict: bool = Field(True, description="refuse numbers of rows that the rule is not proven for")


A = TypeVar("A", bound=AggregatorParams)


class Aggregator(Plugin[A]):
    """Makes one weight gradient of those of all replicas, in place of their mean.

    Call the instance; implement `aggregate`, and `requires` where the rule needs enough rows. With
    `strict: false` a rule does the nearest possible thing, which its `requires` describes.
    """

    Params: ClassVar[type[Frozen]] = AggregatorParams
    spreads: ClassVar[bool] = False
    """True if any row that is not finite makes the result so: only then are the rows looked at."""

    def requires(self, n: int, f: int) -> str | None:
        """Return which condition on n rows with f faulty ones is violated, in words, or None."""
        return None

    def aggregate(self, rows: Tensor, f: int) -> Tensor:
        """Return the aggregate `[d]` of the rows, a new tensor.

        Args:
            rows: `[n, d]`, finite, float32 or float64; not to be changed. There may be fewer than
                `requires` asks for, but at least one.
            f: number of faulty rows to withstand.
        """
        raise NotImplementedError

    def check(self, n: int, f: int) -> None:
        """Refuse n rows with f faulty ones, if the rule needs more and `strict` is set.

        Raises:
            ConfigError: the violated condition.
        """
        f = self._faulty(f)
        violated = self.requires(n, f) if self.params.strict else None
        if violated:
            raise ConfigError(f"{violated}; lower f, add replicas, or set strict=false")

    def __call__(self, rows: Tensor, f: int) -> Tensor:
        """Return the aggregate of one flattened weight gradient per replica.

        Rows that are not finite are left out, and each lowers `f` by one: the condition of the rule
        is put to the rows as they came. Half precision is computed in float32.

        Args:
            rows: `[n, d]`; stays as it is.
            f: number of faulty rows to withstand, unless the parameters say.

        Returns:
            `[d]`, of the dtype and device of `rows`, sharing no memory with it.

        Raises:
            ConfigError: there are too few rows for the rule (see `check`).
            PluginError: no row is finite, or the rule changed the rows or returned another shape.
        """
        self.check(len(rows), f)
        version = rows._version
        exact = rows.float() if rows.element_size() < 4 else rows
        out = self._of_finite(exact.detach(), self._faulty(f))
        if rows._version != version:
            raise PluginError(f"aggregator {self.name} changed its input", party="aggregator")
        if out.shape != rows.shape[1:]:
            raise PluginError(
                f"aggregator {self.name} returned shape {list(out.shape)} for rows of shape "
                f"{list(rows.shape)}",
                party="aggregator",
            )
        return out.to(rows.dtype)

    def condition(self, text: str, least: int, n: int, f: int) -> str | None:
        """Say that the condition `text` asks for at least so many rows, if n is fewer."""
        if n >= least:
            return None
        return f"{self.name} needs {text}: {least} rows for f = {f}, but there are {n}"

    def _of_finite(self, rows: Tensor, f: int) -> Tensor:
        """Return the aggregate of those rows that are finite."""
        if self.spreads:
            out = self.aggregate(rows, f)
            if out.sum().isfinite():
                return out
        finite = _finite(rows)
        if not finite:
            raise PluginError(
                f"aggregator {self.name}: none of {len(rows)} rows is finite", party="pipeline"
            )
        dropped = len(rows) - len(finite)
        return self.aggregate(rows[finite] if dropped else rows, max(0, f - dropped))

    def _faulty(self, f: int) -> int:
        return f if self.params.f is None else self.params.f


def _finite(rows: Tensor) -> list[int]:
    """Return which rows `[n, d]` hold nothing but finite numbers."""
    finite = rows.sum(1).isfinite()
    if not finite.all():  # the sum of finite numbers may overflow: look at each
        doubtful = ~finite
        finite[doubtful] = rows[doubtful].isfinite().all(1)
    found: list[int] = finite.nonzero().flatten().tolist()
    return found
