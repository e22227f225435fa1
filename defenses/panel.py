"""Detectors that watch together: what `layered` and `cascade` have in common."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, count
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Updates, Verdict
from sentinel_bench.config import Component, Named

if TYPE_CHECKING:
    from torch import Tensor


def _usable(detector: Component) -> Component:
    from sentinel_bench import registry

    if registry.defenses.get(detector.name).passive:
        raise ValueError(f"{detector.name} looks at no signal: it is no detector")
    if registry.defenses.get(detector.name).redundancy is not Defense.redundancy:
        raise ValueError(f"{detector.name} keeps copies of stages: it works only by itself")
    own = sorted(ResponseParams.model_fields.keys() & detector.params.keys())
    if own:
        raise ValueError(
            f"{detector.name}: {', '.join(own)} cannot be set here; there is one ledger, whose "
            "settings are those of the defense that it is a part of"
        )
    return detector


Detector = Annotated[Named, AfterValidator(_usable)]
"""A detector by name, with parameters."""


class Panel:
    """Several detectors; who uses them decides what their flags mean.

    Args:
        given: what they are.
        response: the settings of the one ledger.
    """

    def __init__(self, given: Sequence[Component], response: ResponseParams) -> None:
        from sentinel_bench import registry

        common = {key: getattr(response, key) for key in ResponseParams.model_fields}
        self.detectors: dict[str, Defense[Any]] = {}
        for one in given:
            known = registry.defenses.get(one.name).Params.model_fields
            shared = {k: v for k, v in common.items() if k in known}
            component = Component(name=one.name, params=one.params | shared)
            self.detectors[self._unused(one.name)] = registry.defenses.create(component)

    def any(self, need: str) -> bool:
        """Tell whether any of them has the attribute `need`, like `needs_again`."""
        return any(getattr(detector, need) for detector in self.detectors.values())

    def start(self, setup: Setup) -> None:
        """Start each detector."""
        for detector in self.detectors.values():
            detector.start(setup)

    def check(self, signals: Signals) -> Verdict:
        """Let each detector judge."""
        return _merge(
            {n: d.check(_shown(d, signals)) for n, d in self.detectors.items()}, signals.active
        )

    def preview(self, signals: Signals) -> Verdict | None:
        """Say what those detectors would say that offer it; None if none of them does."""
        offered = {n: d.preview(_shown(d, signals)) for n, d in self.detectors.items()}
        known = {name: verdict for name, verdict in offered.items() if verdict is not None}
        return _merge(known, signals.active) if known else None

    def learn(self, signals: Signals, clean: Tensor) -> None:
        """Let each detector learn from what was found clean."""
        for detector in self.detectors.values():
            detector.learn(_shown(detector, signals), clean)

    def check_updates(self, updates: Updates) -> Verdict:
        """Let each detector judge that looks at updates."""
        return _merge(
            {name: detector.check_updates(updates) for name, detector in self._weighing()},
            updates.active,
        )

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        """Let each detector learn that looks at updates."""
        for _, detector in self._weighing():
            detector.learn_updates(updates, clean)

    def end_step(self, step: int) -> None:
        """Close the step of each detector."""
        for detector in self.detectors.values():
            detector.end_step(step)

    def state_bytes(self) -> int:
        """Return the bytes that all of them keep."""
        return sum(detector.state_bytes() for detector in self.detectors.values())

    def _weighing(self) -> Iterable[tuple[str, Defense[Any]]]:
        return [(n, d) for n, d in self.detectors.items() if d.needs_updates]

    def _unused(self, name: str) -> str:
        """Return `name`, or `name-2` and so on if there are several of them."""
        names = chain([name], (f"{name}-{n}" for n in count(2)))
        return next(n for n in names if n not in self.detectors)


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


def _merge(verdicts: Mapping[str, Verdict], active: Tensor) -> Verdict:
    """Return the union of the flags, and all that the verdicts say."""
    nobody = active.new_zeros(active.shape)
    flagged = reduce(operator.or_, (v.flagged for v in verdicts.values()), nobody)
    severe = reduce(operator.or_, (v.severe for v in verdicts.values()), nobody)
    references = (v.reference for v in verdicts.values() if v.reference is not None)
    return Verdict(flagged, severe, next(references, None), _Merged(verdicts))


def _shown(detector: Defense[Any], signals: Signals) -> Signals:
    """Return what a detector is given: as alone, what it asks for and no more."""
    return replace(
        signals,
        received=signals.received if detector.needs_received else None,
        again=signals.again if detector.needs_again else None,
    )
