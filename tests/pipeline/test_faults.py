"""Lies of a worker end as verdicts; broken plugins end as an invalid cell, and theirs alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import LEARNED, SEEN, Events, Lab, script, weights

from sentinel_bench import suite
from sentinel_bench.api import Defense, Signals
from sentinel_bench.config import Component
from sentinel_bench.pipeline.session import Session
from sentinel_bench.record import read_events

LIES = ["nan", "inf", "short", "double", "sparse"]
ONE = {"threat__honest_last": 2}
"""One attacker, at stage 1."""


class Quiet:
    """Shows nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def start(self, label: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def finish(self) -> None: ...


def finite(session: Session) -> bool:
    return all(bool(w.isfinite().all()) for w in weights(session).values())


@pytest.mark.parametrize("mode", ["activation", "gradient"])
@pytest.mark.parametrize("lie", LIES)
def test_an_unreadable_or_infinite_signal_is_a_verdict_and_a_ban(
    lab: Lab, lie: str, mode: str
) -> None:
    events, session = lab.run(f"liar:what={lie}", "script", threat__mode=mode, **ONE)
    act = events.of("act")[0]
    worker = (act["stage"], act["replica"])
    assert [(b["step"], b["stage"], b["replica"], b["reason"]) for b in events.of("ban")] == [
        (4, *worker, "severe")
    ]
    assert [(f["step"], f["stage"], f["replica"]) for f in events.of("flag")] == [(4, *worker)]
    assert len(events.of("step")) == 12
    assert not any(row.get("skipped") for row in events.of("step"))
    assert finite(session)
    shown = next(s for s in SEEN if (s.step, s.stage, s.direction) == (4, 1, mode))
    assert not shown.active[act["replica"]]
    assert not shown.sent[act["replica"]].any()
    learned = next(c for t, s, d, c in LEARNED if (t, s, d) == (4, 1, mode))
    assert learned == [r != act["replica"] for r in range(4)]
    assert events.of("eval")[0]["loss"] < 100


@pytest.mark.parametrize("mode", ["activation", "gradient", "both"])
@pytest.mark.parametrize("lie", LIES)
def test_without_a_defense_a_lie_breaks_the_training_and_not_the_run(
    lab: Lab, tmp_path: Path, lie: str, mode: str
) -> None:
    plan = suite.make_plan(
        [lab.scenario(threat__mode=mode, **ONE)],
        [Component.parse(f"liar:what={lie}")],
        [Component.parse("none")],
        {},
    )
    scores = suite.run(plan, tmp_path, Quiet(), threads=1)[1].result["scores"]
    assert scores["acted"] == 1
    if lie in ("nan", "inf"):
        assert (scores["outcome"], scores["diverged"]) == ("broken", True)
    else:  # read as zeros
        assert scores["outcome"] in ("broken", "defended")


def test_most_of_a_stage_sending_nan_leaves_training_finite(lab: Lab) -> None:
    majority = {"threat__fraction": 0.75, "threat__allow_majority": True, **ONE}
    for policy in ("amnesty=true", "amnesty=false", "quarantine=true", "on_ban=drop"):
        events, session = lab.run("liar:what=nan", f"script:{policy}", **majority)
        assert finite(session), policy
        assert len(events.of("eval")) == 1


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_tainted_rank_that_then_sends_nan_poisons_nobody(lab: Lab, quarantine: bool) -> None:
    events, _ = lab.run("liar:what=nan", "script", threat__mode="both", **ONE)
    bad = events.of("act")[0]["replica"]
    flag = (4, 0, "activation", bad)
    events, session = lab.run(
        "liar:what=nan", script(flag, quarantine=quarantine), threat__mode="both", **ONE
    )
    assert [(f["step"], f["stage"]) for f in events.of("flag")] == [(4, 0), (5, 1)]
    assert finite(session)
    assert not any(row.get("skipped") for row in events.of("step"))


def run_suite(
    lab: Lab, tmp_path: Path, attacks: list[str], defenses: list[str], **changes: Any
) -> dict[str, suite.Finished]:
    parse = Component.parse
    plan = suite.make_plan(
        [lab.scenario(**changes)], [parse(a) for a in attacks], [parse(d) for d in defenses], {}
    )
    finished = suite.run(plan, tmp_path, Quiet(), threads=1)
    return {f"{f.cell.attack.label()} {f.cell.defense.label()}": f for f in finished}


ATTACK_FAULTS = [
    ("liar:what=raise", "attack liar (step 4, stage 1, replica", "raised RuntimeError: no idea"),
    ("liar:what=change", "attack liar (step 4, stage 1, replica", "changed the tensor"),
    ("liar:what=nothing", "attack liar (step 4, stage 1, replica", "returned NoneType, no tensor"),
    ("liar:depth=-1", "attack liar", "memory returned -1"),
]


@pytest.mark.parametrize("attack, where, what", ATTACK_FAULTS)
def test_an_attack_that_breaks_its_contract_makes_its_own_cells_invalid(
    lab: Lab, tmp_path: Path, attack: str, where: str, what: str
) -> None:
    done = run_suite(lab, tmp_path, [attack, "liar:what=noise"], ["script"], **ONE)
    for defense in ("none", "script"):
        scores = done[f"{attack} {defense}"].result["scores"]
        assert scores["outcome"] == "invalid"
        assert scores["reason"].startswith(f"attack: {where}")
        assert what in scores["reason"]
        assert done[f"liar:what=noise {defense}"].valid
    assert done["none none"].valid


def _fault(text: str, **params: object) -> str:
    rest = "".join(f",{k}={v}" for k, v in params.items())
    return f"script:fault={text}{rest}"


DEFENSE_FAULTS = [
    (_fault("check raises"), "check raised ValueError: broken check"),
    (_fault("learn raises"), "learn raised ValueError: broken learn"),
    (_fault("end_step raises"), "end_step raised ValueError: broken end_step"),
    (_fault("check raises", at=2), "check raised"),
    (_fault("learn raises", at=2), "learn raised"),
    (_fault("end_step raises", at=2), "end_step raised"),
    (_fault("start raises"), "start raised ValueError: broken start"),
    ("deaf", "cannot be made: ValueError: broken constructor"),
    (_fault("check changes sent"), "check changed a signal"),
    (_fault("check changes sent", at=2), "check changed a signal"),
    (_fault("check changes received"), "check changed a signal"),
    (_fault("learn changes sent"), "learn changed a signal"),
    (_fault("check returns None"), "must return a Verdict"),
    (_fault("check returns floats"), "must return a Verdict"),
    (_fault("check returns too few"), "must return a Verdict"),
    (_fault("check returns a wrong reference"), "the reference of a Verdict"),
    (_fault("check returns wrong statistics", amnesty="false"), "the statistics of a Verdict"),
]


@pytest.mark.parametrize("defense, what", DEFENSE_FAULTS)
def test_a_defense_that_breaks_its_contract_makes_its_own_cells_invalid(
    lab: Lab, tmp_path: Path, defense: str, what: str
) -> None:
    done = run_suite(lab, tmp_path, ["liar:what=noise"], [defense, "script"], **ONE)
    broken = done.pop(f"liar:what=noise {Component.parse(defense).label()}")
    scores = broken.result["scores"]
    assert scores["outcome"] == "invalid"
    assert scores["reason"].startswith("defense: ")
    assert what in scores["reason"]
    assert json.loads((broken.folder / "result.json").read_text())["scores"] == scores
    assert read_events(broken.folder)[-1]["status"] == "error"
    assert len(done) == 3
    assert all(f.valid for f in done.values())


def test_what_an_attack_does_to_what_it_received_stays_with_the_attack(lab: Lab) -> None:
    for what in ("change received", "same"):
        events, session = lab.run(f"liar:what={what}", "none", threat__mode="both", **ONE)
        assert not events.of("act")
        if what == "change received":
            changed = weights(session)
    assert all(torch.equal(changed[n], w) for n, w in weights(session).items())


def test_a_cell_is_recorded_when_its_stage_runs_empty(lab: Lab, tmp_path: Path) -> None:
    flags = [(5, 2, "gradient", r) for r in range(4)]
    events, _ = lab.run("none", script(*flags, severe=True, amnesty=False))
    assert len(events.of("step")) == 6
    assert events.of("exhausted") == [{"type": "exhausted", "step": 5, "stage": 2}]
    assert events.of("eval")[0]["step"] == 5
    defense = "script:flags=[[5,2,gradient,0],[5,2,gradient,1],[5,2,gradient,2],[5,2,gradient,3]]"
    done = run_suite(lab, tmp_path, ["none"], [f"{defense},severe=true,amnesty=false"])
    scores = list(done.values())[-1].result["scores"]
    assert (scores["outcome"], scores["capacity"]) == ("broken", 0.0)
    assert "all workers of stage 2 banned" in scores["reason"]


def test_a_banned_worker_sends_nothing_any_more(lab: Lab) -> None:
    events, _ = lab.run("liar:what=zeros", "script", threat__mode="both", **ONE)
    bad = events.of("act")[0]["replica"]
    assert [row["tampered"] for row in events.of("step")] == [0] * 4 + [2] * 8
    defense = script((5, 1, "activation", bad), severe=True)
    events, _ = lab.run("liar:what=zeros", defense, threat__mode="both", **ONE)
    assert events.of("ban")[0]["replica"] == bad
    assert [row["tampered"] for row in events.of("step")] == [0] * 4 + [2] * 2 + [0] * 6


def test_the_truth_cannot_be_reached_from_signals(lab: Lab, plug: Callable[..., None]) -> None:
    plug(Walker)
    Walker.found.clear()
    lab.run("liar:what=zeros", "walker", threat__mode="both", **ONE)
    assert Walker.found == {"Signals", "int", "str", "Tensor", "NoneType"}


class Walker(Defense[Any]):
    """Walks over all attributes of what it is given, tensors not opened."""

    name = "walker"
    goal = formula = source = "test"
    found: set[str] = set()

    def check(self, signals: Signals) -> Any:
        todo: list[Any] = [signals]
        while todo:
            thing = todo.pop()
            self.found.add(type(thing).__name__)
            if isinstance(thing, torch.Tensor):
                assert not vars(thing)
                assert (thing.grad_fn, thing._base, thing._version) == (None, None, 0)
            elif hasattr(thing, "__slots__"):
                todo += [getattr(thing, slot) for slot in thing.__slots__]
            assert not hasattr(thing, "__dict__") or isinstance(thing, torch.Tensor)
        from sentinel_bench.api import Verdict

        nobody = torch.zeros(len(signals.sent), dtype=torch.bool)
        return Verdict(nobody, nobody)


def test_events_of_a_lab_are_those_of_a_run(lab: Lab, tmp_path: Path) -> None:
    done = run_suite(lab, tmp_path, ["liar:what=noise"], ["script"], **ONE)
    rows = Events()
    rows.rows = [
        row
        for row in read_events(done["liar:what=noise script"].folder)
        if row["type"] not in ("start", "baseline", "cost", "end")
    ]
    events, _ = lab.run("liar:what=noise", "script", **ONE)
    assert rows.timeless() == events.timeless()
