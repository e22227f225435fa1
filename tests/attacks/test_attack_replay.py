"""`delay` against signals that carry their own step."""

import pytest
import torch

from sentinel_bench.config import Component
from sentinel_bench.pipeline.tamper import History, Tamperer
from sentinel_bench.threat import Attacker


def stamped(step: int, replicas: int = 1, sign: int = 1) -> torch.Tensor:
    """A signal whose every element is its step."""
    return torch.full((replicas, 1, 2, 3), float(sign * step))


def test_delay_is_honest_until_so_much_history_exists(create, context, x):
    attack = create("delay:steps=3")
    past = [stamped(0)[0], stamped(1)[0]]
    assert attack.signal(x, context(history=past)) is x
    assert attack.signal(x, context()) is x


def test_delay_sends_the_signal_of_exactly_so_many_steps_ago(create, context, x):
    attack = create("delay:steps=3")
    past = [stamped(t)[0] for t in range(4, 9)]  # steps 4 to 8, now is step 9
    assert torch.equal(attack.signal(x, context(history=past)), stamped(6)[0])


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_delay_asks_for_as_much_memory_as_it_needs(create, context, x, steps):
    attack = create(f"delay:steps={steps}")
    assert attack.memory() == steps
    past = [stamped(t)[0] for t in range(steps)]
    assert torch.equal(attack.signal(x, context(history=past)), stamped(0)[0])


def test_delay_goes_back_a_hundred_steps_by_default(create):
    assert create("delay").memory() == 100


def test_in_a_run_the_delayed_signal_is_the_workers_own_honest_one_in_each_direction():
    attack = Component.parse("delay:steps=2")
    attackers = [Attacker(1, replica, 0, attack, "both", seed=replica) for replica in (0, 2)]
    tamperer = Tamperer(attackers, History(), "cpu", lambda stage, replica: False)
    offset = torch.tensor([0.0, 0.25, 0.5]).view(3, 1, 1, 1)  # tells the replicas apart
    for step in range(6):
        for direction, sign in (("activation", 1), ("gradient", -1)):
            x = stamped(step, replicas=3, sign=sign) + offset
            sent = tamperer.send(1, direction, step, x, None)
            old = stamped(step - 2, replicas=3, sign=sign) + offset
            acts = step >= 2
            assert sent.tampered == [acts, False, acts]
            for replica in range(3):
                lies = acts and replica != 1
                assert torch.equal(sent.x[replica], (old if lies else x)[replica])
