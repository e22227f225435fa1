"""The page: it says what the record says, whatever that is, and nothing in the record can act."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_runs import Page, Row, act, at, ban, cut, digest_of, flag, log, tamper

from sentinel_bench.config import Scenario
from sentinel_bench.record import read_events
from sentinel_bench.report import _statistics, write
from sentinel_bench.report._page import TILES
from sentinel_bench.score import score

Make = Callable[..., Path]
Show = Callable[..., Page]
FATES = (
    *(act(5, 1, 0), act(5, 1, 1), tamper(1, 0), tamper(1, 1)),
    *(ban(7, 1, 0), ban(6, 2, 3), ban(8, 0, 2, "severe"), flag(5, 0, 1), flag(6, 0, 1, "update")),
)


def checked(page: Page) -> Page:
    """Check what must hold for every page: no access to anything, no script but its own."""
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len({*ids})
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            value = attributes.get(name) or ""
            assert re.match(r"(data:image/svg\+xml;base64,|figures/\w+\.(svg|png)$|#\w+$|$)", value)
    assert {tag for tag, _ in page.tags}.isdisjoint({"iframe", "object", "embed", "link", "base"})
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv")]
    kinds = [a.get("type") for a in page.all("script")]
    assert kinds == ["application/json"] * (len(kinds) - 1) + [None]
    own = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{own}';" in policy
    for image in page.all("img"):
        assert image["alt"]
        ElementTree.fromstring(svg_of(image))
    return page


def svg_of(image: dict[str, str | None]) -> bytes:
    return base64.b64decode((image["src"] or "").partition(",")[2])


def texts(page: Page, number: int) -> list[str]:
    """The texts of a figure."""
    root = ElementTree.fromstring(svg_of(page.all("img")[number]))
    found = root.iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()).strip() for element in found]


def test_a_page_shows_settings_outcome_numbers_command_and_provenance(page: Show) -> None:
    shown = checked(page(log(*FATES), aggregator="median", defense="sentinel:violations=3"))
    for words in (
        "zeros vs sentinel:violations=3 + median",
        "3 stages x 4 replicas; 10 steps (4 warm-up); 1 x 8 tokens a worker and step",
        "25 % of the replicas of stage 1 malicious; activation, waves",
        "seeds model 0, data 0, threat 0; cpu",
        "Defended.",
        "sentinel-bench run --attack zeros --resume",
        "sentinel-bench 0.1.0, torch 2.13.0",
        "Defense and aggregator add to a step: +3.00 % floating-point operations, 7,424 bytes",
    ):
        assert words in shown.text, words
    assert shown.row("machine: python")[1] == "3.11.2"
    assert shown.row("engine")[1] == "feedbeef"
    assert shown.row("defense (resolved).violations")[1] == "5"


def test_every_number_is_that_of_the_scores(make: Make) -> None:
    folder = make(log(*FATES))
    shown = Page(write(folder).page.read_text())
    scores = score(read_events(folder))
    for key, label, style, _ in TILES:
        assert f"{label} {format(scores[key], style)}" in shown.text
    assert shown.row("attacker, acted")[1:] == ["1", "1", "2"]
    assert shown.row("honest, or never acted")[1:] == ["2", "8", "10"]
    assert shown.row("tampered with")[1:] == ["6", "12", "50.00%"]
    assert shown.row("honest", "6")[1:] == ["6", "60", "10.00%"]
    assert shown.row("operations")[1] == "+3.00 %"
    assert shown.row("bytes of checks")[1] == "7,424"
    assert shown.row("state")[1] == "640"
    assert shown.row("tokens per second")[1] == "400"
    assert shown.row("relative")[1] == "0.80"
    assert shown.row("capacity", "75.0%")
    assert shown.row("validation_loss")[1] == "2"


def test_workers_are_listed_with_what_became_of_them(page: Show) -> None:
    shown = page(log(*FATES))
    # worker, state, attack, mode, starts, first lie, ban, steps, two directions, lies, size
    assert shown.row("1.0") == [
        *("1.0", "D attacker, acted and banned", "zeros", "activation"),
        *("5", "5", "7", "3", "", "", "5", "0.625"),
    ]
    assert shown.row("2.3")[1:8] == [
        *("E attacker, banned before it acted", "zeros", "activation", "5", "", "6", "")
    ]
    assert shown.row("0.2")[1:8] == ["F honest, banned", "", "", "", "", "8*", ""]
    assert shown.row("0.1")[8:10] == ["1", "1"]
    letters = texts(shown, 2)
    assert {"D3", "M", "E", "F"} <= {*letters}
    assert "blank: honest (8)" in letters and "D: attacker, acted and banned (1)" in letters


def test_paired_runs_are_shown_or_said_to_be_missing(make: Make) -> None:
    base = make(log(attackers=(), loss=1.97), attack="none", defense="none")
    folder = make(log(*FATES, baseline=digest_of(base)))
    shown = checked(Page(write(folder).page.read_text()))
    assert shown.row("no attack, no defense")[1:5] == ["1.970", "+0.000", "400", "defended"]
    assert shown.row("no attack, no defense")[5] == base.name
    assert shown.row("zeros vs sentinel")[1:5] == ["2.000", "+0.030", "400", "defended"]
    assert shown.row("zeros, no defense")[1].startswith("missing: no finished run beside")
    legend = texts(shown, 0)
    assert "no attack, no defense (validation 1.970)" in legend
    assert "zeros vs sentinel (validation 2.000)" in legend
    assert {"attackers start", "bans of attackers", "bans of honest workers"} <= {*legend}


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>$x$ {{ 7*7 }} \u202e'\"&"


def test_no_text_of_a_record_becomes_markup(page: Show) -> None:
    bad = ban(8, 0, 2, HOSTILE)
    odd = flag(5, 0, 1, HOSTILE)  # a direction
    named = flag(5, 0, 1, **{HOSTILE: [5, 0, 1], "__proto__": [1, 0, 1], "constructor": [1, 0, 1]})
    events = log(act(5, 1, 0), tamper(1, 0), bad, odd, named)
    for attacker in events[0]["attackers"]:
        attacker |= {"attack": HOSTILE, "mode": HOSTILE, "params": {HOSTILE: HOSTILE}}
        attacker["start"] = HOSTILE
    events[0]["time"] = events[-1]["time"] = HOSTILE
    events.insert(3, {"type": HOSTILE})
    shown = checked(
        page(
            events,
            attack="zeros",
            commands=[HOSTILE, 7, None],
            trace=[(5, 1, "activation", {0: {HOSTILE: [1, 0, 1]}})],
        )
    )
    assert HOSTILE in shown.data["names"]["activation"]
    assert "{{ 7*7 }}" in shown.text
    assert shown.html.count("<script") == 2


def test_an_attack_with_markup_for_a_parameter_is_a_title(page: Show) -> None:
    shown = checked(page(log(), attack='zeros:x="</title><b>"'))
    assert "zeros:x=</title><b> vs sentinel" in shown.text
    assert {attributes["class"] for attributes in shown.all("b")} == {"letter idle"}


# Odd records.


def without(events: list[Row], *kinds: str) -> list[Row]:
    return [row for row in events if row["type"] not in kinds]


MESSAGE = {"type": "error", "party": "attack", "message": "zeros raised RuntimeError: no"}
ODD: dict[str, tuple[list[Row], str]] = {
    "invalid": (
        [*without(log(*FATES), "eval", "cost", "end"), MESSAGE, {"type": "end", "status": "error"}],
        "Invalid: the run says nothing. attack: zeros raised RuntimeError: no",
    ),
    "failed before the first step": (
        [MESSAGE, {"type": "end", "status": "error", "time": "2026", "seconds": 1.0}],
        "the run ended before its first step",
    ),
    "interrupted": (
        [*without(log(*FATES), "eval", "cost", "end"), {"type": "end", "status": "interrupted"}],
        "interrupted: the run did not reach its last step",
    ),
    "nothing but a start": (log()[:1], "killed: the run has no end event"),
    "without attackers": (log(attackers=()), "Defended."),
    "a ban without attackers": (log(ban(8, 0, 2), attackers=()), "1 of 12 workers banned, though"),
    "NaN losses": (
        log(*FATES, loss="nan", losses={6: "nan", 7: "inf", 8: None, 9: "text"}),
        "Broken: the final validation loss is not finite.",
    ),
    "NaN everywhere": (
        log(loss="nan", losses=dict.fromkeys(range(10), "nan")),
        "the final validation loss is not finite",
    ),
    "a huge loss": (log(*FATES, losses={6: 1e300}, loss=1e300), "Broken: excess loss"),
    "bans only by updates": (
        log(
            *(act(5, 1, 0), tamper(1, 0), flag(5, 1, 0, "update", mismatch=[0.6, -1e-3, 1e-3])),
            ban(5, 1, 0, "severe"),
        ),
        "flags: update",
    ),
    "flags that say nothing": (log(flag(5, 1, 0, l1=[1, 2]), flag(5, 1, 1, l1=None)), "Defended."),
    "a flag of nothing finite": (log(flag(5, 1, 0, l1=["nan", "-inf", "inf"])), "Defended."),
    "the same fence twice": (
        log(flag(5, 1, 0, l1=[1, 1, 1]), flag(5, 1, 0, l1=[1, 1, 1])),
        "Any worker",
    ),
    "contradictions": (log(ban(5, 1, 0), ban(6, 1, 0), act(2, 0, 0)), "Invalid"),
    "a step in the far future": (log(ban(2**52, 1, 0), flag(2**52, 1, 0)), "Invalid"),
    "rows of a wrong form": (
        [*log(), at("ban", -1, 0, 0), {"type": "step"}, {"type": "start"}],
        "3 of 18 events have a wrong form.",
    ),
    "another start": ([*log(), {**log()[0], "stages": 9}], "2 start events instead of one"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("error::UserWarning")
def test_any_record_has_a_page(page: Show, name: str) -> None:
    events, words = ODD[name]
    assert words in checked(page(events)).text


@pytest.mark.parametrize("name", ["NaN everywhere", "failed before the first step"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_figures_of_little_can_be_laid_out(make: Make, name: str) -> None:
    events, words = ODD[name]
    shown = checked(Page(write(make(events, finished=False)).page.read_text()))
    assert words in shown.text
    assert "result.json is missing" in shown.text


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_run_that_was_cut_off_has_a_page(make: Make) -> None:
    trace = [(5, 1, "activation", {0: {"l1": [0.25, 0, 1]}})] * 3
    folder = make(log(*FATES, status=None), finished=False, trace=trace)
    cut(folder)
    path = folder / "trace.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    shown = checked(Page(write(folder).page.read_text()))
    assert "killed: the run has no end event" in shown.text
    assert len(shown.data["timelines"][0]) == 2
    assert shown.row("attacker, acted")[1:] == ["1", "1", "2"]
    assert "it is not scored" in shown.text


def test_thousands_of_flags_make_a_page_of_some_size(
    page: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_statistics, "MAX_FLAGS", 3000)
    rows = [
        flag(4 + i % 6, i % 3, i % 4, ("activation", "gradient")[i % 2], l1=[i / 7, 0.1, 0.2])
        for i in range(6000)
    ]
    shown = checked(page(log(*rows)))
    assert len(shown.html) < 1_000_000
    assert shown.data["flagStride"] == 2
    assert "One flag of 2 is shown." in shown.text


def test_a_large_grid_is_counted_instead_of_drawn(page: Show) -> None:
    events = log(*FATES)
    events[0] |= {"stages": 100, "replicas": 100}
    shown = checked(page(events))
    assert "100 x 100 workers are too many for a picture: 9996 honest; 1 honest, banned;" in (
        shown.text
    )
    assert len(shown.all("img")) == 2


def test_a_run_without_a_trace_says_how_to_get_one(page: Show) -> None:
    shown = page(log(flag(5, 1, 0)), commands=["sentinel-bench run --attack zeros --resume"])
    assert "The run was not traced" in shown.text
    assert "sentinel-bench run --attack zeros --trace" in shown.text
    swept = page(log(flag(5, 1, 0)), commands=["sentinel-bench sweep --attack 'a", "x sweep"])
    assert "sentinel-bench run --attack zeros --defense sentinel --trace" in swept.text
    traced = page(log(flag(5, 1, 0)), trace=[(5, 1, "activation", {0: {"l1": [0.5, 0, 1]}})])
    assert "was not traced" not in traced.text


@pytest.mark.parametrize(
    "defense, traced, words",
    [
        ("none", False, "Without a defense nobody looks at a signal."),
        ("sentinel", False, "Nobody was flagged, and the run was not traced."),
        ("sentinel", True, "The defense has said nothing about any worker."),
    ],
)
def test_where_no_statistic_is_known_the_page_says_why(
    page: Show, defense: str, traced: bool, words: str
) -> None:
    shown = checked(page(log(), defense=defense, trace=[] if traced else None))
    assert words in shown.text
    assert len(shown.all("script")) == 1


def test_panels_show_attackers_and_flagged_honest_with_what_lies_beyond(page: Show) -> None:
    rows = [
        flag(5, 1, 0, l1=[1e6, 0, 1]),
        flag(6, 0, 1, l1=[1.5, 0, 1]),
        flag(6, 0, 2, l1=["nan", 0, 1]),
    ]
    words = texts(checked(page(log(act(5, 1, 0), tamper(1, 0), *rows))), 1)
    assert "stage 1, replica 0, attacker: l1 (activation)" in words
    assert "stage 0, replica 1, honest: l1 (activation)" in words
    assert "as far as 1e+06" in words and "not finite" in words


@pytest.mark.parametrize("traced", [True, False])
def test_a_fence_with_one_end_is_drawn_to_the_edge(page: Show, traced: bool) -> None:
    said = {"l1": [3.0, -math.inf, 1.0]}
    trace = [(5, 1, "activation", {0: said})] if traced else None
    shown = checked(page(log(flag(5, 1, 0, l1=[3.0, "-inf", 1.0])), trace=trace))
    assert "stage 1, replica 0, attacker: l1 (activation)" in texts(shown, 1)
    root = ElementTree.fromstring(svg_of(shown.all("img")[1]))
    assert not re.search(r"\b(inf|nan)\b", ElementTree.tostring(root, "unicode"))
    painted = [e for e in root.iter() if "#9ecae1" in (e.get("style") or "")]
    assert len(painted) == 2  # the fence, and its entry in the legend


def test_a_fence_that_is_still_open_is_no_fence(page: Show) -> None:
    is_open = {"l1": [0.5, -math.inf, math.inf]}
    trace = [(step, 1, "activation", {0: is_open}) for step in (5, 6)]
    shown = checked(page(log(), trace=trace))
    assert "stage 1, replica 0, attacker: l1 (activation)" in texts(shown, 1)


@pytest.mark.filterwarnings("error::UserWarning")  # of a layout that cannot be made
def test_the_same_record_gives_the_same_files(make: Make, tmp_path: Path) -> None:
    folder = make(log(*FATES), trace=[(5, 1, "activation", {0: {"l1": [math.nan, 0, 1]}})])
    first, second = (write(folder, tmp_path / name) for name in ("a", "b"))
    assert len(first.figures) == 6
    for one, two in zip([first.page, *first.figures], [second.page, *second.figures], strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_a_scenario_with_open_stages_of_any_number_is_one_line(
    page: Show, make_scenario: Callable[..., Scenario]
) -> None:
    wide = make_scenario(grid__stages=5, train__steps=10, threat__fraction=0.375)
    assert "37.5 % of the replicas of stages 1 to 3 malicious" in page(log(), scenario=wide).text
    none = make_scenario(threat__honest_first=2, threat__honest_last=2)
    assert "malicious" not in page(log(), scenario=none, attack="none").text
