"""Layered: several detectors look at each signal, and one ledger counts what any of them flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Updates, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.panel import Detector, Panel

if TYPE_CHECKING:
    from torch import Tensor


class LayeredParams(ResponseParams):
    """Parameters of `layered`. Its response counts for all detectors; theirs cannot be set."""

    detectors: tuple[Detector, ...] = Field(
        (Component(name="coherence"), Component(name="surrogate")),
        min_length=1,
        description='detectors: name, or name:key=value in quotes; e.g. [sentinel, "audit:q=.1"]',
    )


class Layered(Defense[LayeredParams]):
    """Flags what any of its detectors flags; severe is what any of them finds severe.

    A tainted gradient is replaced by the first reference that one of them offers. The names of
    the statistics begin with that of the detector.
    """

    name = "layered"
    goal = "let detectors with different blind spots watch together, and punish once"
    formula = "flagged = any of the detectors flags"
    source = "ours"
    blind_to: ClassVar[str] = (
        "what all of its detectors are blind to (with the default: lies that follow a linear model"
        " of the stage, like `mirror-surrogate`, and those that stay inside of all fences); and the"
        " false alarms of its detectors add up"
    )
    Params = LayeredParams

    def __init__(self, params: LayeredParams) -> None:
        super().__init__(params)
        self.panel = Panel(params.detectors, params)
        self.needs_received = self.panel.any("needs_received")
        self.needs_again = self.panel.any("needs_again")
        self.needs_updates = self.panel.any("needs_updates")
        self.across_stages = self.panel.any("across_stages")
        self.whole_batch = self.panel.any("whole_batch")

    @classmethod
    def wraps(cls, params: LayeredParams) -> Sequence[Component]:
        """Return the detectors."""
        return params.detectors

    def start(self, setup: Setup) -> None:
        """Start each detector."""
        self.panel.start(setup)

    def check(self, signals: Signals) -> Verdict:
        """Let each detector judge."""
        return self.panel.check(signals)

    def preview(self, signals: Signals) -> Verdict | None:
        """Say what those detectors would say that offer it; None if none of them does."""
        return self.panel.preview(signals)

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Let each detector learn from what all of them, and the ledger, found clean."""
        self.panel.learn(signals, clean)

    def check_updates(self, updates: Updates) -> Verdict:
        """Let each detector judge that looks at updates."""
        return self.panel.check_updates(updates)

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        """Let each detector learn that looks at updates."""
        self.panel.learn_updates(updates, clean)

    def end_step(self, step: int) -> None:
        """Close the step of each detector."""
        self.panel.end_step(step)

    def state_bytes(self) -> int:
        """Return the bytes that all of them keep."""
        return self.panel.state_bytes()
