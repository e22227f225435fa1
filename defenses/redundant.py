"""Neighbours that keep copies of each other's blocks, and steps that are done again.

What this protects against: one liar at a time between honest neighbours. A stage is checked by the
one after it (the last by the first), so each alarm has two suspects, the accused and the accuser,
and the recovery trusts neither.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from sentinel_bench.api import (
    Defense,
    Recovery,
    Redundancy,
    ResponseParams,
    Setup,
    Signals,
    Verdict,
)
from sentinel_bench.defenses.recompute import distance


class RedundantParams(ResponseParams):
    """Parameters of `redundant-block`."""

    bans: bool = Field(False, description="also ban; as published nobody is, steps are recovered")
    amnesty: bool = Field(False, description="more than half flagged at once is a natural shift")
    recovery: Literal["skip-layer", "restart", "none"] = Field(
        "restart",
        description="after an alarm: do the step again without the blocks of accused and accuser,"
        " do it again with all blocks, or go on with the usual response to flags",
    )
    tries: int = Field(
        5, ge=1, le=99, description="passes that a step gets after its first; then it is skipped"
    )
    resync: int = Field(
        10, ge=1, description="steps between comparisons of the copies' weights with the originals"
    )
    rtol: float = Field(
        1e-4, ge=0, lt=2, description="relative L2 distance that is rounding, in float32"
    )
    rtol_low: float = Field(
        2e-2, ge=0, lt=2, description="the same in half precision, and on a GPU (autocast)"
    )


class SkipLayerParams(RedundantParams):
    """Parameters of `skip-layer`."""

    recovery: Literal["skip-layer", "restart", "none"] = Field(
        "skip-layer", description="see redundant-block"
    )


class RedundantBlock(Defense[RedundantParams]):
    """Each stage recomputes the block before it with a copy of its own; an alarm redoes the step.

    Stage s keeps a copy of block s - 1, is sent what s - 1 is sent, and compares: in the forward
    pass the activations, in the backward pass the copy's input gradient with what s - 1 sent
    upstream. The first stage keeps a copy of the last (a ring, as the published code has it but
    does not use). The copies train in step and are compared with their originals every `resync`
    steps; one that has drifted is replaced, which the record shows as `resync`.

    A malicious holder of a copy may lie (`threat.verifiers`): it then accuses an honest neighbour,
    or covers for a colluding one. `threat.verifiers: honest` is the published setting.

    `recovery: skip-layer` does the step again without the blocks of both suspects: their layers
    become the identity (of the first and last stage the embedding, norm and head stay, done by
    whoever holds the copy), gradients jump to the nearest stage that is left, and these two and the
    one before them do not train in this step. The new pass is checked as well, and bypasses more
    if there is another alarm. `recovery: restart` does the step again with all blocks: of use
    against an attacker that acts in a share of the steps, since it decides anew in each pass; one
    that always acts has every step skipped. All replicas share the stage's fate.

    Nobody is banned, as published, so precision and recall of a run say nothing here: look at the
    flags (`true_flag_rate`, `false_flag_rate`), at `skipped_steps` and at the loss. `bans: true`
    adds the usual violations and bans; one step can then count several violations.
    """

    name = "redundant-block"
    goal = "catch every wrong signal and undo its step, for twice the work and memory"
    formula = "|x - x'| > rtol max(|x|, |x'|), x' from a copy of the block kept by the next stage"
    source = "Lu et al., ICML 2024; tolerance, ring, resync and checked recovery: sentinel-bench"
    blind_to: ClassVar[str] = (
        "two malicious neighbours in one rank that cover for each other, changes below rtol, and"
        " attacks on weight gradients or weights beyond the next resync, which takes whatever"
        " the replicas then hold"
    )
    Params = RedundantParams
    needs_again = True
    learns = False

    def start(self, setup: Setup) -> None:
        """Remember the grid."""
        self._stages = setup.stages
        self._device = setup.device

    def redundancy(self) -> Redundancy:
        """Have copies kept."""
        return Redundancy(self.params.resync, self._tolerance(4))

    def check(self, signals: Signals) -> Verdict:
        """Compare what was sent with what the holders of the copies say."""
        x = signals.sent
        nobody = signals.active.new_zeros(signals.active.shape)
        if signals.again is None or not signals.active.any():
            return Verdict(nobody, nobody)
        everybody = range(len(x))
        rtol = self._tolerance(x.element_size())
        apart = distance(x, signals.again.ask(everybody, everybody))
        flagged = signals.active & (apart > rtol)
        return Verdict(flagged, nobody, statistics={"mismatch": (apart, -rtol, rtol)})

    def recover(self, suspects: frozenset[int], passes: int, last: Recovery) -> Recovery | None:
        """Have the pass done again, or the step skipped after too many."""
        if self.params.recovery == "none":
            return None
        if passes > self.params.tries:
            return Recovery(skip=True)
        if self.params.recovery == "restart":
            return Recovery()
        accusers = {(s + 1) % self._stages for s in suspects}
        before = {s - 1 for s in suspects if s > 0}
        bypass = last.bypass | suspects | accusers
        return Recovery(bypass, (last.freeze | before) - bypass)

    def _tolerance(self, bytes_each: int) -> float:
        low = bytes_each < 4 or self._device == "cuda"
        return self.params.rtol_low if low else self.params.rtol


class SkipLayer(RedundantBlock):
    """The same as `redundant-block` with `recovery: skip-layer`; see there."""

    name = "skip-layer"
    goal = "catch every wrong signal and train around its sender, for twice the work and memory"
    formula = RedundantBlock.formula + "; then blocks s - 1 and s are bypassed"
    Params = SkipLayerParams
