"""Defenses that do the work again: by other replicas, or by the verifier on a sample.

What they find is a proof, not a suspicion: an honest worker's signal differs from its recomputation
by rounding alone, however much the data moves. So a lie bans at once, and there is no amnesty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from sentinel_bench.api import Again, Defense, ResponseParams, Setup, Signals, Updates, Verdict
from sentinel_bench.defenses.draws import Draws, place

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-300
"""Keeps 0 / 0 at 0, in float64."""


class ProofParams(ResponseParams):
    """What all of them can be told."""

    amnesty: bool = Field(False, description="more than half flagged at once is a natural shift")
    proof: bool = Field(True, description="a lie bans at once")
    rtol: float = Field(
        1e-4, ge=0, lt=2, description="relative L2 distance that is rounding, in float32"
    )
    rtol_low: float = Field(
        2e-2, ge=0, lt=2, description="the same in half precision, and on a GPU (autocast)"
    )
    seed: int = Field(0, ge=0, description="of what is drawn")


P = TypeVar("P", bound=ProofParams)


class Proof(Defense[P]):
    """What the defenses that do the work again have in common."""

    needs_again = True
    learns = False

    def start(self, setup: Setup) -> None:
        """Seed what is drawn."""
        self._draws = Draws(self.name, self.params.seed, setup.seed)
        self._onto: dict[int, Tensor] = {}  # stage to what its weights are projected on

    def state_bytes(self) -> int:
        """Return the bytes of the secret of what is drawn, and of what digests are made with."""
        return self._draws.state_bytes() + sum(onto.nbytes for onto in self._onto.values())

    def tolerance(self, signals: Signals) -> float:
        """Return the difference that rounding explains, for the precision of the signals."""
        return self._tolerance(signals.sent)

    def draw(self, of: Signals | Updates, q: float) -> list[int]:
        """Return each of the active replicas with probability q."""
        where = place(of)
        return [r for r in indices(of.active) if self._draws.uniform("replica", *where, r) < q]

    def audit_updates(self, updates: Updates, q: float) -> Verdict:
        """Compute a share q of weight gradients again, drawn after they were handed in."""
        drawn = self.draw(updates, q)
        if not drawn:
            return self.clear(updates)
        sent, truth = updates.work.sent(drawn), updates.work.recompute(drawn)
        return self.compared(updates, drawn, {"update": (sent, truth)})

    def compared(
        self, updates: Updates, drawn: Sequence[int], parts: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Verdict:
        """Return who of those drawn is flagged.

        Args:
            updates: what was checked.
            drawn: n replicas.
            parts: name to what they sent and what they should have sent, `[n, ...]` each.
        """
        found = {}
        for name, (sent, truth) in parts.items():
            apart = distance(sent, truth).tolist()
            found[f"{name} mismatch"] = (
                dict(zip(drawn, apart, strict=True)),
                self._tolerance(sent),
            )
        return self._flag(updates.active, found)

    def attest(self, updates: Updates) -> Verdict:
        """Compare a random projection of the weights of every worker with the true one.

        The step of the optimizer is a function of the weights before it and of the mean gradient:
        the verifier can do it too, and all replicas of a stage must have the same result. Off by
        more than `rtol` of the weights' norm is a lie; one of relative size d passes with
        probability of about 0.8 rtol / d.
        """
        import torch

        rows = indices(updates.active)
        if not rows:
            return self.clear(updates)
        truth = updates.work.recompute(rows[:1])[0]
        limit = self.params.rtol if truth.element_size() >= 4 else self.params.rtol_low
        truth = truth.float()
        if updates.stage not in self._onto:
            generator = torch.Generator().manual_seed(self._draws.seed("digest", updates.stage))
            drawn = torch.randn(1, len(truth), generator=generator)
            self._onto[updates.stage] = drawn.to(truth.device)
        onto = self._onto[updates.stage]
        apart = (updates.work.project(rows, onto) - onto @ truth).abs().flatten().double()
        relative = (apart / truth.norm().double().clamp_min(TINY)).nan_to_num(2.0, 2.0)
        values = dict(zip(rows, relative.tolist(), strict=True))
        return self._flag(updates.active, {"weights mismatch": (values, limit)})

    def clear(self, updates: Updates) -> Verdict:
        """Return that nobody is flagged."""
        nobody = updates.active.new_zeros(updates.active.shape)
        return Verdict(nobody, nobody)

    def _tolerance(self, x: Tensor) -> float:
        p = self.params
        return p.rtol_low if x.element_size() < 4 or x.device.type == "cuda" else p.rtol

    def verdict(
        self, signals: Signals, found: Mapping[str, tuple[Mapping[int, float], float]]
    ) -> Verdict:
        """Return who is flagged.

        Args:
            signals: what was checked.
            found: name of a statistic to its value for some active replicas, and its limit: what
                lies above is a lie. The others are at 0.
        """
        x = signals.sent
        verdict = self._flag(signals.active, found)
        clean = signals.active & ~verdict.flagged
        if signals.direction == "activation" or not clean.any() or clean.all():
            return verdict
        return replace(verdict, reference=x[clean].double().mean(0).to(x.dtype))

    def _flag(
        self, active: Tensor, found: Mapping[str, tuple[Mapping[int, float], float]]
    ) -> Verdict:
        flagged = active.new_zeros(active.shape)
        statistics = {}
        for name, (values, limit) in found.items():
            row = [values.get(replica, 0.0) for replica in range(len(active))]
            flagged = flagged | flagged.new_tensor([value > limit for value in row])
            statistics[name] = (active.double().new_tensor(row), -limit, limit)
        return Verdict(flagged, flagged & self.params.proof, None, statistics)


class DuplicateWorkParams(ProofParams):
    """Parameters of `duplicate-work`."""

    jurors: int | None = Field(
        None, ge=1, description="replicas that decide who lied, an odd number; default: all others"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.jurors is not None and self.jurors % 2 == 0:
            raise ValueError(f"jurors {self.jurors} must be odd: an even jury can be split")
        return self


class DuplicateWork(Proof[DuplicateWorkParams]):
    """Has each signal computed again by another replica; where the two differ, others decide.

    The active replicas are put in a circle, drawn anew for every boundary: each one's work is done
    again by the next, so that all do the same amount. Where the two differ, jurors do that work as
    well, and the answer that more than half of them agree on is the truth: whoever said something
    else (the sender, its duplicate or a juror) lied. Without such an answer nobody is flagged: two
    replicas can only contradict each other, and one is not checked at all. Nobody honest is ever
    flagged while the malicious are fewer than half of the jurors.

    A tainted gradient is replaced by the mean of the replicas that are active and not flagged.
    """

    name = "duplicate-work"
    goal = "catch every wrong signal, for twice the work: somebody else computes each one again"
    formula = (
        "|x_i - x_i'| > rtol max(|x_i|, |x_i'|), x_i' by a random replica; the jury's majority"
    )
    source = "Lu et al., ICML 2024 (a baseline); SENTINEL, arXiv 2603.03592, Table 12"
    blind_to: ClassVar[str] = (
        "malicious workers who are half of a stage or more, a lie in the one step in which a"
        " colluder checks it, stages with fewer than three replicas (two can only contradict each"
        " other), changes below rtol, and attacks on weight gradients or weights, which are no"
        " signals"
    )
    Params = DuplicateWorkParams

    def check(self, signals: Signals) -> Verdict:
        """Have all work done again in one go, and disputes decided in another."""
        rows = indices(signals.active)
        lies: dict[int, float] = {}
        rtol = self.tolerance(signals)
        if signals.again is not None and len(rows) > 1:
            luck = self._draws.random("circle", *place(signals))
            luck.shuffle(rows)
            by = rows[1:] + rows[:1]
            answers = signals.again.ask(rows, by)
            apart = distance(signals.sent[rows], answers).tolist()
            disputes = [
                (rows[i], by[i], answers[i : i + 1]) for i, d in enumerate(apart) if d > rtol
            ]
            lies = self._decide(signals, signals.again, disputes, rtol, luck)
        return self.verdict(signals, {"mismatch": (lies, rtol)})

    def _decide(
        self,
        signals: Signals,
        again: Again,
        disputes: Sequence[tuple[int, int, Tensor]],
        rtol: float,
        luck: Random,
    ) -> dict[int, float]:
        """Return the largest distance from the truth of what each replica said, where it is known.

        A dispute is a sender, its duplicate, and what that answered `[1, batch, tokens, hidden]`;
        `luck` draws the juries.
        """
        import torch

        juries = [self._jury(signals, {of, by}, luck) for of, by, _ in disputes]
        asked = [
            (of, juror) for (of, *_), jury in zip(disputes, juries, strict=True) for juror in jury
        ]
        if not asked:
            return {}
        heard = again.ask([of for of, _ in asked], [juror for _, juror in asked])
        lies: dict[int, float] = {}
        split = torch.split(heard, [len(jury) for jury in juries])
        for (of, by, answer), jury, answers in zip(disputes, juries, split, strict=True):
            truth = majority(answers, rtol)
            if truth is None:
                continue
            said = torch.cat([signals.sent[of : of + 1], answer, answers])
            apart = distance(said, truth.expand_as(said)).tolist()
            for replica, d in zip([of, by, *jury], apart, strict=True):
                lies[replica] = max(d, lies.get(replica, 0.0))
        return lies

    def _jury(self, signals: Signals, parties: set[int], luck: Random) -> list[int]:
        others = [r for r in indices(signals.active) if r not in parties]
        n = self.params.jurors
        return others if n is None or n >= len(others) else luck.sample(others, n)


class AuditParams(ProofParams):
    """Parameters of `audit`."""

    quarantine: bool = Field(True, description="a tainted rank has no part in any weight gradient")
    q: float = Field(0.02, gt=0, le=1, description="share of the signals that are computed again")


A = TypeVar("A", bound=AuditParams)


class Sampling(Proof[A]):
    """Draws signals after they were sent, and has the verifier compute them again."""

    def check(self, signals: Signals) -> Verdict:
        """Draw, compute again, compare. Where nobody is drawn nothing is computed."""
        drawn = self.draw(signals, self.params.q)
        if not drawn or signals.again is None:
            return self.verdict(signals, {})
        values = self.compare(signals, drawn, signals.again.recompute(drawn))
        return self.verdict(
            signals,
            {
                name: (dict(zip(drawn, row.tolist(), strict=True)), limit)
                for name, (row, limit) in values.items()
            },
        )

    def compare(
        self, signals: Signals, drawn: Sequence[int], expected: Tensor
    ) -> dict[str, tuple[Tensor, float]]:
        """Return statistics of the drawn signals: name to values `[n]` and the limit.

        Args:
            signals: what was sent.
            drawn: n replicas.
            expected: `[n, batch, tokens, hidden]`, what they should have sent.
        """
        raise NotImplementedError


class Audit(Sampling[AuditParams]):
    """Computes a few signals and updates again, drawn after they were sent; a lie bans at once.

    An attacker that sends n wrong signals is found with probability `1 - (1 - q)^n`.
    """

    name = "audit"
    goal = "make every lie a gamble, for a share q of the work"
    formula = "with probability q: |x - x'| > rtol max(|x|, |x'|), x' computed by the verifier"
    source = "sentinel-bench; random audits as in verifiable computation"
    needs_updates = True
    blind_to: ClassVar[str] = (
        "the lies that are not drawn (at q = 2 % it takes 34 to be found with even odds), changes"
        " below rtol, and weights that are changed beside the optimizer"
    )
    Params = AuditParams

    def compare(
        self, signals: Signals, drawn: Sequence[int], expected: Tensor
    ) -> dict[str, tuple[Tensor, float]]:
        """Compare whole signals."""
        return {
            "mismatch": (distance(signals.sent[list(drawn)], expected), self.tolerance(signals))
        }

    def check_updates(self, updates: Updates) -> Verdict:
        """Draw weight gradients, compute them again, compare."""
        if updates.kind == "weights":
            return self.clear(updates)
        return self.audit_updates(updates, self.params.q)


def indices(mask: Tensor) -> list[int]:
    """Return where a mask `[n]` is true."""
    found: list[int] = mask.nonzero().flatten().tolist()
    return found


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return `|a - b| / max(|a|, |b|)` of each row, L2 norms, 0 to 2.

    Args:
        a, b: `[n, batch, tokens, hidden]`; squares do not overflow here.

    Returns:
        `[n]` float64: 0 where both are zero, 2 where one is not finite.
    """
    a, b = a.flatten(1).double(), b.flatten(1).double()
    size: Any = a.norm(dim=1).maximum(b.norm(dim=1))
    relative: Tensor = (a - b).norm(dim=1) / size.clamp_min(TINY)
    return relative.nan_to_num(2.0, 2.0)


def majority(answers: Tensor, rtol: float) -> Tensor | None:
    """Return the answer `[1, batch, tokens, hidden]` that more than half agree with, or None.

    Args:
        answers: `[n, batch, tokens, hidden]`.
        rtol: answers agree up to this distance.
    """
    for i in range(len(answers) // 2 + 1 if len(answers) else 0):
        one = answers[i : i + 1]
        if 2 * int((distance(answers, one.expand_as(answers)) <= rtol).sum()) > len(answers):
            return one
    return None
