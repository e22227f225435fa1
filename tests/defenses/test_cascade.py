"""Cascade: screens say what is worth recomputing, and nobody is flagged without a proof."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from hand_in import Scales, scales
from torch import Tensor
from work_again import SHAPE, Desk, desk, flagged, rows, truth

from sentinel_bench import registry
from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Updates, Verdict
from sentinel_bench.config import Component
from sentinel_bench.defenses.cascade import Cascade
from sentinel_bench.errors import ConfigError
from sentinel_bench.ledger import Ledger

TINY = (1, 1, 2)
CALLS: list[tuple[Any, ...]] = []
"""What the screens were asked and told: name, method, and what with."""


class Screen(Defense[ResponseParams]):
    """Flags the same replicas all the time, severely, and notes what it is told."""

    goal = formula = source = "test"
    flags: ClassVar[Callable[[int], bool]]

    def check(self, signals: Signals) -> Verdict:
        CALLS.append((self.name, "check", signals))
        return self._verdict(signals)

    def preview(self, signals: Signals) -> Verdict | None:
        CALLS.append((self.name, "preview", signals))
        return self._verdict(signals)

    def learn(self, signals: Signals, clean: Tensor) -> None:
        CALLS.append((self.name, "learn", signals, clean))

    def end_step(self, step: int) -> None:
        CALLS.append((self.name, "end", step))

    def _verdict(self, signals: Signals) -> Verdict:
        found = torch.tensor([type(self).flags(r) for r in range(len(signals.sent))])
        reference = signals.sent[0] * 0 + 9
        return Verdict(found, found, reference, {"odd": (found.double(), -0.5, 0.5)})


class Everybody(Screen):
    name = "everybody"
    flags = staticmethod(lambda r: True)


class Nobody(Screen):
    name = "nobody"
    flags = staticmethod(lambda r: False)


class Odd(Screen):
    name = "odd"
    flags = staticmethod(lambda r: r % 2 == 1)


@pytest.fixture(autouse=True)
def _screens(plug: Callable[..., None]) -> Iterator[None]:
    plug(Everybody, Nobody, Odd)
    CALLS.clear()
    yield
    CALLS.clear()


def started(text: str, replicas: int = 4, seed: int = 0, shape: Any = SHAPE) -> Cascade:
    defense = registry.defenses.create(Component.parse(text))
    assert isinstance(defense, Cascade)
    defense.start(Setup(3, replicas, shape, seed=seed))
    return defense


def calls(method: str) -> list[tuple[Any, ...]]:
    return [call for call in CALLS if call[1] == method]


# --- flags are proofs -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [[], [1], [0, 2, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("direction", ["activation", "gradient"])
def test_a_screen_that_flags_everybody_bans_all_who_lie_and_nobody_else(
    wrong: list[int], direction: str
) -> None:
    defense = started("cascade:screens=[everybody],screened=1,q=0")
    ledger = Ledger(defense.params, 3, 4)
    verdict = defense.check(desk(4, wrong).signals(direction=direction))
    assert flagged(verdict) == rows(verdict.severe) == wrong
    ledger.judge(1, verdict.flagged.tolist(), verdict.severe.tolist(), [True] * 4)
    assert [(b.stage, b.replica, b.reason) for b in ledger.end_step()] == [
        (1, r, "severe") for r in wrong
    ]


def test_only_what_a_screen_flags_is_recomputed() -> None:
    d, defense = desk(5, [1, 2]), started("cascade:screens=[odd,nobody],screened=1,q=0", 5)
    verdict = defense.check(d.signals())
    assert d.recomputed == [[1, 3]]
    assert flagged(verdict) == [1]  # the other lies where nobody looks
    assert d.asked == []


def test_who_is_not_active_is_not_recomputed_whatever_a_screen_says() -> None:
    d, defense = desk(4, [1, 3]), started("cascade:screens=[everybody],screened=1,q=0")
    assert flagged(defense.check(d.signals([True, False, True, True]))) == [3]
    assert d.recomputed == [[0, 2, 3]]


def test_where_no_screen_flags_and_nobody_is_drawn_nothing_is_recomputed() -> None:
    d, s = desk(4, [1]), scales(4, [2])
    for text in ("cascade:screens=[nobody],screened=1,q=0", "cascade:screens=[],q=0"):
        defense = started(text)
        for step in range(50):
            assert flagged(defense.check(d.signals(step=step))) == []
            assert flagged(defense.check_updates(s.updates(step=step))) == []
            defense.end_step(step)
    assert (d.recomputed, d.asked, s.calls) == ([], [], [])


def test_a_proof_is_told_with_what_the_screens_said() -> None:
    defense = started("cascade:screens=[odd],screened=1,q=0")
    verdict = defense.check(desk(4, [1]).signals())
    assert list(verdict.statistics) == ["odd.odd", "mismatch"]
    values, low, high = verdict.statistics["mismatch"]
    assert values.tolist() == pytest.approx([0, 0.5, 0, 0])
    assert (low, high) == (-1e-4, 1e-4)


def test_a_proven_gradient_is_replaced_by_the_mean_of_the_others_not_by_what_a_screen_offers() -> (
    None
):
    d, defense = desk(4, [1]), started("cascade:screens=[everybody],screened=1,q=0")
    active = [True, True, False, True]
    verdict = defense.check(d.signals(active, direction="gradient"))
    assert verdict.reference is not None
    torch.testing.assert_close(verdict.reference, d.honest[[0, 3]].mean(0))
    assert defense.check(desk(4).signals(direction="gradient")).reference is None
    assert defense.check(desk(4, [1]).signals()).reference is None


def test_without_the_means_to_recompute_the_screens_decide() -> None:
    d, defense = desk(4), started("cascade:screens=[odd],screened=0")
    signals = Signals(1, "activation", 0, d.sent, None, torch.ones(4, dtype=torch.bool))
    assert flagged(defense.check(signals)) == [1, 3]


# --- what is drawn --------------------------------------------------------------------------------


def stepped(defense: Cascade, d: Desk, s: Scales, step: int = 0) -> Verdict:
    """Let all that a worker sends in one step be looked at, and return the last verdict."""
    for direction in ("activation", "gradient"):
        signals = d.signals(step=step, direction=direction)
        defense.learn(signals, signals.active & ~defense.check(signals).flagged)
    verdict = defense.check_updates(s.updates(step=step))
    defense.end_step(step)
    return verdict


def both(d: Desk) -> dict[str, Tensor]:
    return {"activation": d.honest, "gradient": d.honest}


@pytest.mark.parametrize("lie", ["signal", "update", "neither"])
def test_at_q_1_all_work_of_all_is_done_again_and_every_lie_is_found(lie: str) -> None:
    d = desk(4, [2] if lie == "signal" else [])
    s = scales(4, [2] if lie == "update" else [], signals=both(d))
    verdict = stepped(started("cascade:screens=[],q=1"), d, s)
    assert flagged(verdict) == rows(verdict.severe) == ([] if lie == "neither" else [2])
    assert s.asked("redo") == [[0, 1, 2, 3]]
    assert d.recomputed == []
    assert s.asked("sent") == s.asked("recompute") == ([[0, 1, 2, 3]] if lie == "update" else [])
    names = {f"{p} mismatch" for p in both(d)}
    assert set(verdict.statistics) == names | ({"update mismatch"} if lie == "update" else set())


@pytest.mark.parametrize("direction", ["activation", "gradient"])
def test_at_the_ends_what_is_sent_in_one_direction_alone_is_compared(direction: str) -> None:
    d, defense = desk(3, [0]), started("cascade:screens=[],q=1", 3)
    defense.check(d.signals(stage=2, direction=direction))
    s = scales(3, signals={direction: d.honest})
    assert flagged(defense.check_updates(s.updates(stage=2))) == [0]
    assert flagged(defense.check_updates(s.updates(stage=1))) == []  # nothing was sent there


def test_nothing_of_a_step_is_compared_with_the_next() -> None:
    defense = started("cascade:screens=[],q=1")
    old, new = desk(4), desk(4, seed=1)
    assert flagged(stepped(defense, old, scales(4, signals=both(old)))) == []
    s = scales(4, signals=both(new))
    assert flagged(defense.check_updates(s.updates(step=1))) == []  # no signal in this step
    defense.end_step(1)
    assert flagged(stepped(defense, new, s, 2)) == []


def test_most_of_a_stage_lying_at_once_are_all_found() -> None:
    d = desk(5, [0, 1, 2, 4])
    s = scales(5, [3], signals=both(d))
    verdict = stepped(started("cascade:screens=[],q=1", 5), d, s)
    assert flagged(verdict) == [0, 1, 2, 3, 4]
    policy = started("cascade").params
    assert policy.amnesty is False
    ledger = Ledger(policy, 3, 5)
    ruling = ledger.judge(1, verdict.flagged.tolist(), verdict.severe.tolist(), [True] * 5)
    assert (ruling.flagged, ruling.amnesty) == ([True] * 5, 0)


@pytest.mark.parametrize("what", ["cascade:screens=[],screened=1,q={q}", "audit:q={q}"])
@pytest.mark.parametrize("q, n", [(0.03, 30), (0.2, 5)])
def test_who_lies_in_n_steps_is_found_with_probability_1_minus_1_minus_q_to_the_n(
    what: str, q: float, n: int
) -> None:
    runs, s = 1200, scales(3, [1], size=2)
    found = 0
    for seed in range(runs):
        defense = registry.defenses.create(Component.parse(what.format(q=q)))
        defense.start(Setup(3, 3, TINY, seed=seed))
        verdicts = [flagged(defense.check_updates(s.updates(step=step))) for step in range(n)]
        assert all(v in ([], [1]) for v in verdicts)
        found += [1] in verdicts
    expected = 1 - (1 - q) ** n
    assert abs(found / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_a_lie_about_a_signal_is_found_with_the_same_probability() -> None:
    q, n, runs = 0.1, 7, 800
    d = desk(3, [1], shape=TINY)
    s = scales(3, size=2, signals=both(d))
    found = 0
    for seed in range(runs):
        defense = started(f"cascade:screens=[],q={q}", 3, seed, TINY)
        found += any(flagged(stepped(defense, d, s, step)) for step in range(n))
    expected = 1 - (1 - q) ** n
    assert abs(found / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_the_seeds_decide_who_is_drawn() -> None:
    def drawn(text: str, seed: int) -> list[int]:
        s, defense = scales(8), started(text, 8, seed)
        done = []
        for step in range(60):
            defense.check_updates(s.updates(step=step))
            done.append(len(s.asked("redo")))
        assert 0 < done[-1] < 30
        return done

    text = "cascade:screens=[],q=.2"
    assert drawn(text, 1) == drawn(text, 1)
    assert drawn(text, 1) != drawn(text, 2)
    assert drawn(text, 1) != drawn(text + ",seed=1", 1)


@pytest.mark.parametrize("excluded", [[], [1], [1, 3]])
def test_who_is_not_active_is_not_flagged_and_the_others_are_compared_with_their_own(
    excluded: list[int],
) -> None:
    """Who is left out is not in the mean; who is merely tainted is, with what it was given."""
    active = [True, False, True, False]
    for wrong in ([], [0], [1], [0, 2], [3]):
        d = desk(4, wrong)
        s = scales(4, wrong, signals=both(d), excluded=excluded)
        for handed in (s, scales(4, wrong, excluded=excluded)):
            defense = started("cascade:screens=[],q=1")
            for direction in ("activation", "gradient"):
                defense.check(d.signals(active, direction=direction))
            verdict = defense.check_updates(handed.updates(active))
            assert flagged(verdict) == [r for r in wrong if active[r]]
            assert handed.asked("redo") == [[r for r in range(4) if r not in excluded]]


def test_lies_that_cancel_each_other_in_the_mean_do_no_harm_and_pass() -> None:
    s = scales(4)
    s.handed[1] += 1
    s.handed[2] -= 1
    defense = started("cascade:screens=[],q=1")
    assert flagged(defense.check_updates(s.updates())) == []
    s.handed[2] += 0.01
    assert flagged(defense.check_updates(s.updates())) == [1, 2]


def test_a_small_lie_of_one_among_many_is_not_lost_in_their_mean() -> None:
    for n in (2, 8, 40):
        s = scales(n)
        s.handed[1] *= 1 + 3e-4
        defense = started("cascade:screens=[],q=1", n)
        assert flagged(defense.check_updates(s.updates())) == [1]
        s.handed[1] = s.truth[1] * (1 + 3e-5)
        assert flagged(defense.check_updates(s.updates())) == []


# --- screens --------------------------------------------------------------------------------------


def test_screens_look_at_a_share_of_the_boundaries_and_learn_where_they_looked() -> None:
    n, share = 600, 0.3
    d, defense = desk(3, [1], shape=TINY), started(f"cascade:screens=[everybody],screened={share}")
    found = 0
    for step in range(n):
        signals = d.signals(step=step)
        verdict = defense.check(signals)
        found += flagged(verdict) == [1]
        defense.learn(signals, signals.active & ~verdict.flagged)
        defense.end_step(step)
    looked, learned = calls("check"), calls("learn")
    assert len(looked) == len(learned) == found == len(d.recomputed)
    assert abs(found / n - share) < 4 * math.sqrt(share * (1 - share) / n)
    assert [c[2].step for c in looked] == [c[2].step for c in learned]
    assert len(calls("end")) == n


def test_screens_learn_from_all_that_was_not_proven_wrong() -> None:
    """What they flagged themselves, and was right, belongs to what is usual."""
    d, defense = desk(4, [2]), started("cascade:screens=[everybody],screened=1,q=0")
    ledger = Ledger(defense.params, 3, 4)
    signals = d.signals()
    verdict = defense.check(signals)
    ruling = ledger.judge(1, verdict.flagged.tolist(), verdict.severe.tolist(), [True] * 4)
    defense.learn(signals, torch.tensor(ruling.clean))
    ((_, _, shown, clean),) = calls("learn")
    assert clean.tolist() == [True, True, False, True]
    assert shown.sent is signals.sent


def test_a_preview_is_that_of_the_screens_and_tells_nothing_of_what_is_drawn() -> None:
    d = desk(4, [1])
    asked, other = (started("cascade:screens=[odd],screened=.5,q=.3") for _ in range(2))
    s, t = scales(4), scales(4)
    for step in range(20):
        verdict = asked.preview(d.signals(step=step))
        assert verdict is not None
        assert flagged(verdict) == [1, 3]
        assert list(verdict.statistics) == ["odd.odd"]
        for defense, handed in ((asked, s), (other, t)):
            stepped(defense, desk(4), handed, step)
    assert s.calls == t.calls
    assert d.recomputed == []
    assert started("cascade:screens=[]").preview(d.signals()) is None


@pytest.mark.parametrize(
    "screens, message",
    [
        ('["coherence:violations=3"]', "coherence: violations cannot be set here; there is one"),
        ('["sentinel:on_ban=drop"]', "sentinel: on_ban cannot be set here"),
        ('["audit:amnesty=true"]', "audit: amnesty cannot be set here"),
        ("[none]", "none looks at no signal: it is no detector"),
        ("[coherense]", "unknown defense 'coherense'; did you mean coherence"),
        ('["coherence:windov=3"]', "coherence: unknown key 'windov'"),
        ('[{name: cascade, params: {screens: ["odd:bans=false"]}}]', "odd: bans cannot be set"),
    ],
)
def test_what_is_wrong_with_a_screen_is_said_before_the_run(screens: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.defenses.params(Component.parse(f"cascade:screens={screens}"))


def test_the_response_of_cascade_is_that_of_its_screens() -> None:
    inner = "{name: cascade, params: {screens: [{name: layered, params: {detectors: [odd]}}]}}"
    defense = started(f"cascade:screens=[nobody,{inner}],severity=7,on_ban=drop")
    deep = defense.screens.detectors["cascade"]
    assert isinstance(deep, Cascade)
    found: list[Any] = [*defense.screens.detectors.values(), *deep.screens.detectors.values()]
    assert len(found) == 3
    for screen in found:
        p = screen.params
        assert (p.severity, p.on_ban, p.quarantine, p.amnesty) == (7, "drop", True, False)


def test_layered_and_cascade_can_be_screens_and_cascade_a_layer() -> None:
    d = desk(4, [1])
    layers = "{name: layered, params: {detectors: [odd, nobody]}}"
    inner = f"{{name: cascade, params: {{screens: [{layers}], screened: 1, q: 0}}}}"
    verdict = started(f"cascade:screens=[{inner}],screened=1,q=0").check(d.signals())
    assert flagged(verdict) == [1]
    assert "cascade.mismatch" in verdict.statistics
    assert d.recomputed == [[1, 3], [1]]  # the inner one flags what it has proven
    text = f"layered:detectors=[nobody,{inner.replace('q: 0', 'q: 1')}]"
    layered = registry.defenses.create(Component.parse(text))
    layered.start(Setup(3, 4, SHAPE))
    assert layered.needs_updates and layered.needs_again
    assert flagged(layered.check(d.signals())) == [1]
    s = scales(4, [3], signals={})
    assert flagged(layered.check_updates(s.updates())) == [3]
    assert flagged(layered.check_updates(scales(4, [0], equal=True).updates(kind="weights"))) == [0]


def test_the_screens_and_their_parameters_belong_to_the_identity_of_a_run() -> None:
    def identity(text: str) -> Any:
        return registry.defenses.identity(Component.parse(text))

    found = identity("cascade")
    assert [inner["name"] for inner in found["wraps"]] == ["coherence", "surrogate"]
    texts = [
        "cascade:screens=[coherence, surrogate]",
        'cascade:screens=["coherence:mads=5.0"]',
        'cascade:screens=["coherence:mads=6.0"]',
        "cascade:screens=[]",
        "cascade:q=.5",
        "cascade:screened=1",
    ]
    known = [found, *map(identity, texts)]
    assert all(a != b for i, a in enumerate(known) for b in known[:i])


def test_what_it_needs_follows_from_what_it_does() -> None:
    def needs(text: str) -> tuple[bool, bool, bool]:
        defense = registry.defenses.create(Component.parse(text))
        return defense.needs_received, defense.needs_again, defense.needs_updates

    assert needs("cascade:screens=[surrogate]") == (True, True, True)
    assert needs("cascade:screens=[odd],q=0") == (False, True, True)
    assert needs("cascade:screens=[odd],digests=false") == (False, True, True)
    assert needs("cascade:screens=[],q=0,digests=false") == (False, True, False)


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [True, False])
def test_one_replica_alone_is_found_out(lie: bool) -> None:
    wrong = [0] if lie else []
    defense = started("cascade:screens=[everybody],screened=1,q=1", 1)
    d = desk(1, wrong)
    for direction in ("activation", "gradient"):
        assert flagged(defense.check(d.signals(direction=direction))) == wrong
    assert flagged(defense.check_updates(scales(1, wrong).updates())) == wrong
    assert flagged(defense.check_updates(scales(1, wrong).updates(kind="weights"))) == wrong


def test_where_all_are_banned_nothing_is_looked_at() -> None:
    defense = started("cascade:screens=[everybody],screened=1,q=1")
    nobody = [False] * 4
    d, s = desk(4, [1]), scales(4, [1], equal=True)
    assert flagged(defense.check(d.signals(nobody))) == []
    for kind in ("gradient", "weights"):
        assert flagged(defense.check_updates(s.updates(nobody, kind=kind))) == []
    assert (d.recomputed, s.calls) == ([], [])


@pytest.mark.parametrize("dtype, rounding, lie", [
    (torch.float32, 5e-5, 1e-3),
    (torch.bfloat16, 1e-2, 0.1),
])  # fmt: skip
def test_rounding_is_told_from_a_lie_in_the_precision_of_the_signal(
    dtype: torch.dtype, rounding: float, lie: float
) -> None:
    honest = truth(4).double()
    for size, wrong in ((rounding, []), (lie, [0, 1, 2, 3])):
        d = Desk(honest.to(dtype), (honest * (1 + size)).to(dtype))
        defense = started("cascade:screens=[everybody],screened=1,q=1")
        assert flagged(defense.check(d.signals())) == wrong
        flat = d.honest.flatten(1)
        s = Scales(flat, d.sent.flatten(1))
        assert flagged(defense.check_updates(s.updates())) == wrong
        s = Scales(flat, flat, {"activation": d.honest})
        assert flagged(defense.check_updates(s.updates())) == wrong


def test_signals_and_updates_that_are_not_finite_are_lies() -> None:
    defense = started("cascade:screens=[],q=1")
    for value in (math.nan, math.inf, -math.inf):
        for kind in ("gradient", "weights"):
            s = scales(4, equal=True)
            s.handed[2, 7] = value
            assert flagged(defense.check_updates(s.updates(kind=kind))) == [2]


def test_without_proof_lies_count_as_violations_until_there_are_enough() -> None:
    defense = started("cascade:screens=[everybody],screened=1,q=1,proof=false,violations=3")
    ledger, bans = Ledger(defense.params, 3, 4), []
    for step in range(3):
        for verdict in (
            defense.check(desk(4, [1]).signals(step=step)),
            defense.check_updates(scales(4, [2]).updates(step=step)),
            defense.check_updates(scales(4, [3], equal=True).updates(step=step, kind="weights")),
        ):
            assert flagged(verdict) and rows(verdict.severe) == []
            ledger.judge(1, verdict.flagged.tolist(), verdict.severe.tolist(), [True] * 4)
        bans += [(step, b.replica, b.reason) for b in ledger.end_step()]
        defense.end_step(step)
    # the lie about a signal shows again when the step is redone
    assert {b[1:] for b in bans} == {(r, "violations") for r in (1, 2, 3)}
    assert {b[0] for b in bans if b[1] != 1} == {2}


def test_a_copy_goes_its_own_way() -> None:
    one = started("cascade:screens=[],q=.4")
    one.check_updates(scales(4, equal=True).updates(kind="weights"))
    two = copy.deepcopy(one)
    s, t = scales(4), scales(4)
    for step in range(10):
        one.check_updates(s.updates(step=step))
    for step in range(10):
        two.check_updates(t.updates(step=step))
    assert s.calls == t.calls


# --- digests --------------------------------------------------------------------------------------


def attested(defense: Cascade, s: Scales, active: Any = None, stage: int = 1) -> Verdict:
    return defense.check_updates(s.updates(active, kind="weights", stage=stage))


def test_all_weights_are_compared_by_digests_and_computed_once() -> None:
    s, defense = scales(5, [1, 4], equal=True), started("cascade:screens=[],q=0", 5)
    verdict = attested(defense, s)
    assert flagged(verdict) == rows(verdict.severe) == [1, 4]
    assert [(what, len(of)) for what, of in s.calls] == [("recompute", 1), ("project", 5)]
    assert flagged(attested(defense, s, [True, False, True, True, True])) == [4]
    off = started("cascade:screens=[],q=0,digests=false", 5)
    assert flagged(attested(off, s)) == []


def test_a_digest_is_off_by_the_size_of_the_change_times_a_normal_variable() -> None:
    """The share that passes is P(|Z| < rtol / d), about 0.8 rtol / d."""
    rtol, d, runs = 0.05, 0.1, 1500
    s = scales(1, size=64)
    change = torch.randn(64, generator=torch.Generator().manual_seed(1))
    s.handed[0] += d * s.truth[0].norm() * change / change.norm()
    text = f"cascade:screens=[],q=0,rtol={rtol}"
    passed = sum(not flagged(attested(started(text, 1, seed), s)) for seed in range(runs))
    expected = math.erf(rtol / d / math.sqrt(2))
    assert expected == pytest.approx(0.8 * rtol / d, rel=0.05)
    assert abs(passed / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def test_digests_follow_the_replicas_when_these_are_permuted() -> None:
    order = [2, 0, 3, 1]
    for kind, equal in (("weights", True), ("gradient", False)):
        s = scales(4, [1], equal=equal)
        s.handed[3] *= 1 + 1e-6
        t = Scales(s.truth[order], s.handed[order])
        one, other = (started("cascade:screens=[],q=1").check_updates(x.updates(kind=kind))
                      for x in (s, t))  # fmt: skip
        assert other.flagged.tolist() == one.flagged[order].tolist()
        for name, (values, low, high) in one.statistics.items():
            again, *limits = other.statistics[name]
            torch.testing.assert_close(again, values[order], rtol=1e-3, atol=1e-6)
            assert limits == [low, high]


def test_weights_that_are_all_zero_are_equal_to_each_other() -> None:
    zeros = torch.zeros(3, 50)
    defense = started("cascade:screens=[],q=1", 3)
    assert flagged(attested(defense, Scales(zeros, zeros))) == []
    assert flagged(defense.check_updates(Scales(zeros, zeros).updates())) == []
    assert flagged(attested(defense, Scales(zeros, zeros + torch.eye(3, 50)[:, :1] * 1e-3))) != []


def test_what_digests_are_made_with_is_counted_and_kept() -> None:
    defense = started("cascade:screens=[],q=0")
    before = defense.state_bytes()
    attested(defense, scales(4, equal=True, size=100))
    once = defense.state_bytes()
    assert once == before + 4 * 100
    attested(defense, scales(4, equal=True, size=100))
    assert defense.state_bytes() == once
    attested(defense, scales(4, equal=True, size=70), stage=2)
    assert defense.state_bytes() == once + 4 * 70


def test_updates_teach_it_nothing() -> None:
    s: Scales = scales(4)
    updates: Updates = s.updates()
    defense = started("cascade:screens=[odd]")
    defense.learn_updates(updates, updates.active)
    assert s.calls == [] and CALLS == []
