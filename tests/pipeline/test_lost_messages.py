"""Messages that never come or come late: what follows, what is waited for, and what is learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from scripted import (
    FROZEN,
    LEARNED,
    SEEN,
    Events,
    Lab,
    Plain,
    Quiet,
    assert_close,
    attackers,
    equal,
    only,
    spy_gradients,
    weights,
)

from sentinel_bench import suite
from sentinel_bench.api import (
    Attack,
    AttackContext,
    Late,
    ResponseParams,
    Silence,
    UpdateContext,
)
from sentinel_bench.config import Component, FaultConfig, Frozen
from sentinel_bench.defenses.none import NoDefense
from sentinel_bench.errors import FaultError, PluginError
from sentinel_bench.ledger import Ledger
from sentinel_bench.pipeline.inspect import Inspector
from sentinel_bench.pipeline.session import Session
from sentinel_bench.pipeline.tamper import Sent
from sentinel_bench.pipeline.transport import Transport
from sentinel_bench.record import read_events
from sentinel_bench.score import score

ONE = {"threat__honest_last": 2, "threat__schedule": "at-once"}
"""One attacker, at stage 1; it begins at step 4 of 12."""
BAN = {"faults__on_crash": "ban", **ONE}
MODES = ["activation", "gradient", "both"]
DEFENSES = [
    *((d, m) for d in ("none", "script", "sentinel") for m in MODES),
    *((d, "both") for d in ("averaging", "coherence", "skip-layer", "duplicate-work", "cascade")),
]
every_mode = pytest.mark.parametrize("mode", MODES)


class OddParams(Frozen):
    what: Literal["nan", "inf", "minus", "text", "nothing", "short", "zeros", "at once", "grown"]
    seconds: float = 0.5


class Odd(Attack[OddParams]):
    """Late, and odd in another way."""

    name = "odd"
    goal = formula = source = "test"
    Params = OddParams

    def signal(self, x: Any, ctx: AttackContext) -> Any:
        seconds = {"nan": torch.nan, "inf": torch.inf, "minus": -1, "text": "1", "at once": 0}
        signal = {"nothing": None, "short": x[:, :-1], "zeros": x * 0, "grown": x * 2}
        return Late(
            signal.get(self.params.what, x), seconds.get(self.params.what, self.params.seconds)
        )


class Strike(Attack[Any]):
    """Contributes nothing to the update of its stage."""

    name = "strike"
    goal = formula = source = "test"
    axis = "weights"

    def update(self, grad: Any, ctx: UpdateContext) -> Any:
        return Silence()


class Walkout(Attack[Any]):
    """Holds late weights."""

    name = "walkout"
    goal = formula = source = "test"
    axis = "weights"

    def inject(self, weights: Any, ctx: AttackContext) -> Any:
        return Late(weights, 1.0)


@pytest.fixture(autouse=True)
def _plugged(plug: Callable[..., None]) -> None:
    plug(Odd, Strike, Walkout)


def workers(events: Events, kind: str) -> list[tuple[int, int, int]]:
    return [(row["step"], row["stage"], row["replica"]) for row in events.of(kind)]


def waits(events: Events) -> list[float]:
    return [row.get("waited", 0.0) for row in events.of("step")]


def finite(session: Session) -> bool:
    return all(bool(w.isfinite().all()) for w in weights(session).values())


def scored(lab: Lab, attack: str, defense: str, **changes: Any) -> dict[str, Any]:
    """Return the scores of a cell, next to a run in which everybody is honest."""
    events, _ = lab.run(attack, defense, **changes)
    honest, _ = lab.run("none", "none", **changes)
    crowd = [{"stage": a.stage, "replica": a.replica} for a in attackers(lab, attack, **changes)]
    shape = {"stages": 4, "replicas": 4, "steps": 12, "warmup_steps": 4}
    rows = [
        {"type": "start", **shape, "tokens_per_step": 32, "attackers": crowd, "state_bytes": 0},
        {
            "type": "baseline",
            "validation_loss": honest.of("eval")[0]["loss"],
            "tokens_per_second": None,
        },
        *events.rows,
        {"type": "end", "status": "exhausted" if events.of("exhausted") else "complete"},
    ]
    return score(rows)


# --- a crash without any handling -----------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("defense", ["none", "sentinel"])
def test_a_crash_ends_the_run_and_says_who_when_and_what_to_do(
    lab: Lab, mode: str, defense: str
) -> None:
    (a,) = attackers(lab, "crash", threat__mode=mode, **ONE)
    what = "gradient" if mode == "gradient" else "activation"
    with pytest.raises(FaultError) as error:
        lab.run("crash:after=3", defense, threat__mode=mode, **ONE)
    assert str(error.value) == (
        f"stage 1, replica {a.replica} sent no {what} at step 7 (a simulated crash): "
        "rerun with --on-crash ban to survive it"
    )


def test_a_crash_makes_its_own_cells_invalid_and_leaves_the_others_alone(
    lab: Lab, tmp_path: Path
) -> None:
    parse = Component.parse
    cells = [parse(a) for a in ("crash", "zeros")], [parse("none")]
    plan = suite.make_plan([lab.scenario(**ONE)], *cells, {})
    done = suite.run(plan, tmp_path, Quiet(), threads=1)
    assert {f.cell.attack.name for f in done if not f.valid} == {"crash"}
    scores = done[1].result["scores"]
    assert scores["outcome"] == "invalid"
    assert scores["reason"].startswith("fault: stage 1, replica ")
    rows = read_events(done[2].folder)
    zeros, _ = lab.run("zeros", "none", **ONE)
    assert [r["loss"] for r in rows if r["type"] == "step"] == [r["loss"] for r in zeros.of("step")]


# --- a crash that is survived ---------------------------------------------------------------------


@pytest.mark.parametrize(("defense", "mode"), DEFENSES)
def test_a_crash_is_a_ban_at_its_step_under_every_defense_and_training_goes_on(
    lab: Lab, defense: str, mode: str
) -> None:
    events, session = lab.run("crash:after=2", defense, threat__mode=mode, **BAN)
    ((step, stage, replica),) = workers(events, "act")
    assert (step, stage) == (6, 1)
    (ban,) = [b for b in events.of("ban") if b["reason"] == "crash"]
    assert (ban["step"], ban["stage"], ban["replica"]) == (6, 1, replica)
    assert [row["tampered"] > 0 for row in events.of("step")] == [False] * 6 + [True] + [False] * 5
    assert not any(f["tampered"] for f in events.of("flag"))  # a timeout is no verdict
    (tamper,) = events.of("tamper")
    assert tamper["size"] == 1
    assert len(events.of("step")) == 12
    assert finite(session)
    assert events.of("eval")[0]["loss"] < 100


@every_mode
@pytest.mark.parametrize("defense", ["none", "script"])
def test_a_crash_that_is_survived_scores_as_found_at_once(
    lab: Lab, mode: str, defense: str
) -> None:
    found = scored(lab, "crash:after=2", defense, threat__mode=mode, **BAN)
    assert [found[k] for k in ("precision", "recall", "f1", "harm_weighted_recall")] == [100] * 4
    assert (found["banned"], found["detection_steps_mean"], found["false_bans"]) == (1, 1, 0)
    assert found["flags"]["tampered_checked"] == 0


@every_mode
def test_the_lost_message_is_shown_as_zeros_and_tested_by_nobody(lab: Lab, mode: str) -> None:
    events, _ = lab.run("crash", "script", threat__mode=mode, **BAN)
    ((_, _, bad),) = workers(events, "act")
    first = "gradient" if mode == "gradient" else "activation"
    shown = next(s for s in SEEN if (s.step, s.stage, s.direction) == (4, 1, first))
    assert not shown.sent[bad].any()
    assert shown.active == [r != bad for r in range(4)]
    learned = next(c for t, s, d, c in LEARNED if (t, s, d) == (4, 1, first))
    assert learned == [r != bad for r in range(4)]
    order = [("activation", s) for s in range(3)] + [("gradient", s) for s in (3, 2, 1)]
    tested = {(s.direction, s.stage): s.active[bad] for s in SEEN if s.step == 4}
    at = order.index((first, 1))
    assert [tested[place] for place in order] == [True] * at + [False] * (6 - at)  # tainted
    # from the next step on an honest replica has taken over, and nobody looks at that place
    later = [s for s in SEEN if s.step == 5]
    assert all(s.sent[bad].any() for s in later)
    assert {(s.stage, s.direction) for s in later if not s.active[bad]} == {
        (1, "activation"),
        (1, "gradient"),
    }


@pytest.mark.parametrize("defense", ["none", "script"])
def test_after_the_step_of_the_crash_the_place_is_honest(lab: Lab, defense: str) -> None:
    frozen = {"train__lr": 1e-30, "train__weight_decay": 0.0, "threat__mode": "both"}
    crashed, _ = lab.run("crash:after=2", defense, **frozen, **BAN)
    honest, _ = lab.run("none", defense, **frozen, **BAN)
    pairs = [
        (a["loss"] == b["loss"], a["grad_norm"] == b["grad_norm"])
        for a, b in zip(crashed.of("step"), honest.of("step"), strict=True)
    ]
    assert pairs[:6] + pairs[7:] == [(True, True)] * 11
    assert pairs[6] == (False, False)


@pytest.mark.parametrize("policy", ["bans=false", "amnesty=true,violations=1", "quarantine=true"])
@pytest.mark.parametrize("defense", ["none", "script"])
def test_whatever_the_response_says_a_crash_bans(lab: Lab, policy: str, defense: str) -> None:
    majority = {"threat__fraction": 0.75, "threat__allow_majority": True}
    events, session = lab.run("crash:after=1", f"{defense}:{policy}", **majority, **BAN)
    assert workers(events, "ban") == workers(events, "act")
    assert len(events.of("ban")) == 3
    assert not events.of("amnesty")
    assert finite(session)


@pytest.mark.parametrize("defense", ["none", "script"])
def test_a_stage_in_which_all_crash_is_exhausted(lab: Lab, defense: str) -> None:
    everybody = {"threat__fraction": 1.0, "threat__allow_majority": True}
    events, session = lab.run("crash", defense, threat__mode="both", **everybody, **BAN)
    assert events.of("exhausted") == [{"type": "exhausted", "step": 4, "stage": 1}]
    assert len(events.of("step")) == 5
    assert finite(session)


def test_crashes_at_two_places_of_one_rank_in_one_step_are_both_found(lab: Lab) -> None:
    found = []
    for seed in range(8):  # until two attackers share a rank
        open_two = {"threat__honest_last": 1, "seeds__threat": seed}
        events, _ = lab.run("crash", "none", **{**BAN, **open_two})
        assert sorted(workers(events, "ban")) == sorted(workers(events, "act"))
        assert len(events.of("ban")) == 2
        found.append(len({replica for *_, replica in workers(events, "ban")}))
    assert 1 in found


@pytest.mark.parametrize("recovery", ["restart", "skip-layer"])
def test_a_pass_with_a_lost_message_is_done_again_where_a_defense_wants_that(
    lab: Lab, recovery: str
) -> None:
    late = {"faults__deadline": 0.25, **BAN}
    events, session = lab.run("crash", f"redundant-block:recovery={recovery},tries=2", **late)
    rows = [r for r in events.of("recovery") if r["step"] == 4]
    assert [r["skip"] for r in rows] == ([False, False, True] if recovery == "restart" else [False])
    assert all(r["suspects"] == [1] for r in rows)
    # each pass in which stage 1 sends waits anew
    assert waits(events)[4] == (0.75 if recovery == "restart" else 0.25)
    assert waits(events)[5:] == [0.0] * 7
    assert workers(events, "ban") == workers(events, "act")
    assert finite(session)


# --- a rank without its worker: exact -------------------------------------------------------------

EXACT = {**FROZEN, "train__steps": 3, "faults__on_crash": "ban", **only(1, 4)}


@every_mode
@pytest.mark.parametrize("defense", ["none", "script"])
def test_under_quarantine_the_rank_of_a_lost_message_leaves_no_trace(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, defense: str, mode: str
) -> None:
    kept, grid = spy_gradients(monkeypatch), {**EXACT, "threat__mode": mode}
    events, _ = lab.run("crash", f"{defense}:quarantine=true", **grid)
    ((_, _, bad),) = workers(events, "ban")
    assert [row["excluded"] for row in events.of("step")] == [1, 0, 0]
    plain = Plain(lab.scenario(**grid), lab.tokens)
    assert_close(kept[0], plain.mean([r for r in range(4) if r != bad]))
    assert_close(kept[1], plain.mean(range(4), step=1))  # rerouted


@every_mode
@pytest.mark.parametrize("defense", ["none", "script"])
def test_where_nobody_takes_over_the_rank_is_gone_from_the_next_step_on(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, defense: str, mode: str
) -> None:
    kept, grid = spy_gradients(monkeypatch), {**EXACT, "threat__mode": mode}
    events, _ = lab.run("crash", f"{defense}:on_ban=drop", **grid)
    ((step, _, bad),) = workers(events, "ban")
    assert step == 0
    assert [row["excluded"] for row in events.of("step")] == [0, 1, 1]
    plain = Plain(lab.scenario(**grid), lab.tokens)
    for step in (1, 2):
        assert_close(kept[step], plain.mean([r for r in range(4) if r != bad], step=step))


@pytest.mark.parametrize("defense", ["none", "script:substitute=zeros"])
def test_upstream_of_a_lost_activation_the_rank_counts_as_zero(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, defense: str
) -> None:
    """As for one that cannot be read: its gradient is replaced at every boundary of that step."""
    kept, grid = spy_gradients(monkeypatch), {**EXACT, "threat__mode": "activation"}
    events, _ = lab.run("crash", defense, **grid)
    ((_, _, bad),) = workers(events, "ban")
    plain = Plain(lab.scenario(**grid), lab.tokens)
    expected = plain.mean(range(4), lambda stage, r: float(r != bad))
    for stage in (0, 1):
        assert_close(plain.flat(kept[0], stage), plain.flat(expected, stage))


@pytest.mark.parametrize("direction", ["activation", "gradient"])
def test_what_others_send_of_a_rank_that_was_dropped_goes_nowhere(
    direction: Literal["activation", "gradient"],
) -> None:
    defense = NoDefense(ResponseParams(on_ban="drop"))
    ledger = Ledger(defense.params, 3, 4)
    ledger.crash(2, 0)
    ledger.end_step()
    lies = torch.full((4, 1, 2, 3), torch.nan)
    inspector = Inspector(defense, ledger, Events())
    message = Sent(lies, [True] * 4, [True] * 4)
    x, tainted = inspector.inspect(1, direction, 0, message, None, [False] * 4)
    assert not x[0].any()
    assert x[1:].isnan().all()
    assert tainted == [False] * 4


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("defense", ["none", "script"])
@pytest.mark.parametrize(("mode", "crossings"), [("activation", 1), ("gradient", 1), ("both", 2)])
def test_a_straggler_costs_the_simulated_seconds_and_nothing_else(
    lab: Lab, defense: str, mode: str, crossings: int
) -> None:
    grid = {"grid__replicas": 3, "threat__fraction": 0.34}  # 1/3 is no binary fraction
    late, one = lab.run("straggle:seconds=40", defense, threat__mode=mode, **grid, **ONE)
    honest, other = lab.run("none", defense, threat__mode=mode, **grid, **ONE)
    assert waits(late) == [0.0] * 4 + [40.0 * crossings] * 8
    assert all("waited" not in row for row in late.of("step")[:4] + honest.of("step"))
    for row, wait in zip(late.of("step"), waits(late), strict=True):
        assert row["seconds"] > wait
    assert equal(weights(one), weights(other))  # to the bit
    keys = ("loss", "grad_norm", "excluded", "flagged")
    assert [[r[k] for k in keys] for r in late.of("step")] == [
        [r[k] for k in keys] for r in honest.of("step")
    ]
    assert [row["tampered"] for row in late.of("step")] == [0] * 4 + [crossings] * 8
    assert workers(late, "act") == [(4, 1, late.of("act")[0]["replica"])]
    assert late.of("tamper")[0]["size"] == 0
    assert not late.of("ban")


def test_stragglers_side_by_side_are_waited_for_once_and_in_sequence_twice(lab: Lab) -> None:
    two = {"threat__fraction": 0.5, "threat__allow_majority": True}
    events, _ = lab.run("straggle", "none", **two, **ONE)
    assert events.of("step")[4]["tampered"] == 2
    assert waits(events)[4] == 0.5
    events, _ = lab.run("straggle", "none", **{**ONE, "threat__honest_last": 1})
    assert events.of("step")[4]["tampered"] == 2
    assert waits(events)[4] == 1.0


def test_a_straggler_is_no_ban_and_the_score_says_so(lab: Lab) -> None:
    found = scored(lab, "straggle:seconds=1000", "script", **ONE)
    assert [found[k] for k in ("acted", "banned", "recall", "f1")] == [1, 0, 0, 0]
    assert found["harm_weighted_recall"] is None
    assert found["excess_loss"] == 0
    # 8 steps of 4 x 1 x 8 tokens, and more than 8000 s
    assert found["tokens_per_second"] < 256 / 8000
    assert found["outcome"] == "defended"


@pytest.mark.parametrize("deadline", [0.5, 0.6, 7])
@pytest.mark.parametrize("handling", ["end", "ban"])
def test_what_comes_by_the_deadline_is_not_lost(lab: Lab, deadline: float, handling: str) -> None:
    patient = {"faults__deadline": deadline, "faults__on_crash": handling}
    events, _ = lab.run("straggle", "none", **patient, **ONE)
    assert waits(events) == [0.0] * 4 + [0.5] * 8
    assert not events.of("ban")


@every_mode
@pytest.mark.parametrize("defense", ["none", "script"])
def test_what_comes_after_the_deadline_is_lost_and_no_longer_waited_for(
    lab: Lab, defense: str, mode: str
) -> None:
    short = {"faults__deadline": 0.25, "threat__mode": mode, **BAN}
    events, session = lab.run("straggle", defense, **short)
    assert [b["reason"] for b in events.of("ban")] == ["crash"]
    assert workers(events, "ban") == workers(events, "act")
    crossings = 2 if mode == "both" else 1
    assert waits(events) == [0.0] * 4 + [0.25 * crossings] + [0.0] * 7
    assert finite(session)
    # to the receiver it is a crash
    crashed, other = lab.run("crash", defense, **short)
    assert waits(crashed) == waits(events)
    assert equal(weights(session), weights(other))
    found = scored(lab, "straggle", defense, **short)
    assert (found["f1"], found["harm_weighted_recall"]) == (100, 100)


def test_past_the_deadline_without_handling_the_run_ends_and_says_why(lab: Lab) -> None:
    (a,) = attackers(lab, "straggle", **ONE)
    with pytest.raises(FaultError) as error:
        lab.run("straggle", "none", faults__deadline=0.25, **ONE)
    assert str(error.value) == (
        f"stage 1, replica {a.replica} sent its activation of step 4 0.5 s late, past the "
        "deadline of 0.25 s (simulated): rerun with --on-crash ban to survive it"
    )


def test_without_a_deadline_a_closed_connection_is_seen_at_once(lab: Lab) -> None:
    events, _ = lab.run("crash", "none", threat__mode="both", **BAN)
    assert waits(events) == [0.0] * 12
    events, _ = lab.run("crash", "none", threat__mode="both", faults__deadline=3, **BAN)
    assert waits(events) == [0.0] * 4 + [6.0] + [0.0] * 7


def test_the_cost_of_a_defense_is_counted_without_faults(lab: Lab) -> None:
    cell = lab.cell("straggle", "script", faults__deadline=0.1, **ONE)
    session = lab.session([cell])
    before = session.cost(cell)
    assert lab.session([lab.cell("none", "script")]).cost(lab.cell("none", "script")) == before


# --- the transport by itself ----------------------------------------------------------------------


def sent(missing: str = "....", late: tuple[float, ...] = (0, 0, 0, 0)) -> Sent:
    gone = [c == "x" for c in missing]
    return Sent(torch.zeros(4, 1, 2, 3), gone, [not g for g in gone], gone, list(late))


def transport(on_ban: str = "reroute", **faults: Any) -> tuple[Transport, Ledger]:
    ledger = Ledger(ResponseParams.model_validate({"on_ban": on_ban}), 3, 4)
    return Transport(FaultConfig.model_validate(faults), ledger), ledger


def test_a_crossing_takes_as_long_as_its_latest_message_and_crossings_add_up() -> None:
    post, _ = transport()
    assert post.deliver(1, "activation", 0, sent()) is not None
    assert post.take() == 0
    post.deliver(1, "activation", 0, sent(late=(0.5, 2, 0, 1)))
    post.deliver(1, "gradient", 0, sent(late=(0.25, 0, 0, 0)))
    assert post.take() == 2.25
    assert post.take() == 0


def test_a_message_without_the_marks_came_in_time() -> None:
    post, _ = transport(on_crash="ban", deadline=1)
    x, yes, no = torch.zeros(4, 1, 2, 3), [True] * 4, [False] * 4
    plain = Sent(x, no, yes)
    assert post.deliver(1, "activation", 0, plain) is plain
    assert post.deliver(1, "activation", 0, Sent(x, no, yes, late=[0, 0.5, 0, 0])).missing == no
    assert post.take() == 0.5
    gone = [True, False, False, False]
    assert post.deliver(1, "activation", 0, Sent(x, no, yes, gone)).missing == gone
    assert post.take() == 1


def test_nothing_is_expected_of_a_rank_that_is_lost() -> None:
    for handling in ("end", "ban"):
        post, ledger = transport("drop", on_crash=handling, deadline=1)
        ledger.crash(2, 0)
        ledger.end_step()
        arrived = post.deliver(1, "activation", 0, sent("x...", (9, 0, 0, 0)))
        assert arrived.missing == [False] * 4
        assert post.take() == 0
        assert ledger.end_step() == []


def test_the_first_of_two_lost_messages_is_named() -> None:
    post, _ = transport()
    with pytest.raises(FaultError, match="stage 2, replica 1 sent no gradient at step 9"):
        post.deliver(2, "gradient", 9, sent(".x.x"))


# --- what an attack may return --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nan", "inf", "minus", "text"])
def test_a_delay_that_is_no_time_is_the_attacks_fault(lab: Lab, what: str) -> None:
    with pytest.raises(PluginError, match=r"attack odd \(step 4.* is late by .*: no sec") as error:
        lab.run(f"odd:what={what}", "none", **ONE)
    assert error.value.party == "attack"


def test_what_is_late_has_to_be_a_tensor(lab: Lab) -> None:
    with pytest.raises(PluginError, match="returned NoneType, no tensor"):
        lab.run("odd:what=nothing", "none", **ONE)


def test_a_delay_of_nothing_is_honest(lab: Lab) -> None:
    events, _ = lab.run("odd:what=at once", "script", **ONE)
    assert not events.of("act")


@every_mode
def test_a_lie_may_be_late_too(lab: Lab, mode: str) -> None:
    events, _ = lab.run("odd:what=short", "script", threat__mode=mode, **ONE)
    assert [b["reason"] for b in events.of("ban")] == ["severe"]  # read, and not understood
    assert waits(events)[4] == 0.5 * (2 if mode == "both" else 1)
    events, _ = lab.run("odd:what=zeros", "script", threat__mode=mode, **ONE)
    plain, _ = lab.run("liar:what=zeros", "script", threat__mode=mode, **ONE)
    assert [r["loss"] for r in events.of("step")] == [r["loss"] for r in plain.of("step")]
    assert events.of("tamper")[0]["size"] == plain.of("tamper")[0]["size"] == 0.5
    assert waits(events)[4:] == [0.5 * (2 if mode == "both" else 1)] * 8


@pytest.mark.parametrize(("attack", "what"), [("strike", "Silence"), ("walkout", "Late")])
def test_where_nothing_is_sent_nothing_can_be_missing_or_late(
    lab: Lab, attack: str, what: str
) -> None:
    with pytest.raises(PluginError, match=f"attack {attack} .* returned {what}, no tensor") as e:
        lab.run(attack, "none", **BAN)
    assert e.value.party == "attack"


def test_who_poisons_itself_cannot_be_silent_and_is_told_what_to_do(lab: Lab) -> None:
    poison = {"threat__poison_self": True, "threat__mode": "gradient"}
    with pytest.raises(PluginError, match=r"returned Silence.*set threat\.poison_self to false"):
        lab.run("crash", "none", **poison, **BAN)


def test_the_same_run_comes_out_twice(lab: Lab) -> None:
    runs = [
        lab.run("straggle:rate=.5", "script", threat__mode="both", **ONE)[0].timeless()
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_each_message_is_late_by_a_draw_of_its_own(lab: Lab) -> None:
    events, _ = lab.run("straggle:rate=.5", "none", threat__mode="both", **ONE)
    assert set(waits(events)) == {0.0, 0.5, 1.0}
