"""Attacks that send nothing, or the honest signal late, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sentinel_bench import registry
from sentinel_bench.api import Attack, AttackContext, Knowledge, Late, Message, Silence
from sentinel_bench.config import Component

Create = Callable[[str], Attack[Any]]
Context = Callable[..., AttackContext]
both = pytest.mark.parametrize("direction", ["activation", "gradient"])


class Touchy:
    """A detector that must not be asked."""

    def judge(self, x: Tensor) -> None:
        raise AssertionError("asked")


def lateness(sent: Message, x: Tensor) -> float | None:
    """Seconds; None for silence. What comes is the honest signal itself."""
    if isinstance(sent, Silence):
        return None
    signal = sent.signal if isinstance(sent, Late) else sent
    assert signal is x
    return sent.seconds if isinstance(sent, Late) else 0.0


@both
def test_a_crash_is_silent_from_so_many_steps_after_its_start_on(
    create: Create, context: Context, x: Tensor, direction: str
) -> None:
    for text, silent in (("crash", range(6)), ("crash:after=4", range(4, 6))):
        attack = create(text)
        for start in (0, 7):  # the attacker's age counts, not the step of the run
            sent = [
                attack.send(x, context(step=start + age, age=age, direction=direction))
                for age in range(6)
            ]
            assert [age for age, m in enumerate(sent) if m == Silence()] == [*silent]
            assert all(m is x for m in sent[: silent[0]])


@both
def test_a_straggler_sends_the_honest_signal_late(
    create: Create, context: Context, x: Tensor, direction: str
) -> None:
    for text, seconds in (("straggle", 0.5), ("straggle:seconds=3", 3.0)):
        sent = create(text).send(x, context(direction=direction))
        assert lateness(sent, x) == seconds


def test_a_share_of_the_messages_is_late_each_drawn_by_itself(
    create: Create, context: Context, x: Tensor
) -> None:
    attack, known = create("straggle:rate=.25"), context()
    found = [lateness(attack.send(x, known), x) for _ in range(1000)]
    draws = torch.Generator().manual_seed(5)  # two messages of one step are two draws
    expected = [0.5 * bool(torch.rand((), generator=draws) < 0.25) for _ in range(1000)]
    assert found == expected
    assert 195 < sum(map(bool, found)) < 305  # 250 +- 4 sigma


def test_at_rate_1_nothing_is_drawn(create: Create, context: Context, x: Tensor) -> None:
    known = context()
    before = known.generator.get_state()
    create("straggle").send(x, known)
    create("crash").send(x, known)
    assert torch.equal(known.generator.get_state(), before)


def test_on_off_crashes_and_comes_back(create: Create, context: Context, x: Tensor) -> None:
    attack = create("on-off:attack='crash:after=1',burst=2,period=4")
    sent = [attack.send(x, context(step=age, age=age)) for age in range(8)]
    assert [lateness(m, x) for m in sent] == [0.0, None, 0.0, 0.0, None, None, 0.0, 0.0]
    attack = create("on-off:attack='straggle:seconds=2',burst=1,period=3")
    sent = [attack.send(x, context(step=age, age=age)) for age in range(5)]
    assert [lateness(m, x) for m in sent] == [2.0, 0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(("inner", "seconds"), [("crash", None), ("straggle", 0.5)])
def test_a_rider_on_a_fault_sends_it_as_it_is_and_asks_nobody(
    create: Create, context: Context, x: Tensor, inner: str, seconds: float | None
) -> None:
    granted = {Knowledge.DETECTOR: Touchy}
    sent = create(f"fence-rider:attack={inner}").send(x, context(granted=granted))
    assert lateness(sent, x) == seconds


def test_faults_are_dealt_among_other_attacks() -> None:
    own, rng = Component.parse("mixed:pool=[crash,'straggle:seconds=2'],modes=[both]"), 0
    dealt = [
        registry.attacks.get("mixed").deal(own, "activation", np.random.default_rng(rng + i))
        for i in range(20)
    ]
    assert {(c.label(), mode) for c, mode in dealt} == {
        ("crash", "both"),
        ("straggle:seconds=2", "both"),
    }
