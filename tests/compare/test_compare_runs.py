"""Two runs side by side: what differs in them, found by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.compare import compare
from sentinel_bench.errors import ConfigError

BANS = {(1, 0): 6, (1, 1): 7}


def scores(found: Any) -> dict[str, Any]:
    return {item["name"]: item for item in found["scores"]}


def test_a_run_is_equal_to_itself(make_run: Any, call: Any) -> None:
    path = make_run(BANS)
    found = compare(path, path)
    assert found["kind"] == "runs" and found["differs"] is False
    assert found["settings"] == [] and all(item["equal"] for item in found["scores"])
    assert found["losses"]["first"] is None and found["losses"]["steps"] == 10
    assert found["bans"] == {"equal": 2, "only_a": [], "only_b": [], "moved": []}
    done = call(path, path, "--fail-on-difference")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[3:] == [
        "settings: no difference",
        "scores: no difference",
        "losses: of 10 steps, all equal",
        "bans: 2 equal",
    ]


def test_settings_that_differ_are_named_with_both_values(make_run: Any) -> None:
    a, b = make_run(BANS), make_run(BANS, train__lr=0.5)
    found = compare(a, b)
    assert found["settings"] == [{"key": "scenario.train.lr", "a": 0.0015, "b": 0.5}]
    assert found["differs"] is False  # no number follows from it here


def test_scores_have_their_difference(make_run: Any) -> None:
    # a finds one of two attackers and bans an honest worker: precision 50, recall 50
    a = make_run({(1, 0): 6, (2, 3): 8}, loss=1.5)
    b = make_run(BANS, loss=1.25)
    found = scores(compare(a, b))
    assert (found["f1"]["a"], found["f1"]["b"], found["f1"]["difference"]) == (50.0, 100.0, 50.0)
    assert found["excess_loss"]["difference"] == -0.25 and not found["excess_loss"]["equal"]
    assert found["acted"]["equal"] and found["acted"]["difference"] == 0
    assert found["outcome"] == {
        "name": "outcome", "a": "broken", "b": "defended", "difference": None, "equal": False
    }  # fmt: skip


def test_losses_name_the_first_step_at_which_they_differ_and_the_largest_difference(
    make_run: Any, call: Any
) -> None:
    a = make_run(BANS, {3: 2.0, 6: 2.25, 8: 1.0})
    b = make_run(BANS, {3: 2.0, 6: 2.5, 8: 3.0})
    found = compare(a, b)["losses"]
    assert found["first"] == {"step": 6, "a": 2.25, "b": 2.5}
    assert (found["largest"], found["at"], found["apart"]) == (2.0, 8, 2)
    assert compare(a, b)["differs"] is True
    line = "losses: of 10 steps, 2 differ, first step 6: 2.25 and 2.5; at most by 2, step 8"
    assert line in call(a, b).out.splitlines()


def test_losses_that_are_no_numbers_are_equal_to_themselves_and_differ_from_numbers(
    make_run: Any, call: Any
) -> None:
    a = make_run(BANS, {7: "nan", 8: "nan"})
    b = make_run(BANS, {7: "nan", 8: 2.0, 9: "inf"})
    found = compare(a, b)["losses"]
    assert found["first"] == {"step": 8, "a": "nan", "b": 2.0}
    assert (found["largest"], found["at"], found["apart"]) == (None, None, 2)
    json.loads(call(a, b, "--json").out, parse_constant=pytest.fail)


def test_bans_that_one_has_and_bans_at_other_steps_are_listed(make_run: Any, call: Any) -> None:
    a = make_run({(1, 0): 6, (1, 1): 7, (0, 2): 5})
    b = make_run({(1, 0): 6, (1, 1): 9, (2, 3): 8})
    assert compare(a, b)["bans"] == {
        "equal": 1,
        "only_a": [{"stage": 0, "replica": 2, "step": 5}],
        "only_b": [{"stage": 2, "replica": 3, "step": 8}],
        "moved": [{"stage": 1, "replica": 1, "a": 7, "b": 9}],
    }
    assert call(a, b).out.splitlines()[-1] == (
        "bans: 1 equal; only in A: stage 0 replica 2 at 5; only in B: stage 2 replica 3 at 8; "
        "at other steps: stage 1 replica 1 at 7 and 9"
    )


def test_speed_alone_is_no_difference(make_run: Any) -> None:
    a, b = make_run(BANS), make_run(BANS)
    events = b / "events.jsonl"
    events.write_text(events.read_text().replace('"seconds": 0.25', '"seconds": 0.5'))
    found = compare(a, b)
    assert scores(found)["tokens_per_second"]["difference"] == -200.0
    assert found["differs"] is False


def test_a_run_that_was_killed_is_compared_by_what_it_recorded(make_run: Any, call: Any) -> None:
    a, b = make_run(BANS), make_run(BANS, ended=False)
    events = b / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(lines[:-2]) + lines[-1][:9])
    found = compare(a, b)
    assert found["losses"]["only_a"] == 2 and found["losses"]["steps"] == 8
    assert found["differs"] is True
    assert scores(found)["reason"]["b"] == "killed: the run has no end event"
    assert "2 steps only in A" in call(a, b).out


def test_the_gate_fails_where_a_number_differs(make_run: Any, call: Any) -> None:
    a, b = make_run(BANS), make_run(BANS, loss=1.5001)
    assert call(a, b).status == 0
    assert call(a, b, "--fail-on-difference").status == 1
    assert call(a, b, "--fail-on-difference", "--json").status == 1


@pytest.mark.parametrize("file", ["config.json", "events.jsonl"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": NaN}', "\x00"])
def test_a_run_that_cannot_be_read_ends_with_2_and_one_line(
    make_run: Any, call: Any, file: str, content: str
) -> None:
    good, bad = make_run(BANS), make_run(BANS)
    (bad / file).write_text(content)
    for paths in ((good, bad), (bad, good)):
        done = call(*paths)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("error: ") and len(done.err.splitlines()) == 1
        assert file in done.err


def test_a_run_and_a_set_are_not_compared(make_run: Any, tmp_path: Path) -> None:
    run = make_run(BANS)
    with pytest.raises(ConfigError, match=r"is a run folder, and .* is not: compare two"):
        compare(tmp_path / "runs", run)


def test_what_a_stranger_recorded_is_one_line(make_run: Any, call: Any) -> None:
    a, b = make_run(BANS), make_run(BANS, data__tokenizer="x\x1b[31m\nred[bold]")
    done = call(a, b)
    assert done.status == 0 and "\x1b" not in done.out
    assert "x\\x1b[31m\\nred[bold]" in done.out
