"""What every defense owes, tested on every defense of the registry."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, ResponseParams, Signals
from sentinel_bench.config import Component
from sentinel_bench.contract._grid import (
    BOUNDARIES,
    LIES,
    SHAPE,
    Grid,
    assert_sound,
    inactive,
    near,
    outcome,
    spoken,
    state,
    with_rows,
)
from sentinel_bench.defenses import DEFENSES
from sentinel_bench.errors import ConfigError
from sentinel_bench.leaderboard import escape
from sentinel_bench.reference import pages

NAMES = registry.defenses.names()

every_name = pytest.mark.parametrize("name", NAMES)


@every_name
@pytest.mark.parametrize("change", [lambda s: s, inactive(1)], ids=["honest", "one inactive"])
def test_a_defense_leaves_all_that_it_is_given_alone(name, change):
    grid = Grid(name)
    for _ in range(25):
        for stage, direction in BOUNDARIES:
            signals = change(grid.signals(stage, direction))
            clean = signals.active.clone()
            given: list[Tensor] = [signals.sent, signals.active, clean]
            given += [] if signals.received is None else [signals.received]
            before = [(t.clone(), t._version) for t in given]
            grid.defense.check(signals)
            grid.defense.learn(signals, clean)
            for tensor, (value, version) in zip(given, before, strict=True):
                assert torch.equal(tensor, value)
                assert tensor._version == version
        grid.defense.end_step(grid.now)
        grid.now += 1


@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verdicts_have_the_right_form_and_the_reference_looks_like_a_signal(name, dtype):
    verdicts = Grid(name, dtype=dtype).warm_up().run(10)
    assert_sound(verdicts, [True] * 4)
    for reference in (v.reference for v in verdicts if v.reference is not None):
        assert (reference.shape, reference.dtype) == (SHAPE, dtype)


@every_name
def test_rows_that_were_not_finite_never_enter_the_state(name):
    grid = Grid(name).warm_up()
    assert_sound(grid.run(12, inactive(2)), [True, True, False, True])
    assert_sound(grid.run(12), [True] * 4)


@every_name
def test_steps_in_which_nobody_is_active_pass_without_a_trace(name):
    grid = Grid(name).warm_up()
    verdicts = grid.run(5, inactive(0, 1, 2, 3))
    assert_sound(verdicts, [False] * 4)
    assert outcome(verdicts) == [([False] * 4, [False] * 4)] * len(verdicts)
    assert_sound(grid.run(25), [True] * 4)


@every_name
def test_one_replica_is_enough(name):
    grid = Grid(name, replicas=1).warm_up()
    assert_sound(grid.run(25), [True])
    assert_sound(grid.run(2, inactive(0)), [False])


@every_name
@pytest.mark.parametrize("replicas", [1, 4])
def test_replicas_that_send_all_the_same_are_not_flagged(name, replicas):
    grid = Grid(name, replicas=replicas, spread=0.0).warm_up()
    verdicts = grid.run(40)
    assert_sound(verdicts, [True] * replicas)
    assert not any(v.flagged.any() for v in verdicts)


@every_name
def test_an_inactive_replica_is_not_flagged_whatever_it_sends(name):
    grid = Grid(name).warm_up()
    verdicts = grid.run(5, lambda s: with_rows(s, [1, 2], 1e6, active=False))
    assert_sound(verdicts, [True, False, False, True])
    assert not any(v.severe.any() for v in verdicts)


@every_name
def test_verdicts_follow_the_replicas_when_these_are_permuted(name):
    order = [2, 0, 3, 1]
    odd = 1
    verdicts = []
    for grid, row in ((Grid(name), odd), (Grid(name, order=order), order.index(odd))):
        grid.warm_up()
        verdicts.append(grid.run(5, lambda s, row=row: with_rows(s, [row], 30.0, active=True)))
    for straight, permuted in zip(*verdicts, strict=True):
        assert permuted.flagged.tolist() == straight.flagged[order].tolist()
        assert permuted.severe.tolist() == straight.severe[order].tolist()


@every_name
def test_the_same_signals_give_the_same_verdicts(name):
    one, other = Grid(name).warm_up(), Grid(name).warm_up()
    assert outcome(one.run(30)) == outcome(other.run(30))


@every_name
def test_a_deep_copy_is_an_equal_and_independent_state(name):
    def poison(signals: Signals) -> Signals:
        return with_rows(signals, range(4), 7.0, active=True)

    original = Grid(name).warm_up()
    fork, witness = copy.deepcopy(original), copy.deepcopy(original)
    assert fork.defense.params == original.defense.params
    fork.run(20, poison)
    ours, untouched = original.run(20), witness.run(20)
    assert outcome(ours) == outcome(untouched)
    for a, b in zip(ours, untouched, strict=True):
        assert (a.reference is None) == (b.reference is None)
        assert a.reference is None or torch.equal(a.reference, b.reference)
        assert {k: (v.tolist(), lo, hi) for k, (v, lo, hi) in a.statistics.items()} == {
            k: (v.tolist(), lo, hi) for k, (v, lo, hi) in b.statistics.items()
        }


@every_name
def test_the_memory_of_a_defense_is_stated_and_bounded(name):
    grid = Grid(name)
    sizes = []
    for _ in range(3):
        grid.run(5)
        sizes.append(grid.defense.state_bytes())
    assert sizes == [sizes[0]] * 3
    assert sizes[0] >= 0
    keeps = sizes[0] > 0 or grid.defense.redundancy() is not None
    assert grid.defense.passive != keeps


# --- preview --------------------------------------------------------------------------------------

every_preview = pytest.mark.parametrize(
    "name", [n for n in NAMES if registry.defenses.get(n).preview is not Defense.preview]
)


def test_the_state_of_an_object_shows_every_change_in_it():
    class Deep:
        __slots__ = ("x",)

        def __init__(self) -> None:
            self.x = {"a": [deque([torch.zeros(2, dtype=torch.bfloat16)])], "g": torch.Generator()}

    thing = Deep()
    first = state(thing)
    assert state(thing) == state(copy.deepcopy(thing)) == first
    thing.x["a"][0][0][1] = 1
    second = state(thing)
    torch.rand(1, generator=thing.x["g"])
    assert len({str(s) for s in (first, second, state(thing))}) == 3


@every_preview
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("warm", [False, True])
def test_a_preview_says_what_the_check_then_says_and_leaves_no_trace(name, lie, warm):
    """Of a defense that draws afterwards, a preview may leave a part out."""
    grid = Grid(name).warm_up() if warm else Grid(name)
    for _ in range(2):
        for stage, direction in BOUNDARIES:
            signals = LIES[lie](grid.signals(stage, direction))
            given = [t for t in (signals.sent, signals.received, signals.active) if t is not None]
            before = [(t.clone(), t._version) for t in given]
            held, drawn = state(grid.defense), torch.get_rng_state()
            asked = [grid.defense.preview(signals) for _ in range(2)]
            assert state(grid.defense) == held
            assert torch.equal(torch.get_rng_state(), drawn)
            for tensor, (value, version) in zip(given, before, strict=True):
                assert torch.equal(tensor, value)
                assert tensor._version == version
            verdict = grid.defense.check(signals)
            assert spoken(asked[0]) == spoken(asked[1])
            if asked[0] is not None and {*asked[0].statistics} == {*verdict.statistics}:
                assert spoken(asked[0]) == spoken(verdict)
            elif asked[0] is not None:
                assert {*asked[0].statistics} < {*verdict.statistics}
                assert not (asked[0].flagged & ~verdict.flagged).any()
            grid.defense.learn(signals, signals.active & ~verdict.flagged)
        grid.defense.end_step(grid.now)
        grid.now += 1


@every_preview
def test_a_defense_that_is_asked_all_the_time_comes_to_the_same_verdicts(name):
    quiet, asked = Grid(name), Grid(name)
    verdicts = []
    for _ in range(30):
        for stage, direction in BOUNDARIES:
            signals = near(quiet.signals(stage, direction), 1)
            other = with_rows(signals, [0, 2], 5.0, active=True)
            pair = []
            for grid, ask in ((quiet, False), (asked, True)):
                grid.defense.preview(other) if ask else None
                pair.append(grid.defense.check(signals))
                grid.defense.preview(other) if ask else None
                grid.defense.learn(signals, signals.active & ~pair[-1].flagged)
                grid.defense.preview(other) if ask else None
            verdicts.append(pair)
        for grid in (quiet, asked):
            grid.defense.end_step(grid.now)
            grid.now += 1
    assert state(quiet.defense) == state(asked.defense)
    assert all(spoken(one) == spoken(two) for one, two in verdicts)


@every_preview
def test_a_preview_of_one_replica_does_not_depend_on_the_order_of_questions(name):
    grid = Grid(name).warm_up()
    signals = [LIES[lie](grid.signals(1, "activation")) for lie in LIES]
    straight = [spoken(grid.defense.preview(s)) for s in signals]
    backwards = [spoken(grid.defense.preview(s)) for s in reversed(signals)]
    assert straight == backwards[::-1]


@every_name
def test_a_defense_says_what_it_is(name):
    defense = registry.defenses.get(name)
    assert defense.name == name.rpartition("/")[2]
    for text in (defense.goal, defense.formula, defense.source, defense.version):
        assert text.strip()
    assert defense.__doc__ and defense.__doc__ != Defense.__doc__
    assert issubclass(defense.Params, ResponseParams)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The pages of the reference, without results."""
    return pages(tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", DEFENSES)
def test_a_built_in_defense_says_on_its_page_what_it_is_blind_to(name, generated):
    blind_to = registry.defenses.get(name).blind_to
    assert len(blind_to.split()) > 3
    assert blind_to == " ".join(blind_to.split())
    assert not blind_to.endswith(".")
    title, text = "## Does not protect against", escape(blind_to, longest=None)
    assert f"\n\n{title}\n\n{text}\n\n" in generated[f"defenses/{name}.md"]


@every_name
def test_parameters_have_valid_defaults_and_descriptions(name):
    params = registry.defenses.params(Component(name=name))
    assert all(info.description for info in type(params).model_fields.values())
    again = Component(name=name, params=params.model_dump(mode="json", by_alias=True))
    assert registry.defenses.params(again) == params


@every_name
def test_an_unknown_parameter_is_an_error_that_names_the_nearest(name):
    with pytest.raises(ConfigError, match="'violation'; did you mean violations"):
        registry.defenses.create(Component(name=name, params={"violation": 3}))
