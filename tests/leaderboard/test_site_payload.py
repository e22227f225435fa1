"""What the pages are made of: numbers by hand, levels, names of files, places in charts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.leaderboard._read import read
from sentinel_bench.leaderboard.site import _scatter
from sentinel_bench.leaderboard.site._board import file_of, load
from sentinel_bench.leaderboard.site._charts import Frame, Line, step_ticks, ticks
from sentinel_bench.leaderboard.site._curves import Curves, read_curves
from sentinel_bench.leaderboard.site._metrics import METRICS, Metric, cell, interval, legend, level
from sentinel_bench.leaderboard.site._over_time import _window, bans, flags, losses, workers
from sentinel_bench.leaderboard.site._pages import command
from sentinel_bench.leaderboard.site._tables import matrix, ranking, rows_of, worth

EMPTY = {"mean": None, "half": None, "n": 0}
CURVES: dict[str, Any] = {
    "schema": 1, "digest": "d", "steps": 100, "warmup": 50,
    "loss": {"every": 50, "values": [5.0, 4.0]},
    "attackers": [[1, 0, 60, 60], [1, 1, 60, None]],
    "bans": [[64, 1, 0, True], [70, 0, 2, False]],
    "signals": {"every": 25, "from": 50, "honest": [[10, 1], [0, 0]], "tampered": [[4, 4], [2, 1]]},
    "workers": [{"role": "detected", "stage": 1, "replica": 0, "acted": 60, "banned": 64,
                 "attack": "zeros", "direction": "activation", "statistics": [
                     {"name": "l1", "flags": [[61, 0.5, 0.1, 0.2], [62, None, 0.1, None]],
                      "trace": []}]}],
    "more": {"attackers": 0, "bans": 0},
}  # fmt: skip


def metric(key: str) -> Metric:
    return next(m for m in METRICS if m.key == key)


def row(n: int = 3, diverged: int = 0, **means: Any) -> dict[str, Any]:
    known = {m.key: EMPTY for m in METRICS} | {"recall": EMPTY}
    known |= {k: {"mean": v, "half": 0.5, "n": n} for k, v in means.items()}
    return {"n": n, "diverged": diverged, "metrics": known}


@pytest.mark.parametrize(
    "key, value, found",
    [
        *(("f1", 100, 0), ("f1", 99, 0), ("f1", 98.9, 1), ("f1", 50, 3), ("f1", 0, 5)),
        *(("excess_loss", -0.3, 0), ("excess_loss", 0.01, 0), ("excess_loss", 0.011, 1)),
        *(("excess_loss", 1.5, 5), ("false_bans", 0, 0), ("false_bans", 0.3, 1)),
        *(("capacity", 1.0, 0), ("capacity", 0.5, 4), ("capacity", 0.49, 5)),
        *(("detection_steps_mean", 1, 0), ("detection_steps_mean", 51, 5)),
    ],
)
def test_a_colour_says_between_which_bounds_a_number_lies(
    key: str, value: float, found: int
) -> None:
    assert level(value, metric(key)) == found


def test_every_metric_of_the_matrix_has_six_colours_in_its_legend() -> None:
    for m in METRICS:
        assert len(m.bounds) == 5 and len(legend(m)) == 6
    assert legend(metric("f1")) == ["≥ 99", "≥ 95", "≥ 80", "≥ 50", "≥ 20", "< 20"]
    assert legend(metric("false_bans"))[-2:] == ["≤ 8", "> 8"]


def test_a_number_is_shown_with_its_spread_and_without_a_negative_zero() -> None:
    found = cell(row(excess_loss=-0.0001), metric("excess_loss"))
    assert (found.text, found.spread, found.value) == ("+0.000", "+0.000 ± 0.500", -0.0001)
    assert interval({"mean": 1.0, "half": None, "n": 1}, ".1f", 3) == "1.0 (n=1)"
    assert interval(None, ".1f") == "–"  # noqa: RUF001


def test_a_model_that_diverged_is_the_worst_and_not_a_gap() -> None:
    lost = cell(row(diverged=3, recall=0.0), metric("excess_loss"))
    assert (lost.text, lost.level) == ("diverged", 5) and (lost.value or 0) > 1e6
    some = cell(row(diverged=1, excess_loss=0.0), metric("excess_loss"))
    assert (some.text, some.level) == ("+0.000 (1 diverged)", 5)
    # its damage went undetected only where recall is below a half
    unseen = metric("undetected_damage")
    assert cell(row(diverged=3, recall=49.0), unseen).text == "diverged"
    assert cell(row(diverged=3, recall=50.0), unseen).text == "–"  # noqa: RUF001
    assert cell(row(n=0), metric("f1")).text == "invalid"


def test_a_speed_that_is_not_known_is_busy() -> None:
    known = row(relative_tps=0.8)
    known["metrics"]["relative_tps"]["half"] = 0.51
    assert cell(known, metric("relative_tps")).text == "busy"


def test_names_of_files_are_plain_short_and_unlike_each_other() -> None:
    assert file_of("attack", "mean-replay") == "attack-mean-replay.html"
    names = [
        *("a", "A", "a:b", "a-b", "a/b", "../a", "..", ".", "", "<b>", "é", "e", "x" * 300),
        *("x" * 301, "a b", "con", 'a"b', "a\nb", "\u202ea", "none @ x"),
    ]
    found = [file_of("attack", name) for name in names]
    assert len({name.lower() for name in found}) == len(names)
    for name in found:
        assert re.fullmatch(r"attack-[a-z0-9._-]+\.html", name) and len(name) < 80, name


def test_ticks_are_round_numbers_within_their_range() -> None:
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(4.13, 4.68, 4) == [4.2, 4.4, 4.6]
    assert ticks(-1e-7, 1e-7, 2) == [-1e-7, 0, 1e-7]
    assert step_ticks((0, 2), 5) == [(0, "0"), (1, "1"), (2, "2")]


def test_a_line_has_gaps_where_a_number_is_missing_and_ends_at_the_edge() -> None:
    frame = Frame((0, 10), (0, 1), width=160, height=142)  # 100 x 100 inside of its axes
    frame.line(Line([(0, 0.0), (5, 1.0), (6, None), (8, 0.5), (9, None), (10, 7.0)]))
    (found,) = frame.parts
    assert 'd="M46 110L96 10M126 60h.1M146 10h.1"' in found
    frame.line(Line([(0, 0.0), (5, 1.0)], stairs=True))
    assert 'd="M46 110H96V10"' in frame.parts[1]


def test_a_scatter_is_linear_near_zero_and_logarithmic_beyond() -> None:
    assert _scatter._symlog(0.0) == 0
    assert _scatter._symlog(0.09) == pytest.approx(1)  # log10(1 + 9)
    assert _scatter._symlog(-0.99) == pytest.approx(-2)


def test_charts_show_each_cell_by_hand() -> None:
    curves = Curves.model_validate(CURVES)
    loss = losses([([curves], ("#000", "")), ([], ("#111", ""))])
    assert loss is not None and loss.svg.count('class="v-line"') == 1
    assert loss.svg.count('class="v-act"') == 1  # both attackers start at step 60
    assert losses([([], ("#000", ""))]) is None
    found = bans([curves])
    assert found is not None and found.svg.count('class="v-line"') == 3
    share = flags([curves])
    assert share is not None and "Share of signals" in share.svg
    (chart,) = workers(curves)
    assert chart.title == (
        "l1 (activation) of the attacker that was banned first: stage 1, replica 0, zeros"
    )
    # both flags are outside: one above its fence, one not finite; a bar for each fence
    assert (chart.svg.count("v-out"), chart.svg.count("v-in"), chart.svg.count("v-bar")) == (
        2,
        0,
        2,
    )
    assert bans([]) is None and flags([]) is None


def test_a_fence_is_shown_with_its_surroundings_and_not_more() -> None:
    # fence from 0 to 1, so that three heights are seen above it; and a twentieth as a margin
    assert _window([(1, 100.0, 0.0, 1.0)]) == pytest.approx((-0.2, 4.2))
    assert _window([(1, 2.0, None, None), (2, 4.0, None, None)]) == pytest.approx((1.9, 4.1))
    assert _window([(1, None, None, None)]) is None
    assert _window([]) is None


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "curves.json: content: "),
        ("[]", "curves.json: content: "),
        ("{", "curves.json: content: "),
        ('{"schema": 2}', "curves.json: schema: "),
        (json.dumps(CURVES | {"digest": "other"}), "curves.json is of another run"),
        (json.dumps(CURVES | {"steps": 0}), "curves.json: steps: "),
        (json.dumps(CURVES | {"loss": {"every": 1, "values": ["x"]}}), "curves.json: loss.values"),
        (json.dumps(CURVES).replace("5.0", "NaN"), "curves.json: "),
        (json.dumps(CURVES).replace("5.0", "1e999"), "curves.json: loss.values"),
        (" " * 200_001, "curves.json is larger than 200,000 bytes"),
    ],
)
def test_curves_of_another_form_are_left_out_with_a_reason(
    save: Any, tmp_path: Path, text: str, words: str
) -> None:
    path = save("r", change={"digest": "d"})
    (path.parent / "curves.json").write_text(text)
    ((item,), _) = read([path])
    found = read_curves(item)
    assert isinstance(found, str) and found.startswith(words), found


def test_curves_are_those_beside_the_result(save: Any, tmp_path: Path) -> None:
    path = save("r", change={"digest": "d"})
    ((item,), _) = read([path])
    assert read_curves(item) is None
    (path.parent / "curves.json").write_text(json.dumps(CURVES))
    assert isinstance(read_curves(item), Curves)
    (board,) = load([tmp_path / "runs"])
    ((key, (seeded,)),) = board.curves.items()
    assert key == ("sentinel", "zero", "activation", 1) and seeded.curves is not None


def test_the_newest_result_of_a_cell_brings_its_curves(save: Any, tmp_path: Path) -> None:
    for name, digest, finished in (("a", "d", "2026-02-01"), ("b", "e", "2026-01-01")):
        path = save(name, change={"digest": digest, "finished": finished})
        (path.parent / "curves.json").write_text(json.dumps(CURVES | {"digest": digest}))
    (board,) = load([tmp_path / "runs"])
    ((seeded,),) = board.curves.values()
    assert seeded.curves is not None and seeded.curves.digest == "d"
    assert [cell["digest"] for cell in board.content["cells"]] == ["d"]


def test_a_matrix_has_a_place_for_each_pair_and_marks_what_is_missing(
    save: Any, tmp_path: Path
) -> None:
    for seed in (0, 1):
        save(f"a{seed}", "delay", "none", seed, f1=0.0)
    save("b", "delay", "sentinel", f1=50.0)
    save("c", "none", "none")
    save("d", "none", "sentinel", outcome="invalid", reason="crash")
    (board,) = load([tmp_path / "runs"])
    found = matrix(board, 1)
    assert [name for name, _ in found["defenses"]] == ["none", "sentinel"]
    texts = [
        [field and (dict(field["numbers"])["f1"].text, field["marks"]) for field in line["cells"]]
        for line in found["lines"]
    ]
    assert [(line["attack"], line["mode"]) for line in found["lines"]] == [
        ("none", ""), ("delay", "activation"),
    ]  # fmt: skip
    assert texts == [[("1.0", "‡"), ("invalid", "†‡")], [("0.0", ""), ("50.0", "‡")]]


def test_what_was_not_measured_is_a_gap(save: Any, tmp_path: Path) -> None:
    save("a", "delay", "none")
    save("b", "zeros", "sentinel")
    (board,) = load([tmp_path / "runs"])
    assert [[field is None for field in line["cells"]] for line in matrix(board, 1)["lines"]] == [
        [False, True], [True, False],
    ]  # fmt: skip


def test_rankings_are_put_in_words_and_order_what_gets_through(save: Any, tmp_path: Path) -> None:
    for name in ("alpha", "beta", "gamma"):
        save(name, "delay", name)
    (board,) = load([tmp_path / "runs"])
    known = {"mean": 0.5, "half": 0.125, "n": 3}
    item = {
        "tie": False, "status": "ranked", "reason": "", "mean_f1": known, "relative_tps": known,
        "false_bans": EMPTY, "broken": 0, "attacked": 3, "cells": 3, "of": 3,
        "worst": {"attack": "delay", "mode": "activation", "damage": known, "f1": known},
    }  # fmt: skip
    attack = {"rank": 1, "tie": False, "attack": "delay", "mode": "", "status": "ranked",
              "reason": "", "defense": "beta", "excess_loss": known}  # fmt: skip
    board.content["rankings"] = [{
        "setting": 1,
        "defenses": [
            item | {"rank": 1, "tie": True, "defense": "beta"},
            item | {"rank": 1, "tie": True, "defense": "alpha"},
            item | {"rank": None, "defense": "gamma", "status": "missing", "worst": None},
        ],
        "attacks": [attack, attack | {"attack": "gone"}, attack | {"rank": None, "defense": "?"}],
    }]  # fmt: skip
    found = ranking(board, board.content["rankings"][0])
    assert [line["place"] for line in found["defenses"]] == ["1 =", "1 =", "–"]  # noqa: RUF001
    assert found["defenses"][0]["damage"] == "+0.500 ± 0.125"
    assert found["defenses"][2]["f1"] == "–"  # noqa: RUF001
    # no link to what has no page
    assert [line["against"] for line in found["attacks"]] == ["defense-beta.html", None]
    assert [line["defense"] for line in worth(board)] == ["alpha", "beta", "gamma"]
    board.content["rankings"][0]["defenses"][0]["rank"] = 0
    assert [line["defense"] for line in worth(board)] == ["beta", "alpha", "gamma"]


def test_the_command_of_an_entry_runs_what_it_was_measured_with(save: Any, tmp_path: Path) -> None:
    save("a", "delay:steps=5", "sentinel", seed=0)
    save("b", "$(reboot)", "sentinel", seed=2)
    save("c", "delay:steps=5", "none + median")
    save("d", "delay:steps=5", "mine @ entry")
    (board,) = load([tmp_path / "runs"])
    rest = "--seeds 0,2 --out runs --resume"
    assert command(board, "defense", "sentinel", rows_of(board, "defense", "sentinel")) == (
        "sentinel-bench run --track core --attack '$(reboot)' --attack delay:steps=5 "
        f"--defense sentinel {rest}"
    )
    found = command(board, "defense", "none + median", rows_of(board, "defense", "none + median"))
    assert "--defense none --aggregator median --seeds 0 " in found
    assert command(board, "defense", "mine @ entry", []) == ""
    against = command(board, "attack", "delay:steps=5", rows_of(board, "attack", "delay:steps=5"))
    assert "--defense sentinel --seeds 0 " in against and "entry" not in against
