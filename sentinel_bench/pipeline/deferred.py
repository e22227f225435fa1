"""An inspector that never waits for the device while signals cross: for GPUs.

What is done to a signal is decided on the device. What goes to the ledger and to the record is kept
there as well, and read all at once (`flush`) when somebody asks, at the latest when the passes of a
step are over. The verdicts are the same as those of `Inspector`, which is faster on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sentinel_bench.api import Again, Direction, Recovery, Verdict
from sentinel_bench.ledger import Ban
from sentinel_bench.pipeline.inspect import Inspector, check, learn, row_mask
from sentinel_bench.pipeline.tamper import Sent


@dataclass(frozen=True, slots=True)
class _Seen:
    """What there is to tell of the signals of a stage, once `told` is read from the device.

    Attributes:
        told: `[6, replicas]` bool: flagged, severe, tested, intact, tainted before, and whether a
            tainted gradient had a reference that is finite.
        missing: `[replicas]`, whose messages were lost.
    """

    stage: int
    direction: Direction
    step: int
    microbatch: int
    tampered: list[bool]
    verdict: Verdict
    missing: list[bool]
    told: Tensor


@dataclass(frozen=True, slots=True)
class _Heard:
    """What another process has found of the ranks, `[1, replicas]` bool."""

    microbatch: int
    told: Tensor


class DeferredInspector(Inspector):
    """Takes and gives the tainted ranks as a tensor; otherwise as `Inspector`."""

    deferred = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: list[_Seen | _Heard] = []
        self._masks: dict[int, Tensor] = {}
        """`[replicas]` bool: who of a stage is tested in this step if nobody is tainted."""

    def inspect(  # type: ignore[override]
        self,
        stage: int,
        direction: Direction,
        step: int,
        sent: Sent,
        received: Tensor | None,
        tainted: Tensor,
        again: Again | None = None,
        microbatch: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Check what `stage` sent; return what is passed on, and the tainted ranks.

        `tainted` is `[replicas]`, 0 or 1; so is what comes back.
        """
        self._counted(stage, sent)
        given, missing = tainted.bool(), sent.missing or [False] * len(tainted)
        if self.passive:
            return self._passed(direction, sent.x, tainted, missing, microbatch)
        intact = sent.x.flatten(1).sum(1).isfinite()
        if not all(sent.readable):
            intact = intact & row_mask(sent.readable, intact)
        x = _kept(sent.x, intact)
        tested = ~given & self._testable(stage, x)
        if any(missing):
            tested = tested & ~row_mask(missing, tested)
        signals = self._signals(
            stage, direction, step, x, received, tested & intact, again, microbatch
        )
        verdict = check(self._defense, signals)
        flagged, severe = verdict.flagged | ~intact, verdict.severe | ~intact
        counted = flagged & tested
        if self.ledger.lenient:
            counted = torch.zeros_like(counted)
        if self.ledger.policy.amnesty:
            counted = counted & ~(2 * counted.sum() > self.ledger.capacity()[stage])
        learn(self._defense, signals, tested & ~counted & intact)
        now, usable = given | counted | (tested & ~intact), torch.ones_like(given)
        if any(missing):
            now = now | row_mask(missing, now)
        if direction == "gradient":
            x, usable = self._replaced(x, now, verdict.reference)
        told = torch.stack([flagged, severe, tested, intact, given, usable])
        self._pending.append(
            _Seen(stage, direction, step, microbatch, sent.tampered, verdict, missing, told)
        )
        return x, now.to(tainted.dtype)

    def preview(self, *args: Any, tainted: Any, **kwargs: Any) -> Verdict | None:
        """Return what the defense would say of signals; waits for the device."""
        if isinstance(tainted, Tensor):
            tainted = tainted.bool().tolist()
        return super().preview(*args, tainted=tainted, **kwargs)

    def keeps(self, tainted: Tensor) -> Tensor:
        """Return which ranks count in the loss of a microbatch, `[replicas]` bool."""
        lost = [self.ledger.lost(r) for r in range(self.ledger.replicas)]
        kept = ~tainted.bool() if self.ledger.policy.quarantine else torch.ones_like(tainted).bool()
        return kept & ~row_mask(lost, kept) if any(lost) else kept

    def flush(self) -> None:
        """Let ledger and record know all that is known by now: one copy from the device."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        rows = iter(torch.cat([item.told for item in pending]).tolist())
        for item in pending:
            lists = [next(rows) for _ in range(len(item.told))]
            if isinstance(item, _Heard):
                super().hear(lists[0], item.microbatch)
            else:
                self._tell(item, *lists)

    def hear(self, tainted: Any, microbatch: int) -> None:
        """Take in the ranks that another process has found to be tainted."""
        if isinstance(tainted, Tensor):
            self._pending.append(_Heard(microbatch, tainted.bool()[None]))
        else:
            super().hear(tainted, microbatch)

    def excluded(self, microbatch: int | None = None) -> list[bool]:
        """Return the ranks that are left out; waits for the device."""
        self.flush()
        return super().excluded(microbatch)

    def recover(self, step: int, passes: int, last: Recovery) -> Recovery | None:
        """Ask the defense what becomes of this pass; waits for the device."""
        if self._recovers:
            self.flush()
        return super().recover(step, passes, last)

    def end_step(self, step: int) -> list[Ban]:
        """Close a step."""
        self.flush()
        self._masks.clear()
        return super().end_step(step)

    def _tell(
        self,
        seen: _Seen,
        flagged: list[bool],
        severe: list[bool],
        tested: list[bool],
        intact: list[bool],
        tainted: list[bool],
        usable: list[bool],
    ) -> None:
        if not all(usable):
            self._refuse_reference()
        ruling = self._ruled(
            seen.stage, seen.direction, seen.step, seen.tampered, flagged, severe, tested,
            seen.verdict, seen.microbatch,
        )  # fmt: skip
        if any(seen.missing):
            self._suspects.add(seen.stage)
        now = self._now(tainted, ruling, tested, intact, seen.missing)
        self._taint(seen.stage, seen.direction, now, seen.microbatch)

    def _passed(
        self,
        direction: Direction,
        x: Tensor,
        tainted: Tensor,
        missing: list[bool],
        microbatch: int,
    ) -> tuple[Tensor, Tensor]:
        """Return what is passed on where no defense looks, and the tainted ranks."""
        if any(missing):
            tainted = tainted.masked_fill(row_mask(missing, tainted), 1.0)
            self.hear(tainted, microbatch)
        lost = [self.ledger.lost(r) for r in range(len(missing))]
        if direction == "gradient":
            x = _kept(x, ~tainted.bool())
        return (_kept(x, ~row_mask(lost, x)) if any(lost) else x), tainted

    def _testable(self, stage: int, x: Tensor) -> Tensor:
        if stage not in self._masks:
            nobody = [False] * self.ledger.replicas
            self._masks[stage] = row_mask(self._tested(stage, nobody), x)
        return self._masks[stage]

    def _replaced(self, x: Tensor, now: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """Replace the gradients of lost and tainted ranks; tell whether the reference would do."""
        lost = [self.ledger.lost(r) for r in range(len(now))]
        if any(lost):
            x = _kept(x, ~row_mask(lost, x))
        if self.substitutes_zeros or reference is None:
            return _kept(x, ~now), torch.ones_like(now)
        usable = reference.isfinite().all() | ~now.any()
        return torch.where(now.view(-1, 1, 1, 1), reference.to(x), x), usable.expand(len(now))


def _kept(x: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of `x` `[replicas, ...]` in which other rows are zeros."""
    return x.masked_fill(~rows.view(-1, 1, 1, 1), 0.0)
