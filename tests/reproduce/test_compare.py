"""A table beside results: which results are taken, what is computed of them, how it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import suite
from sentinel_bench.config import Cell, Component
from sentinel_bench.errors import ConfigError
from sentinel_bench.reproduce import cells, compare, document, figure, show
from sentinel_bench.reproduce.cells import Key, Outcome, Reproduction

Make = Callable[[Cell, int], Outcome]


def outcome(loss: float | None, excess: float | None = 0.0, **scores: Any) -> Outcome:
    """A valid outcome with these numbers."""
    names = ("precision", "recall", "f1", "detection_steps_mean", "relative_tps")
    numbers: dict[str, float | None] = {
        **dict.fromkeys(names),
        "acted": 10,
        "validation_loss": loss,
        "excess_loss": excess,
        **scores,
    }
    return Outcome(numbers, diverged=loss is None, reason="", versions=(("torch", "2.13"),))


def results(found: Reproduction) -> dict[Key, Outcome]:
    """Losses 4.0 and 4.2 without attack; attacks cost 2 without a defense and 0.1 with one."""
    made: dict[Key, Outcome] = {}
    for cell in found.plan.cells:
        plain = 4.0 + 0.2 * cell.scenario.seeds.model
        attack = cell.attack.name != "none"
        defended = cell.protection != "none"
        excess = {(True, False): 2.0, (True, True): 0.1}.get((attack, defended), 0.0)
        rate = 100.0 if defended or not attack else 0.0
        made[cells.key_of(cell)] = outcome(
            plain + excess, excess, precision=rate, recall=rate, f1=rate
        )
    return made


def table(name: str = "table1", *numbers: int) -> tuple[Reproduction, dict[Key, Outcome]]:
    found = cells.reproduction(name, "tiny", [0, 1], numbers)
    return found, results(found)


def cell_of(found: Reproduction, number: int, seed: int, which: str) -> Key:
    return cells.key_of(getattr(found.trios[number][seed], which))


def test_numbers_are_means_over_the_seeds_with_the_interval() -> None:
    found, made = table("table1", 2)
    (row,) = compare.compare(found, made)["rows"]
    own = row["own"]
    # 4.1 and 4.3: deviation 0.1414, half width 12.706 * 0.1
    assert own["val_loss"]["mean"] == pytest.approx(4.2)
    assert own["val_loss"]["half"] == pytest.approx(1.2706)
    assert own["excess"] == {
        "mean": pytest.approx(0.1), "half": pytest.approx(0, abs=1e-12), "n": 2, "diverged": 0,
    }  # fmt: skip
    assert own["excess_unprotected"]["mean"] == pytest.approx(2.0)
    assert own["val_loss_vanilla"]["mean"] == pytest.approx(4.1)
    assert row["published"]["excess_unprotected"] == pytest.approx(11.761 - 3.821)
    signs = ("harm", "helped", "detected", "precise")
    assert row["verdicts"] == dict.fromkeys(signs, "agrees")
    assert row["verdict"] == "agrees"


def test_counts_and_order_are_those_of_the_rows() -> None:
    found, made = table("table1")
    for number in (17, 18):  # the paper finds nobody there; we find all
        assert made[cell_of(found, number, 0, "protected")].scores["recall"] == 100
    data = compare.compare(found, made)
    assert data["counts"]["rows"] == 25
    assert data["counts"]["differs"] == 4
    assert data["counts"]["signs"]["detected"] == {"agrees": 20, "differs": 4, "unclear": 0}
    assert data["counts"]["signs"]["quiet"]["agrees"] == 1
    assert data["order"]["f1"]["rows"] == 24
    assert data["order"]["f1"]["verdict"] == "unclear"  # ours are all 100
    assert data["cells"] == {"planned": 100, "with_result": 100}
    assert json.loads(json.dumps(data, allow_nan=False)) == data


@pytest.mark.parametrize(
    "change, problem",
    [
        (None, "with defense: no result (seed 1)"),
        (Outcome({}, False, "boom"), "with defense: invalid: boom (seed 1)"),
        (outcome(4.0, acted=0), "with defense: no attacker acted (seed 1)"),
        (outcome(None), None),
    ],
)
def test_a_seed_that_says_nothing_is_named_and_nothing_is_concluded(
    change: Outcome | None, problem: str | None
) -> None:
    found, made = table("table1", 2)
    key = cell_of(found, 2, 1, "protected")
    made.pop(key)
    if change is not None:
        made[key] = change
    (row,) = compare.compare(found, made)["rows"]
    assert row["problems"] == ([problem] if problem else [])
    assert row["verdicts"]["harm"] == "agrees"
    assert row["verdicts"]["helped"] == "unclear"
    assert row["verdict"] == "unclear"


def test_a_loss_that_diverged_is_harm_without_limit() -> None:
    found, made = table("table1", 2)
    for seed in (0, 1):
        made[cell_of(found, 2, seed, "unprotected")] = outcome(None, None)
    data = compare.compare(found, made)
    (row,) = data["rows"]
    assert row["verdicts"]["harm"] == row["verdicts"]["helped"] == "agrees"
    assert row["own"]["excess_unprotected"] == {"mean": None, "half": None, "n": 0, "diverged": 2}
    assert show.own(row, "excess_unprotected", "+.3f") == "diverged"
    json.dumps(data, allow_nan=False)


def test_a_defense_under_which_the_loss_diverges_too_is_no_help() -> None:
    found, made = table("table1", 2)
    for seed in (0, 1):
        for which in ("unprotected", "protected"):
            made[cell_of(found, 2, seed, which)] = outcome(None, None)
    (row,) = compare.compare(found, made)["rows"]
    assert row["verdicts"]["harm"] == "agrees"
    assert row["signs"]["own"]["helped"] is None
    assert row["verdicts"]["helped"] == "unclear"


def test_a_run_that_ended_early_has_no_excess() -> None:
    found, made = table("table1", 2)
    made[cell_of(found, 2, 0, "protected")] = outcome(4.0, None)
    (row,) = compare.compare(found, made)["rows"]
    assert row["own"]["excess"]["n"] == 1
    assert row["own"]["val_loss"]["n"] == 2
    assert row["verdicts"]["helped"] == "unclear"


def test_rows_without_counterpart_are_shown_with_the_reason() -> None:
    found, made = table("table2")
    data = compare.compare(found, made)
    assert [row["number"] for row in data["rows"]] == [1, 2, 3]
    assert data["counts"]["no_counterpart"] == 2
    text = document.section(data)
    assert text.count("no counterpart: the tiny stand-in has one corpus") == 2
    assert "86.7 / -" in text


def test_perplexities_stand_beside_perplexities() -> None:
    found, made = table("lu2024", 9)
    (row,) = compare.compare(found, made)["rows"]
    assert row["own"]["perplexity_clean"]["mean"] == pytest.approx((54.598 + 66.686) / 2, abs=1e-3)
    assert row["own"]["perplexity_attacked"]["mean"] > 400
    assert row["verdict"] == "agrees"
    assert row["defense"] is None


def test_attacks_are_spelled_as_boards_spell_them() -> None:
    spelled = {
        "delay:steps=100": "delay",
        "scaling:alpha=-1": "scaling",
        "invisible-noise:p=0.99": "invisible-noise",
        "random-sign:p=0.1": "random-sign:p=0.1",
        "bias:sigma=7": "bias:sigma=7",
    }
    for text, name in spelled.items():
        assert cells.spelled(Component.parse(text)).label() == name


def result(cell: Cell, loss: float, finished: str = "2026-01-01") -> dict[str, Any]:
    attack, mode, defense, tuned, scenario, *_ = cells.key_of(cell)
    return {
        "schema": 1,
        "digest": "d" * 64,
        "finished": finished,
        "cell": {
            "track": "core", "attack": attack, "mode": mode or "mixed", "defense": defense,
            "tuned": json.loads(str(tuned)), "scenario": scenario,
            "seeds": cell.scenario.seeds.model_dump(),
        },
        "scores": {"outcome": "broken", "reason": None, "validation_loss": loss, "acted": 3},
    }  # fmt: skip


def save(folder: Path, content: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(content))


def test_results_without_events_are_read_and_the_newest_counts(tmp_path: Path) -> None:
    found, _ = table("table1", 2)
    cell = found.trios[2][0].protected
    assert cell is not None
    save(tmp_path / "a" / "1", result(cell, 4.5, "2026-01-02"))
    save(tmp_path / "b" / "1", result(cell, 9.9, "2026-01-01"))
    other = result(cell, 8.8, "2026-01-03")
    other["cell"]["scenario"] = "another"
    save(tmp_path / "c", other)
    tuned = result(cell, 7.7, "2026-01-04")
    tuned["cell"]["tuned"] = {"quarantine": False}
    save(tmp_path / "d", tuned)
    save(tmp_path / "e", {"schema": 1})
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "result.json").write_text("")
    outcomes, problems = cells.of_files([tmp_path])
    assert outcomes[cells.key_of(cell)].scores["validation_loss"] == 4.5
    assert len(problems) == 2
    assert "e/result.json: cell is missing" in problems[0]


def test_a_reason_from_a_file_is_one_plain_line(tmp_path: Path) -> None:
    found, made = table("table1", 2)
    cell = found.trios[2][0].protected
    assert cell is not None
    content = result(cell, 4.5)
    content["scores"] |= {"outcome": "invalid", "reason": "a\x1b[31m\n| <b> -->" + "x" * 500}
    save(tmp_path / "a", content)
    made |= cells.of_files([tmp_path])[0]
    data = compare.compare(found, made)
    ((problem),) = data["rows"][0]["problems"]
    assert "\x1b" not in problem
    assert len(problem) < 300
    text = document.section(data)
    assert "<b>" not in text
    assert "\\| &lt;b&gt; --&gt;" in text


def test_a_baseline_reused_from_another_track_counts() -> None:
    found = cells.reproduction("table2", "tiny", [0])
    cell = found.trios[1][0].baseline
    content = result(cell, 4.5)
    content["cell"]["scenario"] = "that of core, with another threat that nobody made true"
    content["scores"] |= {"diverged": False, "excess_loss": None}
    content["provenance"] = {"packages": {"torch": "2.13", "scikit-learn": None}, "python": "3.11"}
    known = cells.of_runs([suite.Finished(cell, Path("runs"), content, reused=True)])
    assert known[cells.key_of(cell)].scores["validation_loss"] == 4.5
    assert known[cells.key_of(cell)].versions == (("python", "3.11"), ("torch", "2.13"))


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="table2 has rows 1 to 3, not 0, 4"):
        cells.reproduction("table2", "tiny", [0], [4, 1, 0])
    with pytest.raises(
        ConfigError, match=r"table2 has no counterpart at scale tiny.*--scale paper"
    ):
        cells.reproduction("table2", "tiny", [0], [2])


def test_a_document_keeps_its_other_sections_and_is_the_same_for_the_same_results(
    tmp_path: Path,
) -> None:
    path = tmp_path / "docs" / "reproduction.md"
    one, two = (compare.compare(*table(name)) for name in ("table2", "table1"))
    document.write(path, one)
    document.write(path, two)
    text = path.read_text()
    assert text.index("<!-- begin table1 tiny -->") < text.index("<!-- begin table2 tiny -->")
    document.write(path, one)
    assert path.read_text() == text
    other = tmp_path / "other.md"
    document.write(other, two)
    document.write(other, one)
    assert other.read_text() == text
    changed = compare.compare(*table("table2", 1))
    document.write(path, changed)
    assert path.read_text().count("<!-- begin table2 tiny -->") == 1
    assert document.read(path)["table1", "tiny"] == document.read(other)["table1", "tiny"]


def test_a_document_says_when_numbers_agree_and_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "r.md"
    document.write(path, compare.compare(*table("table1", 2)))
    text = path.read_text()
    for part in (
        "* harm: the attack alone does harm.",
        "| table20 | Mixed attacks in a SWARM deployment | 0 of 2 | 0 of 2 |",
        "* `subspace`: signals are compressed",
        "sentinel-bench reproduce table1 --scale tiny --seeds 0-1",
        "a tiny stand-in",
        'settings of the track for sentinel: {"quarantine": true',
        "* constant attack: the definition mentions negative ones",
        "| 100.0 / 100.0 ± 0.0 |",
        "Made with torch 2.13.",
    ):
        assert part in text


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a document of 'reproduce'"):
        document.write(path, compare.compare(*table("table1", 2)))
    assert path.read_text() == "mine"


def test_the_picture_has_a_mark_for_every_pair_of_loss_and_f1() -> None:
    found, made = table("table1")
    data = compare.compare(found, made)
    drawn = figure._draw(data)
    published, ours = drawn.axes
    assert published.get_title(loc="left") == "published (25 set-ups)"
    assert len(published.lines) == len(ours.lines) == 2 * 25
    assert (3.809, 100.0) in {
        (line.get_xdata()[0], line.get_ydata()[0]) for line in published.lines
    }
    first = figure.render(data)
    assert first["png"].startswith(b"\x89PNG")
    assert figure.render(data) == first


@pytest.mark.parametrize(
    "seeds, text", [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2], "0,2"), ([2, 1], "2,1")]
)
def test_seeds_are_written_as_they_are_given(seeds: list[int], text: str) -> None:
    assert show.seeds({"seeds": seeds}) == text
