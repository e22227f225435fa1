"""Layered: the union of its detectors' flags, one ledger, and what may be written for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.layered import Layered
from sentinel_bench.errors import ConfigError

SHAPE = (2, 3, 4)


class Spy(Defense[ResponseParams]):
    """Flags replicas that send its number, and writes down what it was given."""

    goal = formula = source = "test"
    number = 0.0
    severe = False
    offers = True

    def __init__(self, params: ResponseParams) -> None:
        super().__init__(params)
        self.calls: list[tuple[Any, ...]] = []

    def start(self, setup: Setup) -> None:
        self.calls.append(("start", setup))

    def check(self, signals: Signals) -> Verdict:
        self.calls.append(("check", signals))
        found = signals.sent.flatten(1)[:, 0] == self.number
        reference = torch.full(SHAPE, self.number) if self.number else None
        statistics = {"value": (signals.sent.flatten(1)[:, 0], -self.number, self.number)}
        return Verdict(found, found & self.severe, reference, statistics)

    def preview(self, signals: Signals) -> Verdict | None:
        return self.check(signals) if self.offers else None

    def learn(self, signals: Signals, clean: Tensor) -> None:
        self.calls.append(("learn", signals, clean))

    def end_step(self, step: int) -> None:
        self.calls.append(("end", step))

    def state_bytes(self) -> int:
        return int(self.number)


class Zeros(Spy):
    """Flags 0, and offers no reference."""

    name = "spy-zeros"


class Ones(Spy):
    """Flags 1, and looks at what was received."""

    name = "spy-ones"
    number = 1.0
    needs_received = True


class Twos(Spy):
    """Flags 2, at once."""

    name = "spy-twos"
    number = 2.0
    severe = True
    offers = False


@pytest.fixture(autouse=True)
def _spies(plug: Callable[..., None]) -> None:
    plug(Zeros, Ones, Twos)


def layered(*detectors: Any, **params: Any) -> Layered:
    defense = registry.defenses.create(
        Component(name="layered", params={"detectors": [*detectors], **params})
    )
    assert isinstance(defense, Layered)
    return defense


def three(**params: Any) -> Layered:
    return layered("spy-zeros", "spy-ones", "spy-twos", **params)


def signals() -> Signals:
    sent = torch.arange(4.0).view(4, 1, 1, 1).expand(4, *SHAPE)
    return Signals(1, "gradient", 7, sent, sent + 1, torch.ones(4, dtype=torch.bool))


def test_what_any_detector_flags_is_flagged_and_severe_if_any_says_so() -> None:
    verdict = three().check(signals())
    assert verdict.flagged.tolist() == [True, True, True, False]
    assert verdict.severe.tolist() == [False, False, True, False]


def test_the_first_reference_that_is_offered_counts() -> None:
    reference = three().check(signals()).reference
    assert reference is not None
    assert torch.equal(reference, torch.ones(SHAPE))
    assert layered("spy-zeros").check(signals()).reference is None


def test_statistics_carry_the_name_of_their_detector() -> None:
    found = three().check(signals()).statistics
    assert list(found) == ["spy-zeros.value", "spy-ones.value", "spy-twos.value"]
    assert len(found) == 3
    values, low, high = found["spy-twos.value"]
    assert (values.tolist(), low, high) == ([0, 1, 2, 3], -2, 2)
    assert "spy-threes.value" not in found
    assert "spy-twos.other" not in found


def test_detectors_of_one_name_are_told_apart() -> None:
    defense = layered("coherence", "spy-ones", "coherence:window=20", "coherence:window=30")
    assert list(defense.panel.detectors) == ["coherence", "spy-ones", "coherence-2", "coherence-3"]
    windows = [d.params.window for n, d in defense.panel.detectors.items() if n != "spy-ones"]
    assert windows == [50, 20, 30]


def test_all_detectors_live_through_every_step() -> None:
    defense, given = three(), signals()
    setup, clean = Setup(3, 4, SHAPE), torch.tensor([True, False, True, False])
    defense.start(setup)
    defense.check(given)
    defense.learn(given, clean)
    defense.end_step(7)
    for detector in defense.panel.detectors.values():
        assert isinstance(detector, Spy)
        assert [call[0] for call in detector.calls] == ["start", "check", "learn", "end"]
        assert detector.calls[0][1] is setup
        assert detector.calls[2][2] is clean
        assert detector.calls[3][1] == 7
    assert defense.state_bytes() == 3


def test_only_those_see_what_was_received_that_would_see_it_alone() -> None:
    defense, given = three(), signals()
    defense.check(given)
    defense.learn(given, given.active)
    for name, sees in (("spy-zeros", False), ("spy-ones", True), ("spy-twos", False)):
        spy = defense.panel.detectors[name]
        assert isinstance(spy, Spy)
        for call in spy.calls:
            assert (call[1].received is not None) == sees
            assert call[1].sent is given.sent


def test_a_preview_is_what_those_say_that_offer_one() -> None:
    preview = three().preview(signals())
    assert preview is not None
    assert preview.flagged.tolist() == [True, True, False, False]
    assert list(preview.statistics) == ["spy-zeros.value", "spy-ones.value"]
    assert layered("spy-twos").preview(signals()) is None


def test_the_response_is_that_of_layered_for_all() -> None:
    defense = three(severity=7.0, quarantine=True)
    for detector in defense.panel.detectors.values():
        assert detector.params.severity == 7.0
        assert detector.params.quarantine


@pytest.mark.parametrize(
    "detectors, message",
    [
        (["spy-zeros:violations=3"], "spy-zeros: violations cannot be set here; there is one led"),
        (["coherence:severity=3,quarantine=true"], "coherence: quarantine, severity cannot"),
        (["coherense"], "unknown defense 'coherense'; did you mean coherence"),
        (["coherence:windov=3"], "defense coherence: unknown key 'windov'; did you mean window"),
        (["coherence:window=0"], "defense coherence: window: .*0"),
        (["coherence:window"], "'window' is not key=value"),
        (["none"], "none looks at no signal: it is no detector"),
        ([], "detectors: .*at least 1"),
        ([{"name": "layered", "params": {"detectors": ["qqqq"]}}], "unknown defense 'qqqq'"),
    ],
)
def test_what_is_wrong_with_a_detector_is_said_before_the_run(
    detectors: list[Any], message: str
) -> None:
    component = Component(name="layered", params={"detectors": detectors})
    with pytest.raises(ConfigError, match=message):
        registry.defenses.params(component)


def test_a_mapping_and_a_text_say_the_same() -> None:
    text = Component.parse('layered:detectors=[sentinel, "coherence:window=20,floor.ratio=0.1"]')
    mapping = Component(
        name="layered",
        params={
            "detectors": [
                {"name": "sentinel"},
                {"name": "coherence", "params": {"window": 20, "floor": {"ratio": 0.1}}},
            ]
        },
    )
    assert registry.defenses.params(text) == registry.defenses.params(mapping)
    again = Component.parse(text.label())
    assert registry.defenses.params(again) == registry.defenses.params(text)


def test_the_detectors_belong_to_the_identity_of_a_run() -> None:
    def identity(text: str) -> Any:
        return registry.defenses.identity(Component.parse(text))

    found = identity("layered:detectors=[coherence, surrogate]")
    assert [inner["name"] for inner in found["wraps"]] == ["coherence", "surrogate"]
    assert found == identity("layered")
    assert found != identity("layered:detectors=[surrogate, coherence]")
    assert found != identity('layered:detectors=["coherence:window=20", surrogate]')


def test_layers_can_be_nested() -> None:
    inner = {"name": "layered", "params": {"detectors": ["spy-ones", "spy-twos"]}}
    defense = layered("spy-zeros", inner, severity=9.0)
    verdict = defense.check(signals())
    assert verdict.flagged.tolist() == [True, True, True, False]
    assert "layered.spy-twos.value" in verdict.statistics
    deep = defense.panel.detectors["layered"]
    assert isinstance(deep, Layered)
    assert deep.panel.detectors["spy-twos"].params.severity == 9.0


def test_coherence_and_surrogate_watch_by_default() -> None:
    assert list(registry.defenses.create(Component(name="layered")).panel.detectors) == [  # type: ignore[attr-defined]
        "coherence",
        "surrogate",
    ]
