"""What a page is made of: the scores of the record, what is wrong with it, and its paired runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import act, at, ban, cut, digest_of, flag, log, tamper

from sentinel_bench.config import Scenario
from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.record import read_events
from sentinel_bench.report._read import Partner, partners, read_run
from sentinel_bench.score import score

Make = Callable[..., Path]
ACTS = (act(5, 1, 0), ban(6, 1, 0), tamper(1, 0))


def test_scores_are_those_of_the_events(make: Make) -> None:
    folder = make(log(*ACTS))
    run = read_run(folder)
    assert run.scores == score(read_events(folder))
    assert run.scores["recall"] == 100
    assert run.notes == []


def test_rows_of_a_wrong_form_or_outside_of_the_grid_are_left_out_and_counted(make: Make) -> None:
    bad = [
        at("ban", "x", 1, 0),  # type: ignore[arg-type]
        at("flag", 5, 3, 0),
        at("act", 5, 0, 4),
        {"type": "step", "step": 3},
        {"type": "tamper", "stage": 0},
    ]
    run = read_run(make(log(*ACTS) + bad))
    assert run.notes == ["5 of 23 events have a wrong form."]
    assert len(run.of("step")) == 10 and len(run.of("ban")) == 1
    assert run.scores["outcome"] == "invalid"


def test_without_a_start_event_nothing_about_workers_is_believed(make: Make) -> None:
    events = [row for row in log(*ACTS, flag(5, 1, 0)) if row["type"] != "start"]
    run = read_run(make(events))
    assert run.start is None
    assert {row["type"] for row in run.rows} == {"baseline", "step", "eval", "cost", "end"}


def test_a_killed_run_is_scored_from_what_there_is(make: Make) -> None:
    folder = make(log(*ACTS, status=None), finished=False)
    cut(folder)
    run = read_run(folder)
    assert run.scores["reason"] == "killed: the run has no end event"
    assert len(run.of("step")) == 10
    (note,) = run.notes
    assert note.startswith("result.json is missing: the run is still going on, or was killed.")


@pytest.mark.parametrize(
    "content, note",
    [
        ("{", "The result is left out: "),
        ("[]", "not a JSON object"),
        ('{"scores": 7}', "result.json says otherwise than the events in "),
    ],
)
def test_a_result_that_cannot_be_believed_is_noted(make: Make, content: str, note: str) -> None:
    folder = make(log(*ACTS))
    (folder / "result.json").write_text(content)
    run = read_run(folder)
    assert note in run.notes[0]
    assert run.scores["recall"] == 100


def test_a_result_with_another_number_is_noted_with_its_place(make: Make) -> None:
    folder = make(log(*ACTS))
    stored = json.loads((folder / "result.json").read_text())
    stored["scores"]["recall"] = 50.0
    (folder / "result.json").write_text(json.dumps(stored))
    (note,) = read_run(folder).notes
    assert "in 1 place (first scores.recall: stored 50.0, recomputed 100.0)" in note


def test_a_trace_that_cannot_be_read_is_left_out_and_noted(make: Make) -> None:
    folder = make(log(*ACTS))
    (folder / "trace.jsonl").write_text("nonsense\n")
    run = read_run(folder)
    assert run.trace is None
    assert run.notes[0].startswith("The trace is left out: ")


def test_no_run_folder_is_an_error_that_says_where_there_are_some(make: Make) -> None:
    folder = make(log(*ACTS))
    with pytest.raises(ConfigError, match=r"no run folder, it has no config\.json; name one in it"):
        read_run(folder.parent)
    with pytest.raises(ConfigError, match=r"nowhere: no run folder, it has no config\.json$"):
        read_run(folder / "nowhere")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"digest": "0" * 64}, "the digest is not that of the identity"),
        ({"cell": {"scenario": {"planet": 3}}}, r"cell\.scenario\.planet: Extra inputs"),
        ({"cell": None}, "cell: Input should be"),
    ],
)
def test_settings_that_cannot_be_read_are_an_error(
    make: Make, change: dict[str, Any], message: str
) -> None:
    folder = make(log(*ACTS))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(RunError, match=message):
        read_run(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\x00" * 9])
def test_events_that_cannot_be_read_are_an_error(make: Make, content: bytes) -> None:
    folder = make(log(*ACTS))
    (folder / "events.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"events\.jsonl"):
        read_run(folder)


# Paired runs.


def folders(found: list[Partner]) -> dict[str, Path | None]:
    return {partner.role: partner.run.folder if partner.run else None for partner in found}


def test_paired_runs_are_those_beside_that_differ_in_attack_and_defense_alone(
    make: Make, make_scenario: Callable[..., Scenario]
) -> None:
    base = make(log(attackers=()), attack="none", defense="none")
    bare = make(log(act(5, 1, 0), tamper(1, 0)), defense="none")
    other = make_scenario(grid__stages=3, train__steps=10, train__warmup_steps=4, seeds__data=1)
    make(log(act(5, 1, 0), tamper(1, 0)), defense="none", scenario=other)
    make(log(act(5, 1, 0), tamper(1, 0)), defense="none", attack="ones")
    make(log(act(5, 1, 0), tamper(1, 0)), defense="none", aggregator="median")
    make(log(act(5, 1, 0), tamper(1, 0)), defense="averaging")
    own = make(log(*ACTS, baseline=digest_of(base)))
    found = partners(read_run(own))
    assert folders(found) == {
        "no attack, no defense": base,
        "zeros, no defense": bare,
        "zeros vs sentinel": own,
    }
    assert [partner.self for partner in found] == [False, False, True]


def test_a_link_to_a_run_folder_has_the_paired_runs_of_its_target(
    make: Make, tmp_path: Path
) -> None:
    base = make(log(attackers=()), attack="none", defense="none")
    link = tmp_path / "best"
    link.symlink_to(make(log(*ACTS, baseline=digest_of(base))))
    assert folders(partners(read_run(link)))["no attack, no defense"] == base


def test_paired_runs_that_are_not_there_are_said_to_be_missing(make: Make) -> None:
    base = make(log(attackers=()), attack="none", defense="none")
    (base / "result.json").unlink()  # not finished
    first, second, _ = partners(read_run(make(log(*ACTS, baseline=digest_of(base)))))
    assert first.run is None and digest_of(base)[:12] in first.why
    assert second.run is None and "differs in the defense alone" in second.why
    first, *_ = partners(read_run(make(log(*ACTS, baseline=None))))
    assert first.why == "the record names none"


def test_a_run_without_attack_or_without_defense_has_the_fewer_partners(make: Make) -> None:
    base = make(log(attackers=()), attack="none", defense="none")
    honest = make(log(attackers=(), baseline=digest_of(base)), attack="none")
    bare = make(log(act(5, 1, 0), tamper(1, 0), baseline=digest_of(base)), defense="none")
    assert [*folders(partners(read_run(base))).values()] == [base]
    assert [*folders(partners(read_run(honest))).values()] == [base, honest]
    assert [*folders(partners(read_run(bare))).values()] == [base, bare]
