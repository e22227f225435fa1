"""Scores against examples worked by hand, and: a run that says nothing is never `defended`."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel_bench import record
from sentinel_bench.config import Cell, Component, Scenario, Seeds
from sentinel_bench.score import FLAGS, METRICS, rescore, result, score

Events = list[dict[str, Any]]
STEPS, WARMUP = 10, 4


def worker(kind: str, step: int, stage: int, replica: int, **more: Any) -> dict[str, Any]:
    return {"type": kind, "step": step, "stage": stage, "replica": replica, **more}


def ban(step: int, stage: int, replica: int) -> dict[str, Any]:
    return worker("ban", step, stage, replica, reason="violations")


def act(step: int, stage: int, replica: int) -> dict[str, Any]:
    return worker("act", step, stage, replica, direction="activation")


def tamper(stage: int, replica: int, signals: int, size: float) -> dict[str, Any]:
    return {
        "type": "tamper",
        "stage": stage,
        "replica": replica,
        "signals": signals,
        "size": size,
    }


def trigger(rate: float, base: float) -> dict[str, Any]:
    return {"type": "trigger", "step": STEPS - 1, "rate": rate, "base": base}


def log(
    *rows: dict[str, Any],
    attackers: tuple[tuple[int, int], ...] = ((1, 0), (1, 1), (2, 3)),
    loss: float | None = 2.0,
    baseline: float | None = 1.97,
    status: str = "complete",
    steps: int = STEPS,
) -> Events:
    """A run of 10 steps, 4 of them warm-up, on 3 stages x 4 replicas, with `rows` in it."""
    who = [
        {"stage": s, "replica": r, "start": 5, "attack": "zero", "params": {}, "mode": "activation"}
        for s, r in attackers
    ]
    start = {"type": "start", "time": "2026-01-01T00:00:00Z", "stages": 3, "replicas": 4}
    start |= {"steps": STEPS, "warmup_steps": WARMUP, "tokens_per_step": 100, "attackers": who}
    events: Events = [start | {"state_bytes": 640}]
    if baseline is not None:
        tps = {"digest": "0" * 64, "tokens_per_second": 500.0}
        events.append({"type": "baseline", "validation_loss": baseline, **tps})
    for step in range(steps):
        checked, flagged = ([10, 2], [1, 1]) if step >= WARMUP else ([0, 0], [0, 0])
        row = {"type": "step", "step": step, "loss": 3.0, "grad_norm": 1.0, "tampered": 0}
        events.append(
            row | {"seconds": 0.25, "checked": checked, "flagged": flagged, "excluded": 0}
        )
        events += [row for row in rows if row.get("step") == step]
    events += [row for row in rows if row.get("step", steps) >= steps]
    if loss is not None:
        events.append({"type": "eval", "step": steps - 1, "loss": loss, "tokens": 1000})
    return [
        *events,
        {"type": "end", "status": status, "time": "2026-01-01T00:01:00Z", "seconds": 60},
    ]


def without(events: Events, kind: str) -> Events:
    return [row for row in events if row["type"] != kind]


# Worked examples.


def test_worker_scores_by_hand() -> None:
    # 12 workers, three attackers act at step 5. Banned: two of them, at steps 5 and 8, and the
    # honest (0, 0). TP 2, FP 1, FN 1: precision 2/3, recall 2/3, F1 = 4 / (4 + 1 + 1) = 2/3.
    # Delays: 5 - 5 + 1 = 1 and 8 - 5 + 1 = 4: mean and median 2.5.
    # Worker-steps: 9 honest x 6 steps after warm-up = 54: 1000 / 54 = 18.518... false bans.
    # Capacity: stage 1 lost two of its four workers: 0.5.
    acts = [act(5, 1, 0), act(5, 1, 1), act(5, 2, 3)]
    found = score(log(*acts, ban(5, 1, 0), ban(8, 1, 1), ban(6, 0, 0)))
    for name in ("precision", "recall", "f1"):
        assert found[name] == pytest.approx(200 / 3)
    counts = [found[name] for name in ("attackers", "acted", "banned", "false_bans")]
    assert counts == [3, 3, 3, 1]
    assert found["false_bans_per_1000"] == pytest.approx(1000 / 54)
    assert found["detection_steps_mean"] == found["detection_steps_median"] == 2.5
    assert found["capacity"] == 0.5
    assert (found["outcome"], found["reason"]) == ("defended", None)


def test_damage_and_speed_by_hand() -> None:
    # Excess 2.0 - 1.97 = 0.03. Nobody banned: recall 0 < 50, so that all of it went undetected.
    # TPS: 6 steps x 100 tokens in 6 x 0.25 s = 400; the paired run has 500: 0.8.
    found = score(log(act(5, 1, 0)))
    assert found["validation_loss"] == 2.0
    assert found["perplexity"] == pytest.approx(math.e**2)
    assert found["excess_loss"] == found["undetected_damage"] == pytest.approx(0.03)
    assert found["tokens_per_second"] == pytest.approx(400)
    assert found["relative_tps"] == pytest.approx(0.8)
    assert (found["precision"], found["recall"], found["f1"]) == (0, 0, 0)
    assert found["detection_steps_mean"] is None and found["detection_steps_median"] is None


def test_half_of_the_attackers_found_is_no_undetected_damage() -> None:
    found = score(log(act(5, 1, 0), act(5, 1, 1), ban(6, 1, 0)))
    assert found["recall"] == 50 and found["undetected_damage"] == 0


def test_harm_weighted_recall_by_hand() -> None:
    # (1, 0) acts at step 5 and is banned at 8: 3 signals of size .5 in 4 steps, .375 a step.
    # (1, 1) acts at 6 and is never banned: 10 of size .75 in steps 6 to 9, 1.875 a step.
    # (2, 3) is banned in the step of its first signal: 1 of size 1, 1 a step.
    # Found: .375 + 1 of 3.25, 42.307... percent. The honest ban (0, 0) has no part in it.
    rows = [act(5, 1, 0), act(6, 1, 1), act(7, 2, 3), ban(8, 1, 0), ban(7, 2, 3), ban(6, 0, 0)]
    harm = [tamper(1, 0, 3, 0.5), tamper(1, 1, 10, 0.75), tamper(2, 3, 1, 1.0)]
    found = score(log(*rows, *harm))
    assert found["harm_weighted_recall"] == pytest.approx(100 * 1.375 / 3.25)
    assert found["recall"] == pytest.approx(200 / 3)
    # All found, in equal shares of a number that binary fractions cannot hold: still 100.
    rows = [act(5, 1, 0), ban(7, 1, 0)]
    assert score(log(*rows, tamper(1, 0, 5, 0.1)))["harm_weighted_recall"] == 100


def test_in_a_run_that_ends_early_harm_is_counted_up_to_its_last_step() -> None:
    # It ends with step 6. (1, 0) acts in both steps from 5, 2 x .5 / 2 = .5 a step; (2, 3) is
    # banned at 6: 1 x 1 / 1. Found: 1 of 1.5.
    rows = [act(5, 1, 0), act(6, 2, 3), ban(6, 2, 3), tamper(1, 0, 2, 0.5), tamper(2, 3, 1, 1.0)]
    end = [ban(6, 0, r) for r in range(4)] + [{"type": "exhausted", "step": 6, "stage": 0}]
    found = score(log(*rows, *end, steps=7, status="exhausted"))
    assert found["harm_weighted_recall"] == pytest.approx(200 / 3)
    # An act that the record has after its last step does no harm to the arithmetic.
    late = [act(7, 1, 0), tamper(1, 0, 2, 0.5)]
    found = score(log(*late, *end, steps=7, status="exhausted"))
    assert found["harm_weighted_recall"] == 0


def test_harm_weighted_recall_where_there_is_nothing_to_weigh() -> None:
    assert score(log())["harm_weighted_recall"] == 100
    assert score(log(ban(5, 1, 0)))["harm_weighted_recall"] == score(log())["recall"] == 100
    # Acted only after its ban: an honest worker here, so that nobody acted.
    late = [ban(5, 1, 0), act(6, 1, 0)]
    assert score(log(*late, tamper(1, 0, 1, 1.0)))["harm_weighted_recall"] == 100
    # Records of an older version have no tamper rows.
    old = score(log(act(5, 1, 0), ban(5, 1, 0)))
    assert (old["harm_weighted_recall"], old["recall"], old["outcome"]) == (None, 100, "defended")
    # Every lie rounds to nothing.
    assert score(log(act(5, 1, 0), tamper(1, 0, 3, 0.0)))["harm_weighted_recall"] is None


def test_backdoor_success_by_hand() -> None:
    found = score(log(trigger(0.75, 0.125)))
    assert (found["attack_success_rate"], found["attack_success_base"]) == (75, 12.5)
    found = score(log(trigger(0.75, 0.125), trigger(0.25, 0.0)))
    assert (found["attack_success_rate"], found["attack_success_base"]) == (50, 6.25)
    found = score(log())
    assert (found["attack_success_rate"], found["attack_success_base"]) == (None, None)


def test_an_attack_on_weights_moves_no_signal_count_and_is_sound() -> None:
    rows = log(act(5, 1, 0) | {"direction": "update"}, tamper(1, 0, 5, 0.5))
    for row in rows:
        if row["type"] == "step":
            row["checked"], row["flagged"] = [10, 0], [0, 0]
    found = score(rows)
    assert (found["outcome"], found["acted"], found["recall"]) == ("defended", 1, 0)
    assert found["flags"]["tampered_checked"] == 0 and found["flags"]["true_flag_rate"] is None


def test_signals_by_hand() -> None:
    # 6 steps after warm-up with 10 honest and 2 tampered signals, of which 1 and 1 are flagged.
    rows = log({"type": "amnesty", "step": 6, "stage": 1, "direction": "activation", "replicas": 3})
    next(row for row in rows if row["type"] == "step")["skipped"] = True
    found = score(rows)
    assert found["flags"] == dict(zip(FLAGS, (60, 6, 12, 6, 0.1, 0.5), strict=True))
    assert (found["skipped_steps"], found["amnesties"]) == (1, 1)
    assert found["state_bytes"] == 640


def test_nobody_acted() -> None:
    quiet = score(log(attackers=()))
    assert (quiet["precision"], quiet["recall"], quiet["f1"]) == (100, 100, 100)
    assert quiet["outcome"] == "defended"
    assert quiet["flags"]["true_flag_rate"] == 0.5
    # One of 12 workers is above 1 %: broken.
    banned = score(log(ban(5, 1, 0), attackers=()))
    assert (banned["precision"], banned["recall"], banned["f1"]) == (0, 100, 0)
    assert banned["outcome"] == "broken" and "1 of 12" in banned["reason"]


def test_an_attacker_banned_before_it_acted_counts_as_honest() -> None:
    for rows in ([ban(5, 1, 0)], [ban(5, 1, 0), act(6, 1, 0)]):
        found = score(log(*rows, act(5, 1, 1), ban(5, 1, 1)))
        assert (found["acted"], found["false_bans"]) == (1, 1)
        assert (found["precision"], found["recall"]) == (50, 100)
        assert found["detection_steps_mean"] == 1


def test_the_first_of_several_acts_counts() -> None:
    found = score(log(act(7, 1, 0), act(5, 1, 0), ban(7, 1, 0)))
    assert found["detection_steps_mean"] == 3


def test_without_a_baseline_there_is_no_excess_loss() -> None:
    found = score(log(attackers=(), baseline=None))
    assert (found["excess_loss"], found["relative_tps"], found["undetected_damage"]) == (None,) * 3
    assert found["outcome"] == "defended"


COST = {"type": "cost", "flops": 30, "step_flops": 120, "bytes": 4096, "steps": 10}


def test_cost_by_hand() -> None:
    # 30 operations beside the 120 of a plain step: a quarter more. As many bytes as were counted.
    found = score(log(COST))
    assert (found["extra_flops"], found["extra_bytes"], found["state_bytes"]) == (0.25, 4096, 640)
    # A count that no float holds exactly.
    found = score(log(COST | {"flops": 2**60 + 1, "step_flops": 2**62}))
    assert found["extra_flops"] == pytest.approx(0.25)
    # Records of an older version have no such row.
    old = score(log())
    assert (old["extra_flops"], old["extra_bytes"], old["state_bytes"]) == (None, None, 640)
    assert old["outcome"] == "defended"


def test_a_cost_without_a_step_to_compare_with_is_unknown() -> None:
    found = score(log(COST | {"step_flops": 0}))
    assert (found["extra_flops"], found["extra_bytes"]) == (None, 4096)


def test_what_is_counted_does_not_slow_a_run() -> None:
    with_cost, without_cost = score(log(COST)), score(log())
    for name in ("tokens_per_second", "relative_tps", "validation_loss", "f1"):
        assert with_cost[name] == without_cost[name]


def test_the_last_evaluation_counts() -> None:
    rows = log(attackers=())
    rows.insert(2, {"type": "eval", "step": 0, "loss": 9.0, "tokens": 10})
    assert score(rows)["validation_loss"] == 2.0


# Outcomes.


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_diverged_run_is_broken(loss: float) -> None:
    found = score(log(act(5, 1, 0), ban(5, 1, 0), loss=loss))
    assert found["outcome"] == "broken" and found["diverged"] is True
    assert found["validation_loss"] is None and found["excess_loss"] is None


def test_damage_above_the_tolerance_is_broken() -> None:
    assert score(log(loss=2.019, baseline=1.97))["outcome"] == "defended"
    found = score(log(loss=2.021, baseline=1.97))
    assert found["outcome"] == "broken" and "0.051" in found["reason"]


def test_what_is_left_out_or_skipped_is_not_counted_as_trained() -> None:
    events = log()
    verified = [e for e in events if e["type"] == "step" and e["step"] >= events[0]["warmup_steps"]]
    full = score(events)["tokens_per_second"]
    verified[0]["excluded"] = events[0]["replicas"] // 2
    verified[1]["skipped"] = True
    n = len(verified)
    half = (events[0]["replicas"] // 2) / events[0]["replicas"]
    expected = full * (n - 1 - half) / n
    assert score(events)["tokens_per_second"] == pytest.approx(expected)


def test_a_defense_that_bans_most_of_a_stage_is_broken() -> None:
    bans = [act(5, 1, 0), *(ban(6, 1, replica) for replica in range(3))]
    found = score(log(*bans))
    assert found["capacity"] == 0.25
    assert found["outcome"] == "broken" and "25.0%" in found["reason"]


def test_an_exhausted_stage_is_broken_though_steps_are_missing() -> None:
    rows = [ban(6, 0, r) for r in range(4)] + [{"type": "exhausted", "step": 6, "stage": 0}]
    found = score(log(*rows, steps=7, status="exhausted"))
    assert found["outcome"] == "broken" and "stage 0" in found["reason"]
    assert found["capacity"] == 0
    assert score(log(*rows, steps=7))["outcome"] == "invalid"
    assert score(log(steps=7, status="exhausted"))["outcome"] == "invalid"


def test_perplexity_that_overflows_is_none() -> None:
    found = score(log(loss=1e4, baseline=1e4))
    assert found["perplexity"] is None and found["diverged"] is False


ERROR = {"type": "error", "party": "defense", "message": "check() returned None"}
STEP = {
    "type": "step",
    "step": 3,
    "seconds": 0.25,
    "checked": [0, 0],
    "flagged": [0, 0],
    "excluded": 0,
}
INVALID = {
    "killed": (without(log(), "end"), "killed"),
    "interrupted": (log(status="interrupted"), "interrupted"),
    "error status": (log(status="error"), "error"),
    "error event": ([*log()[:-1], ERROR, log()[-1]], r"defense: check\(\) returned None"),
    "error and killed": ([*log()[:-1], ERROR], "defense: check"),
    "unknown status": (log(status="fine"), "malformed: .*end.*status"),
    "no start": (without(log(), "start"), "0 start"),
    "two starts": ([log()[0], *log()], "2 start"),
    "two ends": ([*log(), log()[-1]], "more than one end"),
    "two costs": (log(COST, COST), "more than one cost"),
    "cost below zero": (log(COST | {"flops": -1}), r"\(cost\): flops is -1"),
    "half a byte": (log(COST | {"bytes": 0.5}), r"\(cost\): bytes is 0.5"),
    "no plain step": (
        log({k: v for k, v in COST.items() if k != "step_flops"}),
        r"\(cost\): step_flops is None",
    ),
    "no evaluation": (log(loss=None), "no evaluation"),
    "old evaluation": (
        [row | {"step": 3} if row["type"] == "eval" else row for row in log()],
        "last evaluation is of step 3",
    ),
    "diverged baseline": (log(baseline=math.nan), "baseline"),
    "no baseline loss": (
        [row | {"validation_loss": None} if row["type"] == "baseline" else row for row in log()],
        "baseline",
    ),
    "missing step": ([row for row in log() if row.get("step") != 4], "0 to 9"),
    "last step missing": (log(steps=9), "0 to 9"),
    "step twice": ([*log()[:6], STEP, *log()[6:]], "0 to 9"),
    "ban outside": (log(ban(5, 3, 0)), r"worker \(3, 0\).*outside"),
    "ban of replica outside": (log(ban(5, 0, 4)), r"worker \(0, 4\).*outside"),
    "ban in warm-up": (log(ban(3, 1, 0)), "warm-up"),
    "ban after the end": (log(ban(10, 1, 0)), "step 10 of 10"),
    "flag in warm-up": (log(worker("flag", 0, 1, 0)), "warm-up"),
    "act of an honest worker": (log(act(5, 0, 0)), "no attacker"),
    "tamper of one who never acted": (
        log(act(5, 1, 0), tamper(1, 0, 1, 0.5), tamper(1, 1, 1, 0.5)),
        r"worker \(1, 1\) never acted",
    ),
    "two tamper rows": (
        log(act(5, 1, 0), tamper(1, 0, 1, 0.5), tamper(1, 0, 1, 0.5)),
        r"worker \(1, 0\) has a second tamper",
    ),
    "tamper outside": (log(act(5, 1, 0), tamper(1, 4, 1, 0.5)), r"worker \(1, 4\).*outside"),
    "tamper row missing": (
        log(act(5, 1, 0), act(5, 1, 1), tamper(1, 0, 1, 0.5)),
        r"no tamper event of worker \(1, 1\)",
    ),
    "size above one": (log(act(5, 1, 0), tamper(1, 0, 1, 1.5)), r"\(tamper\): size is 1.5"),
    "size below zero": (log(act(5, 1, 0), tamper(1, 0, 1, -0.5)), r"\(tamper\): size is -0.5"),
    "size not a number": (log(act(5, 1, 0), tamper(1, 0, 1, math.nan)), "size is nan"),
    "half a signal": (log(act(5, 1, 0), tamper(1, 0, 0.5, 0.5)), "signals is 0.5"),  # type: ignore[arg-type]
    "success above one": (log(trigger(1.5, 0.0)), r"\(trigger\): rate is 1.5"),
    "base below zero": (log(trigger(0.5, -0.1)), r"\(trigger\): base is -0.1"),
    "knowledge no text": (
        [{**log()[0], "attackers": [{"stage": 1, "replica": 0, "knowledge": 3}]}, *log()[1:]],
        "malformed: .*attackers",
    ),
    "two bans": (log(ban(5, 1, 0), ban(6, 1, 0)), "second time"),
    "attacker outside": (log(attackers=((9, 0),)), "outside"),
    "more flagged than checked": (
        [
            row | {"flagged": [11, 0], "excluded": 0} if row.get("step") == 5 else row
            for row in log()
        ],
        "more signals flagged",
    ),
    "seconds missing": (
        [{k: v for k, v in row.items() if k != "seconds"} for row in log()],
        "malformed: event 3 .step.: seconds",
    ),
    "huge grid": ([log()[0] | {"stages": 2**40}, *log()[1:]], "grid"),
    "no events": ([], "killed"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid(name: str) -> None:
    events, reason = INVALID[name]
    found = score(events)
    assert found["outcome"] == "invalid"
    assert re.search(reason, found["reason"]), found["reason"]
    assert all(found[metric] is None for metric in METRICS)


FULL = log(
    *(act(5, 1, 0), act(5, 1, 1), act(6, 2, 3), ban(5, 1, 0), ban(8, 1, 1), ban(6, 0, 0)),
    worker("flag", 5, 1, 0, direction="activation", tampered=True, statistics={"l1": [1, 0, 2]}),
    {"type": "amnesty", "step": 6, "stage": 1, "direction": "activation", "replicas": 3},
    *(tamper(1, 0, 3, 0.5), tamper(1, 1, 4, 0.25), tamper(2, 3, 1, 1.0), trigger(0.5, 0.25)),
    COST,
)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


def check(events: Events) -> None:
    found = score(events)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {"outcome", "reason", "flags", *METRICS}
    complete = [row.get("status") for row in events if row.get("type") == "end"] == ["complete"]
    assert complete or found["outcome"] != "defended"
    assert (found["reason"] is None) == (found["outcome"] == "defended")


@settings(deadline=None)
@given(st.integers(0, len(FULL) - 1), st.integers(0, len(FULL)))
def test_a_truncated_log_is_invalid(end: int, start: int) -> None:
    check(FULL[start:])
    check(FULL[:end])
    assert score(FULL[:end])["outcome"] == "invalid"


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_mutilated_log_never_raises(data: st.DataObject) -> None:
    events = copy.deepcopy(FULL)
    for _ in range(data.draw(st.integers(1, 3))):
        row = events[data.draw(st.integers(0, len(events) - 1))]
        key = data.draw(st.sampled_from(sorted(row)))
        row[key] = data.draw(JUNK)
    keep = data.draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
    check(events)
    check([row for row, kept in zip(events, keep, strict=True) if kept])


def test_the_order_in_which_keys_stand_does_not_matter() -> None:
    assert score([dict(reversed(row.items())) for row in FULL]) == score(FULL)


# Results.


def cell(**seeds: int) -> Cell:
    scenario = Scenario(track="core", seeds=Seeds(**seeds))
    attack, defense = Component.parse("sign:scale=2"), Component.parse("sentinel")
    return Cell(scenario=scenario, attack=attack, defense=defense)


def config(**seeds: int) -> dict[str, Any]:
    identity = cell(**seeds).model_dump(mode="json")
    key = record.digest(identity)
    return {"cell": identity, "identity": identity, "digest": key, "commands": ["sentinel-bench x"]}


def test_a_result_names_its_cell() -> None:
    found = result(config(data=3), FULL, {"python": "3.11"})
    assert found["schema"] == 1 and found["finished"] == "2026-01-01T00:01:00Z"
    assert found["digest"] == config(data=3)["digest"]
    names = {k: found["cell"][k] for k in ("track", "attack", "mode", "defense", "seeds")}
    assert names == {
        "track": "core",
        "attack": "sign:scale=2",
        "mode": "activation",
        "defense": "sentinel",
        "seeds": {"model": 0, "data": 3, "threat": 0},
    }
    assert found["scores"] == score(FULL)
    assert found["commands"] == ["sentinel-bench x"]
    json.dumps(found, allow_nan=False)


def dealt(*attackers: dict[str, Any]) -> Events:
    """A run whose attackers say these things of themselves."""
    first, *rest = log()
    who = [{"stage": 1, "replica": r} | attacker for r, attacker in enumerate(attackers)]
    return [first | {"attackers": who}, *rest]


@pytest.mark.parametrize(
    "attackers, mode, knowledge",
    [
        ([{"mode": "both", "knowledge": "own"}] * 2, "both", "own"),
        ([{"mode": "update", "knowledge": "honest+detector"}], "update", "honest+detector"),
        (
            [
                {"mode": "gradient", "knowledge": "model"},
                {"mode": "both", "knowledge": "colluders+honest"},
                {"mode": "both", "knowledge": "own"},
            ],
            "mixed",
            "colluders+honest+model",
        ),
        ([{"mode": "both"}], "both", ""),
        ([{"mode": "both", "knowledge": "own"}, {"mode": "both"}], "both", ""),
        ([{"mode": 3, "knowledge": "own"}], "activation", ""),
        ([{}], "activation", ""),
        ([], "activation", ""),
    ],
)
def test_mode_and_knowledge_are_those_of_all_attackers(
    attackers: list[dict[str, Any]], mode: str, knowledge: str
) -> None:
    found = result(config(), dealt(*attackers), {})["cell"]
    assert (found["mode"], found["knowledge"]) == (mode, knowledge)


def test_a_run_that_failed_before_its_start_has_the_mode_of_its_settings() -> None:
    found = result(config(), [ERROR, log()[-1]], {})["cell"]
    assert (found["mode"], found["knowledge"]) == ("activation", "")


def test_the_scenario_of_a_result_does_not_hold_seeds() -> None:
    one, two = (result(config(data=seed), FULL, {}) for seed in (1, 2))
    assert one["cell"]["scenario"] == two["cell"]["scenario"]
    assert one["digest"] != two["digest"]


def written(tmp_path: Path) -> Path:
    with record.RunFolder.create(tmp_path, cell().label, config()) as run:
        for row in FULL:
            run.append(row["type"], **{k: v for k, v in row.items() if k != "type"})
        stored = record.read_config(run.path)
        run.finish(result(stored, record.read_events(run.path), record.provenance()))
    return run.path


def test_faults_are_part_of_the_scenario_of_a_result_unless_they_are_handled_as_ever() -> None:
    def key(**faults: Any) -> str:
        changed = copy.deepcopy(config())
        changed["cell"]["scenario"]["faults"].update(faults)
        return str(result(changed, FULL, {})["cell"]["scenario"])

    older = config()
    del older["cell"]["scenario"]["faults"]
    assert key() == result(older, FULL, {})["cell"]["scenario"]
    assert len({key(), key(on_crash="ban"), key(deadline=2.0)}) == 3


def test_where_everybody_who_acted_did_no_harm_there_is_nothing_to_weigh() -> None:
    found = score(log(act(5, 1, 0), tamper(1, 0, 9, 0.0)))
    assert (found["recall"], found["f1"], found["harm_weighted_recall"]) == (0, 0, None)


def test_rescore_of_an_honest_result_finds_no_difference(tmp_path: Path) -> None:
    assert rescore(written(tmp_path)) == (score(FULL), [])


def test_rescore_names_what_was_changed(tmp_path: Path) -> None:
    folder = written(tmp_path)
    stored = record.read_result(folder)
    assert stored is not None
    stored["scores"]["recall"] = 100.0
    stored["scores"]["flags"]["honest_flagged"] = 0
    stored["cell"]["defense"] = "mine"
    (folder / record.RESULT).write_text(json.dumps(stored))
    scores, differences = rescore(folder)
    assert scores == score(FULL)
    assert [line.split(":")[0] for line in differences] == [
        "cell.defense",
        "scores.flags.honest_flagged",
        "scores.recall",
    ]
    (folder / record.RESULT).unlink()
    assert rescore(folder)[1] == ["result.json is missing"]
