"""Cascade: cheap statistics say what is worth recomputing, and recomputation says who lied.

A statistic alone has to choose between fences that let small lies pass and fences that ban the
honest. Here a flag costs a worker nothing but one recomputation of what it sent, so the fences can
be narrow; and whoever is banned has been proven to lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Setup, Signals, Updates, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.panel import Detector, Panel
from sentinel_bench.defenses.recompute import Proof, ProofParams, distance

if TYPE_CHECKING:
    from torch import Tensor


class CascadeParams(ProofParams):
    """Parameters of `cascade`."""

    quarantine: bool = Field(True, description="a tainted rank has no part in any weight gradient")
    screens: tuple[Detector, ...] = Field(
        (
            Component(name="coherence", params={"mads": 5.0}),
            Component(name="surrogate", params={"mads": 5.0}),
        ),
        description="detectors whose flags are recomputed; name, or name:key=value in quotes",
    )
    q: float = Field(0.02, ge=0, le=1, description="share of all signals that are recomputed")
    q_updates: float = Field(
        0.05, ge=0, le=1, description="share of all weight gradients that are recomputed"
    )
    digests: bool = Field(
        True, description="compare digests of the weights of all workers after each step"
    )


class Cascade(Proof[CascadeParams]):
    """Recomputes what a screen flags, and a random share of all else; a mismatch bans at once.

    The screens learn from what was not proven wrong. The verifier needs what each worker received,
    which passes through it anyhow, and the weights of the stages whose signals it recomputes.
    """

    name = "cascade"
    goal = "ban all who lie and nobody else, for little more than the price of cheap statistics"
    formula = (
        "recomputed: flagged by a screen, or with probability q; banned: |x - x'| > rtol max(|x|,"
        " |x'|); the same for weight gradients with q_updates, and for digests of all weights"
    )
    source = "ours"
    learns = True
    blind_to: ClassVar[str] = (
        "a lie inside of all fences until it is drawn (after n lies with probability"
        " 1 - (1 - q)^n), a weight gradient likewise, changes below rtol, workers who give a stage"
        " other data than they should, and verifiers that lie"
    )
    Params = CascadeParams

    def __init__(self, params: CascadeParams) -> None:
        super().__init__(params)
        self.screens = Panel(params.screens, params)
        self.needs_received = self.screens.any("needs_received")
        self.needs_updates = bool(params.q_updates) or params.digests

    @classmethod
    def wraps(cls, params: CascadeParams) -> Sequence[Component]:
        """Return the screens."""
        return params.screens

    def start(self, setup: Setup) -> None:
        """Start the screens."""
        super().start(setup)
        self.screens.start(setup)

    def check(self, signals: Signals) -> Verdict:
        """Recompute what is flagged or drawn, and compare; without the means the screens decide."""
        screened = self.screens.check(signals)
        if signals.again is None:
            return screened
        suspects = (screened.flagged & signals.active).tolist()
        drawn = set(self.draw(signals.active, self.params.q))
        rows = [r for r, suspect in enumerate(suspects) if suspect or r in drawn]
        if not rows:
            return self.verdict(signals, {})
        apart = distance(signals.sent[rows], signals.again.recompute(rows)).tolist()
        found = {"mismatch": (dict(zip(rows, apart, strict=True)), self.tolerance(signals))}
        proven = self.verdict(signals, found)
        if not any(proven.flagged.tolist()):
            return proven
        return replace(proven, statistics={**screened.statistics, **proven.statistics})

    def preview(self, signals: Signals) -> Verdict | None:
        """Say what the screens would say: what is drawn nobody can know."""
        return self.screens.preview(signals)

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Let the screens learn."""
        self.screens.learn(signals, clean)

    def check_updates(self, updates: Updates) -> Verdict:
        """Recompute the weight gradients that are drawn; compare digests of all weights."""
        if updates.kind == "gradient":
            return self.audit_updates(updates, self.params.q_updates)
        return self.attest(updates) if self.params.digests else self.clear(updates)

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        """Keep nothing."""

    def end_step(self, step: int) -> None:
        """Close the step of the screens."""
        self.screens.end_step(step)

    def state_bytes(self) -> int:
        """Return the bytes of the screens, the random numbers and the digests."""
        return super().state_bytes() + self.screens.state_bytes()
