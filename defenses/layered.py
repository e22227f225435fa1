"""Layered: several detectors look at each signal, and one ledger counts what any of them flags."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return Component.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


Named = Annotated[
    Component, BeforeValidator(_read), PlainSerializer(lambda c: c.label(), return_type=str)
]
"""A detector as `name`, "name:key=value" or `{name: ..., params: {...}}`."""


class LayeredParams(ResponseParams):
    """Parameters of `layered`. Its response counts for all detectors; theirs cannot be set."""

    detectors: tuple[Named, ...] = Field(
        (Component(name="coherence"), Component(name="surrogate")),
        min_length=1,
        description='detectors: name, or name:key=value in quotes; e.g. [sentinel, "audit:q=.1"]',
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        from sentinel_bench import registry

        for detector in self.detectors:
            if registry.defenses.get(detector.name).passive:
                raise ValueError(f"{detector.name} looks at no signal: it is no detector")
            own = sorted(ResponseParams.model_fields.keys() & detector.params.keys())
            if own:
                raise ValueError(
                    f"{detector.name}: {', '.join(own)} cannot be set here; there is one ledger, "
                    "whose settings are those of layered itself"
                )
        return self


class Layered(Defense[LayeredParams]):
    """Flags what any of its detectors flags; severe is what any of them finds severe.

    A tainted gradient is replaced by the first reference that one of them offers. The names of
    the statistics begin with that of the detector.
    """

    name = "layered"
    goal = "let detectors with different blind spots watch together, and punish once"
    formula = "flagged = any of the detectors flags"
    source = "ours"
    Params = LayeredParams
    needs_received = True

    def __init__(self, params: LayeredParams) -> None:
        super().__init__(params)
        from sentinel_bench import registry

        response = {key: getattr(params, key) for key in ResponseParams.model_fields}
        self.detectors: dict[str, Defense[Any]] = {}
        for given in params.detectors:
            component = Component(name=given.name, params=given.params | response)
            self.detectors[self._unused(given.name)] = registry.defenses.create(component)

    @classmethod
    def wraps(cls, params: LayeredParams) -> Sequence[Component]:
        """Return the detectors."""
        return params.detectors

    def start(self, setup: Setup) -> None:
        """Start each detector."""
        for detector in self.detectors.values():
            detector.start(setup)

    def check(self, signals: Signals) -> Verdict:
        """Let each detector judge."""
        return _merge({n: d.check(_shown(d, signals)) for n, d in self.detectors.items()})

    def preview(self, signals: Signals) -> Verdict | None:
        """Say what those detectors would say that offer it; None if none of them does."""
        offered = {n: d.preview(_shown(d, signals)) for n, d in self.detectors.items()}
        known = {name: verdict for name, verdict in offered.items() if verdict is not None}
        return _merge(known) if known else None

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Let each detector learn from what all of them, and the ledger, found clean."""
        for detector in self.detectors.values():
            detector.learn(_shown(detector, signals), clean)

    def end_step(self, step: int) -> None:
        """Close the step of each detector."""
        for detector in self.detectors.values():
            detector.end_step(step)

    def state_bytes(self) -> int:
        """Return the bytes that all of them keep."""
        return sum(detector.state_bytes() for detector in self.detectors.values())

    def _unused(self, name: str) -> str:
        """Return `name`, or `name-2` and so on if there are several of them."""
        count = 1 + sum(known.rpartition("-")[0] == name for known in self.detectors)
        return f"{name}-{count + 1}" if name in self.detectors else name


class _Merged(Mapping[str, "tuple[Tensor, float, float]"]):
    """Statistics of several verdicts as `detector.statistic`, read only when they are asked for."""

    def __init__(self, verdicts: Mapping[str, Verdict]) -> None:
        self._verdicts = verdicts

    def __getitem__(self, key: str) -> tuple[Tensor, float, float]:
        name, _, statistic = key.partition(".")
        return self._verdicts[name].statistics[statistic]

    def __iter__(self) -> Iterator[str]:
        for name, verdict in self._verdicts.items():
            yield from (f"{name}.{statistic}" for statistic in verdict.statistics)

    def __len__(self) -> int:
        return sum(len(verdict.statistics) for verdict in self._verdicts.values())


def _merge(verdicts: Mapping[str, Verdict]) -> Verdict:
    """Return the union of the flags, and all that the verdicts say."""
    flagged = reduce(operator.or_, (v.flagged for v in verdicts.values()))
    severe = reduce(operator.or_, (v.severe for v in verdicts.values()))
    references = (v.reference for v in verdicts.values() if v.reference is not None)
    return Verdict(flagged, severe, next(references, None), _Merged(verdicts))


def _shown(detector: Defense[Any], signals: Signals) -> Signals:
    """Return what a detector is given: as alone, `received` only if it asks for it."""
    return signals if detector.needs_received else replace(signals, received=None)
