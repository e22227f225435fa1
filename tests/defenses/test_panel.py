"""Panel: several detectors, each given what it would be given alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hand_in import scales
from torch import Tensor
from work_again import SHAPE, desk, flagged

from sentinel_bench import registry
from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Updates, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.panel import Panel

SEEN: list[tuple[str, str, Any]] = []


class Plain(Defense[ResponseParams]):
    """Flags its number, of signals and of updates, and notes what it is given."""

    name: ClassVar[str] = "plain"
    goal = formula = source = "test"
    number: ClassVar[int] = 0

    def check(self, signals: Signals) -> Verdict:
        SEEN.append((self.name, "check", signals))
        return self._verdict(len(signals.sent))

    def preview(self, signals: Signals) -> Verdict | None:
        SEEN.append((self.name, "preview", signals))
        return self._verdict(len(signals.sent))

    def learn(self, signals: Signals, clean: Tensor) -> None:
        SEEN.append((self.name, "learn", signals))

    def check_updates(self, updates: Updates) -> Verdict:
        SEEN.append((self.name, "check_updates", updates))
        return self._verdict(len(updates.active))

    def learn_updates(self, updates: Updates, clean: Tensor) -> None:
        SEEN.append((self.name, "learn_updates", clean))

    def _verdict(self, n: int) -> Verdict:
        found = torch.arange(n) == self.number
        return Verdict(found, ~found, None, {"found": (found.double(), -0.5, 0.5)})

    def state_bytes(self) -> int:
        return 10**self.number


class Reads(Plain):
    name = "reads"
    number = 1
    needs_received = True


class Redoes(Plain):
    name = "redoes"
    number = 2
    needs_again = True


class Weighs(Plain):
    name = "weighs"
    number = 3
    needs_updates = True


class Weighs2(Plain):
    """Has a name that looks like that of a second one of another kind."""

    name = "weighs-2"
    needs_updates = True


class Plain3(Plain):
    name = "plain-3"


@pytest.fixture(autouse=True)
def _detectors(plug: Callable[..., None]) -> None:
    plug(Plain, Reads, Redoes, Weighs, Weighs2, Plain3)
    SEEN.clear()


def panel(*names: str, **response: Any) -> Panel:
    return Panel([Component.parse(n) for n in names], ResponseParams(**response))


def seen(method: str) -> list[tuple[str, Any]]:
    return [(name, what) for name, called, what in SEEN if called == method]


def test_each_is_given_what_it_asks_for_and_nothing_that_another_asks_for() -> None:
    d = desk(4)
    signals = Signals(1, "activation", 0, d.sent, d.honest, torch.ones(4, dtype=torch.bool), d)
    both = panel("plain", "reads", "redoes", "weighs")
    both.check(signals)
    both.preview(signals)
    both.learn(signals, signals.active)
    for method in ("check", "preview", "learn"):
        for name, given in seen(method):
            assert (given.received is d.honest) == (name == "reads")
            assert (given.again is d) == (name == "redoes")
            assert given.sent is d.sent and given.active is signals.active


def test_a_need_is_there_if_one_has_it() -> None:
    for name, need in (
        *(("reads", "needs_received"), ("redoes", "needs_again"), ("weighs", "needs_updates")),
    ):
        assert panel("plain", name).any(need)
        assert not panel("plain").any(need)
        assert not panel().any(need)


def test_updates_are_shown_to_those_that_look_at_them_and_their_flags_add_up() -> None:
    four = panel("plain", "weighs", "reads", "weighs-2")
    s = scales(4)
    verdict = four.check_updates(s.updates())
    assert flagged(verdict) == [0, 3]
    assert verdict.severe.tolist() == [True] * 4  # what each says severe counts
    assert list(verdict.statistics) == ["weighs.found", "weighs-2.found"]
    assert [name for name, _ in seen("check_updates")] == ["weighs", "weighs-2"]
    clean = torch.tensor([True, False, True, True])
    four.learn_updates(s.updates(), clean)
    assert [(name, c is clean) for name, c in seen("learn_updates")] == [
        *(("weighs", True), ("weighs-2", True))
    ]
    assert flagged(panel("plain").check_updates(s.updates())) == []
    assert s.calls == []


def test_a_panel_of_nobody_flags_nobody() -> None:
    empty, d = panel(), desk(3)
    empty.start(Setup(3, 3, SHAPE))
    verdict = empty.check(d.signals())
    assert (flagged(verdict), verdict.severe.any().item(), verdict.reference) == ([], False, None)
    assert dict(verdict.statistics) == {}
    assert empty.preview(d.signals()) is None
    assert empty.state_bytes() == 0
    empty.learn(d.signals(), verdict.flagged)
    empty.end_step(0)


def test_all_state_is_counted() -> None:
    assert panel("plain", "reads", "redoes").state_bytes() == 111


@pytest.mark.parametrize(
    "names, known",
    [
        (["plain"] * 3, ["plain", "plain-2", "plain-3"]),
        (["plain-3", *["plain"] * 3], ["plain-3", "plain", "plain-2", "plain-4"]),
        (["plain", "plain", "plain-3", "plain"], ["plain", "plain-2", "plain-3", "plain-4"]),
        (["weighs", "weighs", "weighs-2"], ["weighs", "weighs-2", "weighs-2-2"]),
    ],
)
def test_no_two_have_the_same_name(names: Sequence[str], known: list[str]) -> None:
    many = panel(*names)
    assert list(many.detectors) == known
    verdict = many.check(desk(4).signals())
    assert list(verdict.statistics) == [f"{n}.found" for n in known]


def test_statistics_are_read_when_they_are_asked_for() -> None:
    class Costly(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise AssertionError("nobody asked")

    class Lazy(Plain):
        def check(self, signals: Signals) -> Verdict:
            found = super().check(signals)
            return Verdict(found.flagged, found.severe, None, Costly(found=1))

    two = panel("reads")
    two.detectors["lazy"] = Lazy(ResponseParams())
    statistics = two.check(desk(4).signals()).statistics
    assert list(statistics) == ["reads.found", "lazy.found"]
    assert statistics["reads.found"][0].tolist() == [0, 1, 0, 0]
    with pytest.raises(AssertionError, match="nobody asked"):
        statistics["lazy.found"]


def test_one_response_counts_for_all_and_the_rest_is_their_own() -> None:
    common = {"severity": 9.0, "amnesty": True, "on_ban": "drop", "violations": 2}
    both = panel("audit:q=.5", "sentinel", "plain", **common)
    for detector in both.detectors.values():
        assert {key: getattr(detector.params, key) for key in common} == common
    audit = both.detectors["audit"].params
    assert (audit.q, audit.proof) == (0.5, True)
    alone = registry.defenses.create(Component.parse("audit")).params
    assert alone.amnesty is False  # unless another ledger decides
