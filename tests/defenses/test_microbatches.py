"""A step in parts: all messages of a boundary are learnt, and joined where the step is compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hand_in import scales
from torch import Tensor
from work_again import SHAPE, desk, flagged, started, truth

from sentinel_bench.api import Setup, Signals
from sentinel_bench.defenses.cascade import Cascade
from sentinel_bench.defenses.fenced import Fenced, FencedParams
from sentinel_bench.defenses.sentinel import Sentinel
from sentinel_bench.defenses.surrogate import Surrogate
from sentinel_bench.defenses.tokens import TokenSample


class Level(Fenced[FencedParams]):
    """Measures the first element that each replica sends."""

    name = "level"
    goal = formula = source = "test"
    statistics: ClassVar[tuple[str, ...]] = ("level",)

    def measure(self, signals: Signals) -> Tensor:
        return signals.sent[:, 0, 0, 0][None]

    def floors(self) -> Mapping[str, float]:
        return {"level": 0.5}


def message(
    values: Sequence[float],
    microbatch: int,
    step: int = 0,
    direction: Any = "activation",
    active: Sequence[bool] | None = None,
) -> Signals:
    """Return signals of one element for each replica."""
    sent = torch.tensor(values).view(-1, 1, 1, 1)
    mask = torch.tensor(active if active is not None else [True] * len(values))
    return Signals(1, direction, step, sent, None, mask, microbatch=microbatch)


def shown(defense: Any, signals: Signals) -> None:
    """Let a defense look at signals, and learn from all that are active."""
    defense.check(signals)
    defense.learn(signals, signals.active)


# --- fences ---------------------------------------------------------------------------------------


def level(window: int, min_steps: int = 1) -> Level:
    defense = Level(FencedParams(window=window, mads=2, min_steps=min_steps))
    defense.start(Setup(2, 2, (1, 1, 1), microbatches=3))
    return defense


def fence(defense: Level) -> tuple[float, float]:
    """Return median and half width for what stage 1 sends forward."""
    channel = 2
    return defense._fences.median[channel].item(), defense._fences.half_width[channel].item()


def test_the_values_of_all_messages_of_a_step_are_behind_a_fence() -> None:
    defense = level(window=1)
    for microbatch, values in enumerate(([0.0, 9.0], [1.0, 2.0], [4.0, 6.0])):
        shown(defense, message(values, microbatch))
    defense.end_step(0)
    # 0 1 2 4 6 9: median 3; distances 3 2 1 1 3 6, MAD 2.5
    assert fence(defense) == pytest.approx((3.0, 2 * 1.4826 * 2.5))


def test_a_message_that_was_not_there_or_not_clean_has_no_part_in_a_fence() -> None:
    defense = level(window=1)
    shown(defense, message([0.0, 9.0], 0))
    shown(defense, message([2.0, 1e9], 2, active=[True, False]))
    defense.end_step(0)
    assert fence(defense) == pytest.approx((2.0, 2 * 1.4826 * 2))  # 0 2 9: distances 2 0 7


def test_the_window_and_its_first_closing_are_counted_in_steps_not_in_messages() -> None:
    defense = level(window=2, min_steps=2)
    for step, value in enumerate((100.0, 3.0, 5.0)):
        for microbatch in range(3):
            shown(defense, message([value, value], microbatch, step))
        assert math.isinf(fence(defense)[1]) == (step < 2)
        defense.end_step(step)
    assert fence(defense)[0] == 4.0  # the 100 is out: 3 and 5, six of each


def test_fences_stay_as_they_are_within_a_step() -> None:
    defense = level(window=1)
    for microbatch in range(3):
        shown(defense, message([0.0, 0.0], microbatch))
    defense.end_step(0)
    for microbatch, value in enumerate((50.0, 60.0, 0.0)):
        verdict = defense.check(message([value, 0.0], microbatch, 1))
        assert verdict.flagged.tolist() == [value > 0, False]
        defense.learn(message([value, 0.0], microbatch, 1), torch.tensor([True, True]))


def test_a_window_has_room_for_all_messages_and_says_so() -> None:
    def kept(text: str, microbatches: int) -> int:
        return started(text, 4, SHAPE, microbatches=microbatches).state_bytes()

    for text, channels in (("coherence", 12), ("cross-replica", 24), ("sentinel", 24)):
        assert kept(f"{text}:window=10", 3) - kept(f"{text}:window=10", 1) == channels * 10 * 8 * 4


# --- sentinel -------------------------------------------------------------------------------------


def sentinel(**params: Any) -> Sentinel:
    given = {"beta": 0.5, "statistics": ["l1"], "min_steps": 1, "window": 2, "k0": 1} | params
    defense = Sentinel(Sentinel.Params.model_validate(given))
    defense.start(Setup(2, 2, (1, 1, 1), microbatches=2))
    return defense


def average(defense: Sentinel) -> float:
    return defense._average[1, "activation"].item()


def test_every_message_moves_the_average_in_their_order() -> None:
    defense = sentinel()
    shown(defense, message([4.0, 4.0], 0))
    assert average(defense) == 4
    shown(defense, message([6.0, 10.0], 1))
    assert average(defense) == 6  # halfway from 4 to 8
    defense.end_step(0)
    shown(defense, message([0.0, 100.0], 0, 1, active=[True, False]))
    assert average(defense) == 3
    shown(defense, message([5.0, 5.0], 1, 1))
    assert average(defense) == 4


def test_the_deviations_of_all_messages_are_behind_a_fence_of_sentinel() -> None:
    defense = sentinel(grow=1, shrink=1)
    shown(defense, message([0.0, 0.0], 0))  # nothing to compare with
    shown(defense, message([1.0, 3.0], 1))  # deviations 1 and 3; the average is 1
    defense.end_step(0)
    assert defense._fences.median[2].item() == 2
    shown(defense, message([6.0, 6.0], 0, 1))  # 5 and 5; 3.5
    shown(defense, message([3.5, 10.5], 1, 1, active=[True, False]))  # 0
    defense.end_step(1)
    assert defense._fences.median[2].item() == 3  # 0 1 3 5 5
    names = defense.channel_names(2)
    assert names[2] == (1, "activation", "l1")


def test_the_needed_lambda_is_that_of_the_worst_message_of_a_replica() -> None:
    defense = sentinel(eps=1e-6)
    for microbatch, values in enumerate(([0.0, 0.0], [4.0, 4.0])):
        shown(defense, message(values, microbatch))
    defense.end_step(0)  # deviations 4 and 4; the average is 2
    assert defense.needed_lambda()[2].isnan().all()
    shown(defense, message([12.0, 8.0], 0, 1))  # 10 and 6: 6 / 4 and 2 / 4; the average is 6
    assert defense.needed_lambda()[2].tolist() == [1.5, 0.5]
    shown(defense, message([9.0, 22.0], 1, 1))  # 3 and 16: 1 / 4 and 12 / 4
    assert defense.needed_lambda()[2].tolist() == [1.5, 3.0]
    assert defense.needed_lambda().shape == (4, 2)
    assert defense.needed_lambda()[[0, 1, 3]].isnan().all()


# --- surrogate ------------------------------------------------------------------------------------

TOKENS = (1, 6, 4)


def pair(seed: int, replicas: int) -> tuple[Tensor, Tensor]:
    received = truth(replicas, seed, TOKENS)
    return received + 0.1 * truth(replicas, seed + 100, TOKENS), received


def surrogate(replicas: int, microbatches: int) -> Surrogate:
    defense = started("surrogate:fitted=6", replicas, TOKENS, microbatches=microbatches)
    assert isinstance(defense, Surrogate)
    return defense


def taught(defense: Surrogate, sent: Tensor, received: Tensor, clean: Any, m: int = 0) -> None:
    signals = Signals(1, "activation", 0, sent, received, torch.tensor(clean), microbatch=m)
    defense.check(signals)
    defense.learn(signals, signals.active)


def test_a_map_is_fitted_to_all_messages_of_a_step() -> None:
    """Two messages of two replicas count as one of four."""
    sent, received = pair(0, 4)
    whole, parts = surrogate(4, 1), surrogate(2, 2)
    taught(whole, sent, received, [True, True, False, True])
    taught(parts, sent[:2], received[:2], [True, True], 0)
    taught(parts, sent[2:], received[2:], [False, True], 1)
    for defense in (whole, parts):
        defense.end_step(0)
    assert whole._ridge.weights[2].abs().sum() > 0
    assert torch.equal(whole._ridge.weights, parts._ridge.weights)


def test_a_message_that_was_not_there_changes_nothing_about_a_map() -> None:
    sent, received = pair(0, 2)
    one, second = surrogate(2, 2), surrogate(2, 2)
    for defense, m in ((one, 0), (second, 1)):
        taught(defense, sent, received, [True, True], m)
        defense.end_step(0)
    alone = surrogate(2, 1)
    taught(alone, sent, received, [True, True])
    alone.end_step(0)
    for defense in (one, second):
        torch.testing.assert_close(defense._ridge.weights, alone._ridge.weights)


def test_tokens_are_drawn_among_those_of_each_message_also_where_parts_are_unequal() -> None:
    sample = TokenSample(seed=0)
    for m, batch in enumerate((3, 2)):
        x = torch.arange(batch * 4.0).view(1, batch, 4, 1)
        signals = Signals(1, "activation", 0, x, x, torch.tensor([True]), microbatch=m)
        sent, _ = sample(signals, 7)
        assert len(set(sent.flatten().tolist())) == 7


# --- cascade --------------------------------------------------------------------------------------


def cascade(microbatches: int, q: float = 1) -> Cascade:
    defense = started(f"cascade:screens=[],q={q}", 4, microbatches=microbatches)
    assert isinstance(defense, Cascade)
    return defense


@pytest.mark.parametrize("wrong", [[], [0], [1], [0, 1]])
@pytest.mark.parametrize("direction", ["activation", "gradient"])
def test_a_lie_in_any_microbatch_is_found_when_the_step_is_done_again(
    wrong: list[int], direction: str
) -> None:
    desks = [desk(4, [m + 1] if m in wrong else [], seed=m) for m in range(2)]
    whole = torch.cat([d.honest for d in desks], 1)
    for backwards in (False, True):
        defense = cascade(2)
        for m in (1, 0) if backwards else (0, 1):
            defense.check(desks[m].signals(direction=direction, microbatch=m))
        verdict = defense.check_updates(scales(4, signals={direction: whole}).updates())
        assert flagged(verdict) == [m + 1 for m in wrong]
        assert f"{direction} mismatch" in verdict.statistics


def test_microbatches_are_not_mixed_with_those_of_other_places() -> None:
    defense, desks = cascade(2), {}
    for m in range(2):
        for stage in range(3):
            for direction in ("activation", "gradient"):
                d = desks[stage, direction, m] = desk(4, seed=len(desks))
                defense.check(d.signals(stage=stage, direction=direction, microbatch=m))
    for stage in range(3):
        parts = {
            direction: torch.cat([desks[stage, direction, m].honest for m in range(2)], 1)
            for direction in ("activation", "gradient")
        }
        handed = scales(4, signals=parts)
        verdict = defense.check_updates(handed.updates(stage=stage))
        assert set(verdict.statistics) == {"activation mismatch", "gradient mismatch"}
        assert flagged(verdict) == []


def test_a_step_of_which_a_part_was_not_seen_is_not_compared_with_the_whole() -> None:
    defense, d = cascade(3), desk(4, [2])
    for m in (0, 2):
        defense.check(d.signals(microbatch=m))
    whole = torch.cat([d.honest] * 3, 1)
    s = scales(4, [1], signals={"activation": whole})
    assert flagged(defense.check_updates(s.updates())) == [1]  # for its weight gradient
    defense.end_step(0)
    assert defense._sent == {}


def test_screens_are_drawn_for_each_microbatch() -> None:
    defense, n, share = started('cascade:screens=["audit:q=1"]', 2, microbatches=2), 600, 0.5
    looked = []
    for step in range(n):
        row = []
        for m in range(2):
            d = desk(2, [0])
            row.append(bool(flagged(defense.check(d.signals(step=step, microbatch=m)))))
        looked.append(row)
        defense.end_step(step)
    for m in range(2):
        found = sum(row[m] for row in looked)
        assert abs(found - share * n) < 4 * math.sqrt(n * share * (1 - share))
    together = sum(all(row) for row in looked)
    assert abs(together - n / 4) < 4 * math.sqrt(n * 3 / 16)
