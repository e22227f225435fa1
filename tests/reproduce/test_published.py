"""The published numbers: as the paper prints them, and every row has a counterpart or a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel_bench import registry, tracks
from sentinel_bench.config import Component
from sentinel_bench.data.corpora import find_corpus
from sentinel_bench.errors import ConfigError
from sentinel_bench.models.presets import layers_per_stage, resolve
from sentinel_bench.reproduce import cells, published
from sentinel_bench.reproduce.published import SCALES, Scale

NAMES = list(published.load().tables)
WITH_ROWS = [name for name, table in published.load().tables.items() if not table.missing]


def test_every_table_of_the_paper_is_there_or_told_to_be_missing() -> None:
    paper = [f"table{i}" for i in range(1, 21)]
    assert {*paper, "figure1", "lu2024"} == {*NAMES, *published.NOT_HELD}


@pytest.mark.parametrize(
    "name, number, printed",
    [  # by hand, from the paper's tables
        ("table1", 1, {"f1": 100.0, "val_loss": 3.819, "val_loss_unprotected": 3.821}),
        ("table1", 8, {"precision": 88.9, "detection_steps": 70.91, "val_loss": 3.841}),
        ("table1", 17, {"recall": 0.0, "detection_steps": None, "val_loss_unprotected": 3.893}),
        ("table1", 25, {"recall": 79.2, "detection_steps": 211.0, "val_loss_unprotected": 4.176}),
        ("table2", 3, {"f1": 89.5, "val_loss": 3.784, "val_loss_vanilla": 3.778}),
        ("table3", 6, {"precision": 37.5, "f1": 54.5, "detection_steps": 67.0}),
        ("table4", 3, {"recall": 68.6, "val_loss": 3.714, "val_loss_vanilla": 3.668}),
        ("table5", 1, {"precision": 23.08, "f1": 37.5, "val_loss": 6.248}),
        ("table6", 3, {"precision": 75.0, "val_loss": 10.274}),
        ("table7", 1, {"precision": 99.2, "precision_std": 1.6, "val_loss_std": 0.008}),
        ("table8", 2, {"f1": 100.0, "val_loss": 3.818, "val_loss_unprotected": 7.777}),
        ("table9", 2, {"precision": 85.3, "recall": 80.6, "f1": 82.9}),
        ("table12", 1, {"f1": 100.0, "tps": 6483, "val_loss": None}),
        ("table15", 7, {"precision": 51.1, "f1": 67.6, "val_loss_unprotected": 4.716}),
        ("table16", 19, {"recall": 4.2, "f1": 4.7, "detection_steps": 2646.0}),
        ("table17", 8, {"precision": 98.7, "f1": 96.0, "val_loss": 3.915}),
        ("table18", 4, {"f1": 80.9, "detection_steps_median": 5.0, "detection_steps": 263.51}),
        ("table19", 5, {"f1": 0.0, "val_loss": 4.3248}),
        ("table20", 2, {"recall": 66.7, "f1": 80.0}),
        ("lu2024", 10, {"perplexity_clean": 40.05, "perplexity_attacked": 2503.65}),
        ("lu2024", 14, {"perplexity_attacked": 601.92, "perplexity_defended": 19.31}),
    ],
)
def test_numbers_are_the_printed_ones(name: str, number: int, printed: dict[str, Any]) -> None:
    row = published.rows(name)[number - 1]
    assert row.number == number
    assert {key: getattr(row.numbers, key) for key in printed} == printed


def test_the_baseline_of_a_row_is_plain_training_of_its_set_up() -> None:
    assert {row.baseline for row in published.rows("table1")} == {3.821}
    assert [row.baseline for row in published.rows("table2")] == [3.821, 3.84, 3.778]
    assert {row.baseline for row in published.rows("table17")} == {None}
    assert [row.baseline for row in published.rows("lu2024")][8] == pytest.approx(3.3935, abs=1e-4)


def test_a_figure_has_the_rows_of_its_tables_numbered_anew() -> None:
    rows = published.rows("figure1")
    assert [row.number for row in rows] == list(range(1, 76))
    assert [row.source for row in rows[24:26]] == ["table1", "table15"]
    assert sum(row.attack == Component(name="none") for row in rows) == 3


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_valid_cells_or_says_why_not(name: str, scale: Scale) -> None:
    have, _, why = published.available(name, scale)
    if not have:
        with pytest.raises(ConfigError) as error:
            cells.reproduction(name, scale, [0])
        assert why.split("; ")[0] in str(error.value)
        return
    found = cells.reproduction(name, scale, [0])
    assert sum(bool(trios) for trios in found.trios.values()) == have
    for cell in found.plan.cells:
        registry.attacks.params(cell.attack)
        registry.defenses.params(cell.resolved_defense)
        registry.aggregators.params(cell.aggregator)
        find_corpus(cell.scenario.data)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_every_row_has_a_track_or_a_reason_at_both_scales(name: str) -> None:
    for row in published.rows(name):
        for scale in SCALES:
            target = row.target(scale)
            assert bool(target.missing) != (target.track in tracks.load().tracks)
            assert target.missing or row.attack


def test_a_tiny_row_is_exactly_a_cell_of_a_board() -> None:
    for name in ("table1", "table5", "table8"):
        for cell in cells.reproduction(name, "tiny", [0]).plan.cells:
            assert cell.scenario.track == "core"
    for name in ("table2", "table6", "table9", "table12"):
        for cell in cells.reproduction(name, "tiny", [0]).plan.cells:
            assert cell.scenario.track == "mixed"


def test_the_tiny_rows_of_gpt2_are_cells_of_the_stand_in_and_those_of_opt_differ_in_the_model() -> (
    None
):
    plan = cells.reproduction("lu2024", "tiny", [0]).plan
    told = {(c.scenario.track, c.scenario.model.preset) for c in plan.cells}
    assert told == {("lu2024-tiny", "gpt2-tiny"), ("custom", "opt-tiny")}


def test_the_other_architectures_have_the_printed_number_of_attackers() -> None:
    from sentinel_bench.threat import place

    plan = cells.reproduction("table4", "paper", [0]).plan
    attacked = {c.scenario.track: c for c in plan.cells if c.attack.name == "mixed"}
    found = {track: len(place(c.scenario, c.attack)) for track, c in attacked.items()}
    assert found == {"paper-moe": 39, "paper-moe-deepseek": 36, "paper-4b": 57}


@pytest.mark.parametrize(
    "name, attackers",  # of shared settings: first and last two stages honest
    [("table1", 26), ("table2", 39), ("table17", 78), ("table18", 36)],
)
def test_the_published_share_of_workers_attacks(name: str, attackers: int) -> None:
    from sentinel_bench.threat import place

    cell = next(c for c in cells.reproduction(name, "paper", [0]).plan.cells if c.attack.params
                or c.attack.name != "none")  # fmt: skip
    assert len(place(cell.scenario, cell.attack)) == attackers


@pytest.mark.parametrize(
    "track, layers, parameters",
    [("paper-0.6b", 16, 574_391_296), ("paper-1.2b", 8, 1_224_247_296),
     ("paper-4b", 22, 3_984_989_184)],
)  # fmt: skip
def test_model_shapes_give_the_printed_numbers_of_parameters(
    track: str, layers: int, parameters: int
) -> None:
    scenario = tracks.scenario(track, {})
    shape = resolve(scenario.model)
    h, kv = shape.hidden_size, shape.hidden_size // shape.heads * shape.kv_heads
    layer = 2 * h * h + 2 * h * kv + 3 * h * shape.intermediate_size + 2 * h
    assert layers_per_stage(scenario) == [1] * layers
    assert layers * layer + h + 3 * 128_256 * h == parameters


@pytest.mark.parametrize(
    "name, message",
    [
        ("tabel1", "nothing published is called 'tabel1'; did you mean table1"),
        ("table13", "table13 cannot be reproduced: it holds settings"),
        ("table10", "table10 cannot be reproduced: its numbers are not among"),
        ("swarm", "there is no track swarm: routing is stochastic"),
    ],
)
def test_what_is_not_there_is_told_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        published.get(name)


def test_absent_tracks_are_absent() -> None:
    assert not published.load().absent.keys() & tracks.load().tracks.keys()


def test_the_file_has_no_key_twice() -> None:
    class Strict(yaml.SafeLoader):
        """Refuses a key that is given twice, of which YAML takes the last."""

    def mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
        return loader.construct_mapping(node, deep=True)

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    path = Path(published.__file__).with_name("published.yaml")
    assert yaml.load(path.read_text(encoding="utf-8"), Strict)["tables"]
