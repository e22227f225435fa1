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
from sentinel_bench.defenses.draws import place
from sentinel_bench.defenses.panel import Detector, Panel
from sentinel_bench.defenses.recompute import Proof, ProofParams, distance, indices

if TYPE_CHECKING:
    from torch import Tensor


class CascadeParams(ProofParams):
    """Parameters of `cascade`."""

    quarantine: bool = Field(True, description="a tainted rank has no part in any weight gradient")
    screens: tuple[Detector, ...] = Field(
        (
            Component(name="coherence", params={"mads": 5.0, "tokens": 64}),
            Component(name="surrogate", params={"mads": 5.0, "tokens": 64}),
        ),
        description="detectors whose flags are recomputed; name, or name:key=value in quotes",
    )
    screened: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the boundaries, drawn anew in each step, where screens look",
    )
    q: float = Field(
        0.04,
        ge=0,
        le=1,
        description="share of the stages, drawn in each step, whose work is all done again",
    )
    digests: bool = Field(
        True, description="compare digests of the weights of all workers after each step"
    )


class Cascade(Proof[CascadeParams]):
    """Recomputes what a screen flags, and all work of stages at random; a mismatch bans at once.

    The screens learn from what was not proven wrong. The verifier needs what each worker received,
    which passes through it anyhow, and the weights of the stages whose signals it recomputes.
    """

    name = "cascade"
    goal = "ban all who lie and nobody else, for little more than the price of cheap statistics"
    formula = (
        "recomputed: signals flagged by a screen, and with probability q all work of a stage in a"
        " step; banned: |x - x'| > rtol max(|x|, |x'|), and likewise for digests of all weights"
    )
    source = "ours"
    learns = True
    blind_to: ClassVar[str] = (
        "a lie inside of all fences, or in a weight gradient, until it is drawn (within n steps"
        " with probability 1 - (1 - q)^n); changes below rtol; weight gradients of colluders whose"
        " lies cancel in the mean, which another aggregator may not forgive; workers who feed other"
        " data into the first stage than they should; and verifiers that lie"
    )
    Params = CascadeParams

    def __init__(self, params: CascadeParams) -> None:
        super().__init__(params)
        self.screens = Panel(params.screens, params)
        self.needs_received = self.screens.any("needs_received")
        self._weighing = self.screens.any("needs_updates")
        self.needs_updates = params.q > 0 or params.digests or self._weighing
        self.across_stages = self.screens.any("across_stages")
        self.whole_batch = self.screens.any("whole_batch")

    @classmethod
    def wraps(cls, params: CascadeParams) -> Sequence[Component]:
        """Return the screens."""
        return params.screens

    def start(self, setup: Setup) -> None:
        """Start the screens."""
        super().start(setup)
        self._microbatches = setup.microbatches
        self._sent: dict[tuple[int, str], dict[int, Tensor]] = {}
        self._looked = False
        own = self._draws.seed("screens")  # a cascade in a cascade draws something else
        self.screens.start(replace(setup, seed=own))

    def check(self, signals: Signals) -> Verdict:
        """Recompute what is flagged or drawn, and compare; without the means the screens decide."""
        luck = self._draws.uniform("screen", *place(signals))
        self._looked = signals.again is None or luck < self.params.screened
        parts = self._sent.setdefault((signals.stage, signals.direction), {})
        parts[signals.microbatch] = signals.sent
        if not self._looked:
            return self.verdict(signals, {})
        screened = self.screens.check(signals)
        if signals.again is None:
            return screened
        suspects = (screened.flagged & signals.active).tolist()
        rows = [r for r, suspect in enumerate(suspects) if suspect]
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
        """Let the screens learn what they looked at."""
        if self._looked:
            self.screens.learn(signals, clean)

    def check_updates(self, updates: Updates) -> Verdict:
        """Do the step of a stage that is drawn again; compare digests of all weights."""
        if updates.kind == "weights":
            return self.attest(updates) if self.params.digests else self.clear(updates)
        suspects = []
        if self._weighing:
            suspects = indices(self.screens.check_updates(updates).flagged & updates.active)
        luck = self._draws.uniform("redo", *place(updates))
        if luck < self.params.q and updates.active.any():
            return self._redone(updates, suspects)
        if suspects:
            sent, truth = updates.work.sent(suspects), updates.work.recompute(suspects)
            return self.compared(updates, suspects, {"update": (sent, truth)})
        return self.clear(updates)

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        """Let those screens learn that look at updates."""
        self.screens.learn_updates(updates, clean)

    def _redone(self, updates: Updates, suspects: Sequence[int]) -> Verdict:
        """Do all work of a stage again; weight gradients one by one only if their mean is off."""
        counted, mean = updates.work.mean()
        truth = updates.work.redo(counted)
        active = [(i, r) for i, r in enumerate(counted) if updates.active[r]]
        rows = [r for _, r in active]
        parts = {}
        for direction, expected in (("activation", truth.activation), ("gradient", truth.gradient)):
            sent = self._whole(updates.stage, direction)
            if sent is not None and expected is not None:
                parts[direction] = (sent[rows], expected[[i for i, _ in active]])
        apart = float(distance(mean[None], truth.update[None]))
        if suspects or apart * len(counted) > self._tolerance(mean):
            parts["update"] = (updates.work.sent(rows), updates.work.recompute(rows))
        return self.compared(updates, rows, parts)

    def _whole(self, stage: int, direction: str) -> Tensor | None:
        """Return what a stage sent in this step, `[replicas, batch, tokens, hidden]`, if all."""
        parts = self._sent.get((stage, direction), {})
        if len(parts) < self._microbatches:
            return None
        if len(parts) == 1:
            return parts[0]
        import torch

        return torch.cat([parts[m] for m in sorted(parts)], 1)

    def end_step(self, step: int) -> None:
        """Close the step of the screens, and forget what was sent."""
        self._sent.clear()
        self.screens.end_step(step)

    def state_bytes(self) -> int:
        """Return the bytes of the screens, the secret of what is drawn and the digests."""
        return super().state_bytes() + self.screens.state_bytes()
