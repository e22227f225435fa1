"""The figure of a sweep: files that can be opened, whatever is missing, and the same each time."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure
from PIL import Image

from sentinel_bench import plots

Row = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"


def spread(mean: float | None, reach: float = 0.0, why: str = "diverged") -> Row:
    if mean is None:
        return {"mean": None, "min": None, "max": None, "n": 0, "missing": {why: 3}}
    return {"mean": mean, "min": mean - reach, "max": mean + reach, "n": 3, "missing": {}}


def point(
    attack: str,
    strength: float | None = None,
    defense: str = "sentinel",
    *,
    damage: float | None = 0.1,
    unprotected: float | None = 1.0,
    recall: float | None = 75.0,
    loss: float | None = 4.1,
) -> Row:
    return {
        "attack": attack,
        "name": attack,
        "parameter": None if strength is None else "sigma",
        "strength": strength,
        "cell": attack if strength is None else f"{attack.split(':')[0]}:sigma={strength:g}",
        "defense": defense,
        "recall": spread(recall, 5),
        "f1": spread(recall, 5),
        "validation_loss": spread(loss, 0.1),
        "damage": spread(damage, 0.02),
        "unprotected": spread(unprotected, 0.1),
    }


def summary(*points: Row) -> Row:
    return {"points": points, "baseline": {"validation_loss": spread(4.0)}}


def curve(defense: str = "sentinel", attack: str = "bias:sigma=0.01..10") -> list[Row]:
    return [
        point(attack, s, defense, damage=0.02 * s, unprotected=s, recall=100 - 8 * s)
        for s in (0.01, 0.1, 1.0, 10.0)
    ]


def texts(svg: bytes) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def assert_files(files: dict[str, bytes]) -> list[str]:
    """Both files open, and the picture is not blank; return the texts."""
    assert files.keys() == {"png", "svg"}
    with Image.open(io.BytesIO(files["png"])) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width > 1000 and image.height > 500
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10
    return texts(files["svg"])


def drawn(*points: Row) -> Figure:
    return plots._draw(summary(*points), "title")


def axes(figure: Figure, label: str) -> Any:
    (found,) = [a for a in figure.axes if label in (a.get_ylabel(), a.get_xlabel())]
    return found


def test_a_sweep_shows_recall_and_f1_against_damage_and_damage_against_strength() -> None:
    words = assert_files(plots.render(summary(*curve(), *curve("averaging")), "track smoke"))
    for text in ("track smoke", "recall (%)", "F1 (%)", "strength (sigma)", "undetected"):
        assert text in words
    for defense in ("sentinel", "averaging"):
        assert f"bias:sigma=0.01..10 vs {defense}" in words
    assert "hollow: no defense" in words
    assert "validation loss (nats per token)" not in words


def test_attacks_without_strengths_show_f1_against_validation_loss() -> None:
    words = assert_files(plots.render(summary(point("zeros"), point("delay")), "title"))
    assert "validation loss (nats per token)" in words
    assert "no attack, no defense" in words
    assert not [word for word in words if word.startswith("strength")]


def test_more_entries_than_colours_markers_or_lines_are_told_apart() -> None:
    points = [point(f"attack-{i}", damage=0.01 * i, recall=3.0 * i) for i in range(30)]
    words = assert_files(plots.render(summary(*points), "title"))
    assert {f"attack-{i} vs sentinel" for i in range(30)} <= {*words}
    looks = {(one.color, one.marker) for one in plots._series(points)}
    assert len(looks) == 30


def test_nothing_known_of_a_point_is_no_mark_but_a_note() -> None:
    lost = dict.fromkeys(("damage", "unprotected", "recall", "loss"))
    words = assert_files(plots.render(summary(point("zeros", **lost)), "title"))
    assert "zeros vs sentinel: 3 of 3 diverged" in words
    assert "zeros vs none: 3 of 3 diverged" in words
    for panel in drawn(point("zeros", **lost)).axes:
        marks = [line for line in panel.lines if line.get_marker() != "None"]
        assert all(math.isnan(x) for line in marks for x in line.get_xdata())
    swept = [point("bias:sigma=1..2", s, **lost) for s in (1.0, 2.0)]
    assert "bias:sigma=2 vs sentinel: 3 of 3 diverged" in assert_files(
        plots.render(summary(*swept), "title")
    )


def test_a_point_without_damage_is_a_cross_at_the_edge_and_breaks_the_line() -> None:
    points = curve()
    points[1] = point("bias:sigma=0.01..10", 0.1, damage=None, recall=60.0, loss=None)
    figure = drawn(*points)
    for label in ("recall (%)", "F1 (%)"):
        lines = axes(figure, label).lines
        (cross,) = [line for line in lines if line.get_marker() == "x"]
        assert [*cross.get_xydata()[0]] == [plots.EDGE, 60.0]
        line = lines[1]  # after that of no damage
        assert [math.isnan(x) for x in line.get_xdata()] == [False, True, False, False]
    crosses = [
        line.get_xdata()[0]
        for line in axes(figure, "strength (sigma)").lines
        if line.get_marker() == "x"
    ]
    assert crosses == [0.1]
    words = assert_files(plots.render(summary(*points), "title"))
    assert "at the edge: not measured" in words
    assert "bias:sigma=0.1 vs sentinel: 3 of 3 diverged" in words


def test_many_missing_runs_are_summed_up() -> None:
    points = [point(f"attack-{i}", damage=None) for i in range(9)]
    assert "and 3 more" in texts(plots.render(summary(*points), "title")["svg"])


def test_no_defense_is_hollow_on_the_bottom_line_once_for_an_attack() -> None:
    figure = drawn(*curve(), *curve("averaging"))
    lines = axes(figure, "recall (%)").lines
    (hollow,) = [line for line in lines if line.get_markerfacecolor() == "white"]
    assert [*hollow.get_xdata()] == [0.01, 0.1, 1.0, 10.0]
    assert {*hollow.get_ydata()} == {0.0}


def test_points_are_joined_in_the_order_of_their_strength() -> None:
    figure = drawn(*curve())
    line = axes(figure, "recall (%)").lines[1]
    assert [*line.get_xdata()] == pytest.approx([0.0002, 0.002, 0.02, 0.2])
    assert [*line.get_ydata()] == pytest.approx([99.92, 99.2, 92, 20])


def test_strengths_are_written_beside_their_marks_and_never_over_each_other() -> None:
    figure = drawn(*curve(), *curve("averaging"), *curve("third"))
    panel = axes(figure, "recall (%)")
    labels = [text.get_text() for text in panel.texts]
    assert labels.count("1") == labels.count("10") == 3
    boxes = [text.get_window_extent() for text in panel.texts]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_strengths_at_one_place_share_a_label() -> None:
    points = [point("bias:sigma=1..4", s, recall=100.0, damage=0.0) for s in (1.0, 2.0, 4.0)]
    panel = axes(drawn(*points), "recall (%)")
    assert [t.get_text() for t in panel.texts if t.get_text() != "undetected"] == ["1 to 4"]


def test_a_wide_range_of_damage_is_symmetric_logarithmic() -> None:
    narrow = [point("a", damage=0.1, unprotected=0.2)]
    assert axes(drawn(*narrow), "recall (%)").get_xscale() == "linear"
    wide = [point("a", damage=-0.01, unprotected=2.0)]
    assert axes(drawn(*wide), "recall (%)").get_xscale() == "symlog"


@pytest.mark.parametrize("mean", [0.09999999999999999, 0.10000000000000002])
def test_a_mean_that_is_rounded_past_its_spread_can_be_drawn(mean: float) -> None:
    rounded = {"mean": mean, "min": 0.1, "max": 0.1, "n": 3, "missing": {}}
    drawn({**point("zeros"), "damage": rounded})


def test_none_and_nothing_at_all_can_be_drawn() -> None:
    none = point("none", damage=0.0, unprotected=0.0)
    assert "none vs sentinel" not in assert_files(plots.render(summary(none), "title"))
    plots.render(summary(), "title")


def test_the_same_summary_gives_the_same_bytes() -> None:
    content = summary(*curve(), point("zeros", damage=None))
    assert plots.render(content, "title") == plots.render(content, "title")


def test_text_is_shown_as_it_is() -> None:
    words = texts(plots.render(summary(point("a$b$"), point("c_d^e")), "$x$ {y}")["svg"])
    for text in ("a$b$ vs sentinel", "c_d^e vs sentinel", "$x$ {y}"):
        assert text in words


def test_settings_of_matplotlib_change_nothing_and_are_left_as_they_were() -> None:
    plain = plots.render(summary(*curve()), "title")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.hashsalt": "mine"}):
        before = dict(matplotlib.rcParams)
        assert plots.render(summary(*curve()), "title") == plain
        assert dict(matplotlib.rcParams) == before


def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    plots.save(path, b"old")
    plots.save(path, b"new")

    def full(_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        plots.save(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [*tmp_path.iterdir()] == [path]
