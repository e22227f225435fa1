"""Which cells `run` makes of attacks, defenses and aggregators, and what it leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.record import find_runs

Call = Callable[..., Any]
Tiny = Callable[..., list[str]]
Cells = list[tuple[str, str, str]]
RUN = ["run", "--attack", "zeros"]


def planned(call: Call, *options: str) -> Cells:
    """Return attack, defense and aggregator of the cells that would be run."""
    done = call(*options, "--dry-run", "--json")
    assert done.status == 0, done.err
    keys = ("attack", "defense", "aggregator")
    return [(c[keys[0]]["name"], c[keys[1]]["name"], c[keys[2]]["name"]) for c in
            json.loads(done.out)["cells"]]  # fmt: skip


BASELINE = ("none", "none", "mean")


@pytest.mark.parametrize("flag, bare", [([], True), (["--unprotected"], True),
                                        (["--no-unprotected"], False)])  # fmt: skip
def test_attacks_run_without_a_defense_unless_one_does_not_want_that(
    call: Call, flag: list[str], bare: bool
) -> None:
    given = [*RUN, "--attack", "ones", "--defense", "averaging", "--defense", "sentinel", *flag]
    expected: Cells = [BASELINE]
    for attack in ("zeros", "ones"):
        expected += [(attack, "none", "mean")] * bare
        expected += [(attack, "averaging", "mean"), (attack, "sentinel", "mean")]
    assert planned(call, *given) == expected


def test_a_defense_of_none_that_is_asked_for_is_run(call: Call) -> None:
    both = [BASELINE, ("zeros", "none", "mean")]
    for flag in ([], ["--no-unprotected"]):
        assert planned(call, *RUN, "--defense", "none", *flag) == both
    honest = ["run", "--attack", "none", "--defense", "sentinel"]
    for flag in ([], ["--no-unprotected"]):  # the baseline is always there, once
        assert planned(call, *honest, *flag) == [BASELINE, ("none", "sentinel", "mean")]


@pytest.mark.parametrize("flag, bare", [([], True), (["--no-unprotected"], False)])
def test_every_aggregator_goes_with_every_defense_and_takes_the_place_of_the_mean(
    call: Call, flag: list[str], bare: bool
) -> None:
    rules = ["--aggregator", "median", "--aggregator", "krum"]
    found = planned(call, *RUN, "--defense", "none", "--defense", "sentinel", *rules, *flag)
    assert found == [
        BASELINE,
        *[("zeros", "none", "mean")] * bare,
        *[("zeros", d, a) for d in ("none", "sentinel") for a in ("median", "krum")],
    ]


def test_an_aggregator_that_is_named_twice_or_is_the_mean_is_one(call: Call) -> None:
    given = [*RUN, "--defense", "sentinel"]
    plain = planned(call, *given)
    assert planned(call, *given, "--aggregator", "mean", "--aggregator", "mean") == plain
    twice = planned(call, *given, "--aggregator", "median", "--aggregator", "median")
    assert twice == [*plain[:2], ("zeros", "sentinel", "median")]


def test_parameters_of_aggregators_are_read_and_shown(call: Call) -> None:
    done = call(*RUN, "--defense", "none", "--aggregator", "krum:f=1,strict=false", "--dry-run",
                "--json")  # fmt: skip
    rule = json.loads(done.out)["cells"][2]["aggregator"]
    assert rule["name"] == "krum"
    assert (rule["f"], rule["strict"]) == (1, False)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--aggregator", "krumm"], "unknown aggregator 'krumm'; did you mean krum"),
        (["--aggregator", "krum:g=1"], "aggregator krum: unknown key 'g'"),
        (["--aggregator", "krum:f=-1"], "aggregator krum: f: "),
        (["--aggregator", "krum:f"], "'f' is not key=value"),
        (["--aggregator", "krum", "--replicas", "4"], "krum needs .*but there are 4; lower f"),
        (["--aggregator", "sentinel"], "unknown aggregator 'sentinel'"),
    ],
)
def test_what_is_wrong_with_an_aggregator_is_said_before_anything_runs(
    call: Call, options: list[str], message: str
) -> None:
    done = call(*RUN, "--defense", "none", *options)
    assert done.status == 2
    assert done.out == ""
    assert re.search(message, done.err)
    assert "Traceback" not in done.err
    assert not Path("runs").exists()


def test_a_rule_that_needs_more_replicas_runs_if_it_need_not_be_strict(
    call: Call, tiny: Tiny
) -> None:
    given = [*RUN, "--defense", "none", "--no-unprotected", *tiny()]
    assert call(*given, "--aggregator", "krum").status == 2
    done = call(*given, "--aggregator", "krum:strict=false", "--json")
    assert done.status == 0
    results = json.loads(done.out)
    assert [r["cell"]["defense"] for r in results] == ["none", "none + krum:strict=false"]
    assert all(r["scores"]["outcome"] != "invalid" for r in results)


def test_what_is_left_out_is_neither_run_nor_recorded_and_the_rest_is_the_same(
    call: Call, tiny: Tiny
) -> None:
    given = [*RUN, "--defense", "averaging", "--aggregator", "median", *tiny(), "--json"]
    few = json.loads(call(*given, "--no-unprotected").out)
    assert len(find_runs(Path("runs"))) == len(few) == 2
    done = call(*given, "--resume")
    assert done.err.count("reused") == 2  # leaving cells out changes no identity
    all_of_them = json.loads(done.out)
    assert [r["cell"]["defense"] for r in all_of_them] == ["none", "none", "averaging + median"]
    assert {r["digest"] for r in few} < {r["digest"] for r in all_of_them}
    alone = call(*given[:-1], "--no-unprotected", "--out", "again", "--json")
    for one, other in zip(json.loads(alone.out), few, strict=True):
        assert one["digest"] == other["digest"]
        same = ("validation_loss", "precision", "recall", "excess_loss", "extra_flops")
        assert {k: one["scores"][k] for k in same} == {k: other["scores"][k] for k in same}


def test_the_table_names_aggregators_and_their_cost(call: Call, tiny: Tiny) -> None:
    done = call(*RUN, "--defense", "averaging", "--aggregator", "median", *tiny(),
                "--no-unprotected")  # fmt: skip
    assert done.status == 0
    rows = done.out.splitlines()
    assert rows[1].split()[:2] == ["none", "none"]
    assert rows[2].split()[:4] == ["zeros", "averaging", "+", "median"]
    assert any(row.startswith("cost of averaging + median: +") for row in rows)
