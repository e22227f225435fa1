"""`delay` and `mean-replay` against signals that carry their own step."""

from collections.abc import Sequence

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


class Counted(Sequence):
    """A history that counts how many signals are asked for."""

    def __init__(self, past: list[torch.Tensor]) -> None:
        self.past = past
        self.asked = 0

    def __len__(self) -> int:
        return len(self.past)

    def __getitem__(self, index):
        found = self.past[index]
        self.asked += len(found) if isinstance(index, slice) else 1
        return found


def drifting(steps: int) -> list[torch.Tensor]:
    """Signals that move."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, 4, generator=generator) + 0.05 * t for t in range(steps)]


def test_mean_replay_sends_the_mean_of_its_past(create, context, x):
    attack = create("mean-replay:window=3")
    assert attack.signal(x, context()) is x
    # steps 4 to 7 are given, the last three count: (5 + 6 + 7) / 3
    past = [stamped(t)[0] for t in range(4, 8)]
    assert torch.equal(attack.signal(x, context(history=past)), stamped(6)[0])


def test_mean_replay_of_a_short_past_is_the_mean_of_all_of_it(create, context, x):
    past = [stamped(1)[0], stamped(2)[0]]
    sent = create("mean-replay").signal(x, context(history=past))
    assert torch.equal(sent, torch.full((1, 2, 3), 1.5))


def test_mean_replay_goes_back_a_hundred_steps_by_default(create, context, x):
    attack = create("mean-replay")
    assert attack.memory() == 101  # and one more, to take it off the sum
    past = [stamped(t)[0] for t in range(101)]
    assert torch.equal(attack.signal(x, context(history=past)), torch.full((1, 2, 3), 50.5))


@pytest.mark.parametrize("window", [1, 4, 30])
@pytest.mark.parametrize(
    "asked",
    [
        range(200),
        range(50, 200),
        [t for t in range(200) if t % 9 < 4],
        [t for t in range(200) if t % 3],
        [t for step in range(100) for t in (step, step)],  # a step that is done again
    ],
    ids=["always", "later", "bursts", "gaps", "twice"],
)
def test_mean_replay_is_the_mean_over_the_window_whenever_it_is_asked(
    create, context, window, asked
):
    attack, signals = create(f"mean-replay:window={window}"), drifting(200)
    for step in asked:
        past = signals[max(0, step - attack.memory()) : step]
        sent = attack.signal(signals[step], context(step=step, history=past))
        mean = torch.stack(past[-window:]).mean(0) if past else signals[step]
        torch.testing.assert_close(sent, mean, rtol=1e-6, atol=1e-6)


def test_mean_replay_does_not_lose_digits_to_large_signals_of_the_past(create, context):
    attack, signals = create("mean-replay:window=4"), drifting(50)
    signals[3] = signals[3] * 1e8
    for step in range(1, 50):
        past = signals[max(0, step - attack.memory()) : step]
        sent = attack.signal(signals[step], context(step=step, history=past))
        if step > 7:
            torch.testing.assert_close(sent, torch.stack(past[-4:]).mean(0), rtol=1e-5, atol=1e-5)


def test_mean_replay_keeps_each_direction_apart(create, context):
    attack, signals = create("mean-replay:window=3"), drifting(20)
    for step in range(1, 20):
        past = signals[max(0, step - attack.memory()) : step]
        mean = torch.stack(past[-3:]).mean(0)
        for direction, sign in (("activation", 1), ("gradient", -1)):
            ctx = context(step=step, history=[sign * p for p in past], direction=direction)
            torch.testing.assert_close(attack.send(signals[step], ctx), sign * mean)


def test_mean_replay_asks_for_two_past_signals_a_step_once_it_runs(create, context):
    attack, signals = create("mean-replay:window=50"), drifting(120)
    for step in range(60, 120):
        past = Counted(signals[step - attack.memory() : step])
        attack.signal(signals[step], context(step=step, history=past))
        assert past.asked <= (2 if step > 60 else 51)


def test_what_becomes_of_a_sent_mean_does_not_reach_the_next(create, context):
    attack, signals = create("mean-replay:window=1"), [s.double() for s in drifting(5)]
    for step in range(1, 5):
        past = [s.clone() for s in signals[max(0, step - 2) : step]]
        sent = attack.signal(signals[step], context(step=step, history=past))
        torch.testing.assert_close(sent, signals[step - 1])
        sent.fill_(99)
