"""What every defense owes, tested on every defense of the registry."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Defense, ResponseParams, Setup, Signals, Verdict
from sentinel_bench.config import Component
from sentinel_bench.errors import ConfigError

NAMES = registry.defenses.names()
STAGES, SHAPE, WARMUP = 3, (2, 4, 8), 20
BOUNDARIES = [(0, "activation"), (1, "activation"), (2, "gradient"), (1, "gradient")]

every_name = pytest.mark.parametrize("name", NAMES)


class Grid:
    """Honest replicas that send nearly the same, watched by one defense.

    Args:
        name: the defense.
        replicas: their number.
        spread: standard deviation of what sets replicas apart.
        order: the replicas' order in every tensor.
        dtype: of the signals.
    """

    def __init__(
        self,
        name: str,
        replicas: int = 4,
        spread: float = 0.05,
        order: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.defense: Defense[Any] = registry.defenses.create(Component(name=name))
        if not self.defense.passive:
            self.defense.start(Setup(STAGES, replicas, SHAPE))
        self.replicas, self.spread, self.dtype = replicas, spread, dtype
        self.order = list(order) if order is not None else list(range(replicas))
        self.now = 0

    def signals(self, stage: int, direction: str) -> Signals:
        """What all send honestly in this step."""
        base = torch.randn(SHAPE, generator=torch.Generator().manual_seed(stage))
        noise = torch.Generator().manual_seed(1000 + self.now * 10 + stage)
        own = torch.randn(self.replicas, *SHAPE, generator=noise)
        x = ((base + self.spread * own)[self.order]).to(self.dtype)
        everybody = torch.ones(self.replicas, dtype=torch.bool)
        received = x * 0.9 if (stage, direction) in BOUNDARIES[1::2] else None
        return Signals(stage, direction, self.now, x, received, everybody)

    def warm_up(self) -> Grid:
        """Let honest steps pass in which no flag counts."""
        for _ in range(WARMUP):
            self._step(lambda signals: signals, heed=False)
        return self

    def run(self, steps: int, change: Any = lambda signals: signals) -> list[Verdict]:
        """Let some steps pass, and return their verdicts."""
        return [verdict for _ in range(steps) for verdict in self._step(change)]

    def _step(self, change: Any, *, heed: bool = True) -> list[Verdict]:
        verdicts = []
        for stage, direction in BOUNDARIES:
            signals = change(self.signals(stage, direction))
            verdict = self.defense.check(signals)
            self.defense.learn(signals, signals.active & ~(verdict.flagged & heed))
            verdicts.append(verdict)
        self.defense.end_step(self.now)
        self.now += 1
        return verdicts


def with_rows(signals: Signals, rows: Sequence[int], value: float, *, active: bool) -> Signals:
    """Replace some replicas' signals, and say whether these are tested."""
    mask = torch.zeros(len(signals.sent), dtype=torch.bool)
    mask[list(rows)] = True
    sent = signals.sent.masked_fill(mask.view(-1, 1, 1, 1), value)
    return Signals(
        signals.stage,
        signals.direction,
        signals.step,
        sent,
        signals.received,
        signals.active if active else signals.active & ~mask,
    )


def inactive(*rows: int) -> Any:
    """As the harness gives what could not be read or was not finite: zeros, and not active."""
    return lambda signals: with_rows(signals, rows, 0.0, active=False)


def outcome(verdicts: Sequence[Verdict]) -> list[tuple[list[bool], list[bool]]]:
    return [(v.flagged.tolist(), v.severe.tolist()) for v in verdicts]


def assert_sound(verdicts: Sequence[Verdict], active: Sequence[bool]) -> None:
    """The form is right, nothing is NaN, and no untested replica is flagged."""
    for verdict in verdicts:
        for flags in (verdict.flagged, verdict.severe):
            assert flags.shape == (len(active),)
            assert flags.dtype == torch.bool
            assert not any(f and not a for f, a in zip(flags.tolist(), active, strict=True))
        assert verdict.reference is None or verdict.reference.isfinite().all()
        for values, low, high in verdict.statistics.values():
            assert values[torch.tensor(active)].isfinite().all()
            assert low <= high  # False for NaN


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


@every_name
def test_a_defense_says_what_it_is(name):
    defense = registry.defenses.get(name)
    assert defense.name == name.rpartition("/")[2]
    for text in (defense.goal, defense.formula, defense.source, defense.version):
        assert text.strip()
    assert defense.__doc__ and defense.__doc__ != Defense.__doc__
    assert issubclass(defense.Params, ResponseParams)


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
