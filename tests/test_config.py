"""Settings: what is read, what is laid over what, and how what is wrong is told."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel_bench.config import (
    Cell,
    Component,
    Scenario,
    TrainConfig,
    build,
    flatten,
    merge,
    parse_value,
    set_dotted,
)
from sentinel_bench.errors import ConfigError

PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.text("abyen01.- '#", max_size=5)
)


@pytest.mark.parametrize(
    "text, name, params",
    [
        ("zeros", "zeros", {}),
        (" zeros ", "zeros", {}),
        ("zeros:", "zeros", {}),
        ("delay:steps=20", "delay", {"steps": 20}),
        ("a:x=1,y=true,z=null,s=abc", "a", {"x": 1, "y": True, "z": None, "s": "abc"}),
        ("a:l=[1,2],m={b: 2,c: 3},n=4", "a", {"l": [1, 2], "m": {"b": 2, "c": 3}, "n": 4}),
        ("a:k.activation=.2,k.gradient=1", "a", {"k": {"activation": 0.2, "gradient": 1}}),
        ("package/name:x=a:b", "package/name", {"x": "a:b"}),
    ],
)  # fmt: skip
def test_a_component_is_read(text: str, name: str, params: dict[str, Any]) -> None:
    assert Component.parse(text) == Component(name=name, params=params)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "names nothing"),
        (":x=1", "names nothing"),
        ("a:x", "'x' is not key=value"),
        ("a:x=", "not key=value"),
        ("a:=1", "not key=value"),
        ("a:x=1,,y=2", "not key=value"),
        ("a:x=1,x=2", "'x' is given twice"),
        ("a:x=1,x.y=2", "'x' is given twice"),
        ("a:x.y=1,x=2", "'x' is given twice"),
        ("a:x=[1", "not a YAML value"),
        ("a:x=2020-13-45", "not a YAML value"),
        ("a:x=!!python/object:os.system 1", "not a YAML value"),
    ],
)
def test_a_component_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        Component.parse(text)


@given(st.dictionaries(st.sampled_from(["a", "b", "c.d", "c.e"]), PLAIN, max_size=4))
def test_a_label_is_read_back_as_the_same_component(flat: dict[str, Any]) -> None:
    params: dict[str, Any] = {}
    for key, value in flat.items():
        set_dotted(params, key, value)
    component = Component(name="name", params=params)
    assert Component.parse(component.label()) == component


@pytest.mark.parametrize(
    "text, value",
    [
        ("a:x='b:y=1,z=2'", "b:y=1,z=2"),
        ('a:x="b:y=1,z=2"', "b:y=1,z=2"),
        ("a:x=' b, c '", " b, c "),
        ("""a:x='b:y="c,d"'""", 'b:y="c,d"'),
        ("""a:x="b:y='c,d'\"""", "b:y='c,d'"),
        ("a:x=['b:y=1,z=2',c]", ["b:y=1,z=2", "c"]),
        ("a:x=[[1,2],'3,4']", [[1, 2], "3,4"]),
        ("a:x={k: 'b,c', l: [d]}", {"k": "b,c", "l": ["d"]}),
        ("a:x=don't", "don't"),
        ("a:x=5'", "5'"),
    ],
)
def test_commas_in_quotes_and_brackets_do_not_end_a_value(text: str, value: Any) -> None:
    assert Component.parse(f"{text},w=7") == Component(name="a", params={"x": value, "w": 7})
    assert Component.parse(text) == Component(name="a", params={"x": value})


INSIDE = [
    "zeros",
    "delay:steps=3",
    "bias:kind=constant,sigma=2",
    "sentinel:beta.activation=.5,statistics=[l1, l2]",
    "on-off:attack='delay:steps=3'",
    "it's",
    "- a",
    "a: b",
    "a #b",
    "[",
    "}",
    "'",
    '"',
    "",
    " ",
    "true",
    "1e5",
    "null",
    "~",
    "\\",
    "\\,",
    "a\nb",
    "\t",
    "\u00e9,",
    "\x85,",
    "=,=",
    ":",
]


@pytest.mark.parametrize("text", INSIDE)
def test_a_label_quotes_what_a_value_holds(text: str) -> None:
    for value in (text, [text], [text, "z", text], {"deep": text}, {"deep": [text]}):
        component = Component(name="n", params={"first": value, "last": text})
        assert Component.parse(component.label()) == component


def test_components_in_components_are_read_back() -> None:
    one = Component(name="delay", params={"steps": 3, "kind": "a b"})
    two = Component(name="on-off", params={"attack": one.label(), "burst": 2})
    again = Component.parse(two.label())
    assert again == two
    assert Component.parse(again.params["attack"]) == one


@pytest.mark.parametrize(
    "value", ['a",b', 'delay:kind="a,b"', '\\",', ["'],"], ["''],'"], ["on-off:attack='a,[b'"]]
)
def test_a_label_may_hold_quotes_and_commas_or_brackets_at_once(value: Any) -> None:
    component = Component(name="n", params={"x": value, "y": 1})
    assert Component.parse(component.label()) == component


@pytest.mark.parametrize("value", [["='"], ["a", '="'], [["='"]]])
def test_a_quote_after_an_equals_sign_in_a_list_is_a_letter(value: Any) -> None:
    component = Component(name="n", params={"x": value, "y": 1})
    assert Component.parse(component.label()) == component


NESTED = st.text("ab,:=[]{} '\"\\", max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.lists(NESTED, max_size=2), NESTED)
def test_a_label_with_quotes_and_brackets_is_read_back(inner: list[str], text: str) -> None:
    component = Component(name="n", params={"x": text, "y": inner})
    assert Component.parse(component.label()) == component


def test_a_label_may_hold_a_character_beyond_the_first_plane() -> None:
    component = Component(name="n", params={"x": "\U0001f600,"})
    assert Component.parse(component.label()) == component


@pytest.mark.parametrize("value", [0.1, 1e-5, 1e20, -0.5, math.pi])
def test_a_label_keeps_a_number(value: float) -> None:
    assert Component.parse(Component(name="n", params={"x": value}).label()).params["x"] == value


def test_merge_lays_mapping_on_mapping_and_changes_neither() -> None:
    base = {"a": {"x": 1, "y": {"z": 2}}, "b": 3}
    over = {"a": {"y": {"w": 4}}, "c": {"d": 5}, "b": {"e": 6}}
    assert merge(base, over) == {"a": {"x": 1, "y": {"z": 2, "w": 4}}, "b": {"e": 6}, "c": {"d": 5}}
    assert base == {"a": {"x": 1, "y": {"z": 2}}, "b": 3}
    assert over == {"a": {"y": {"w": 4}}, "c": {"d": 5}, "b": {"e": 6}}


def test_flatten_is_undone_by_dotted_keys() -> None:
    tree = {"a": {"x": 1, "y": {"z": [2]}}, "b": {}, "c": None}
    assert flatten(tree) == {"a.x": 1, "a.y.z": [2], "b": {}, "c": None}
    again: dict[str, Any] = {}
    for key, value in flatten(tree).items():
        set_dotted(again, key, value)
    assert again == tree


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"trian": {}}, "unknown key 'trian'; did you mean train"),
        ({"train": {"step": 3}}, "unknown key 'train.step'; did you mean steps"),
        ({"train": {"steps": "abc"}}, "train.steps: .*(got 'abc')"),
        ({"train": {"steps": -5}}, "train.steps: .*greater than or equal to 1.*-5"),
        ({"train": {"batch_size": 0}}, "train.batch_size: .*0"),
        ({"train": {"lr": math.nan}}, "train.lr: .*nan"),
        ({"train": {"lr": "nan"}}, "train.lr: .*nan"),
        ({"train": {"grad_clip": math.inf}}, "train.grad_clip: .*inf"),
        ({"train": {"betas": [0.9, 1.0]}}, r"betas .* must lie in \[0, 1\)"),
        ({"train": {"steps": 9, "warmup_steps": 9}}, "warmup_steps 9 must be below steps 9"),
        ({"train": 5}, "train: "),
        ({"grid": {"stages": 1}}, "grid.stages"),
        ({"seeds": {"model": 2**32}}, "seeds.model"),
        ({"seeds": {"model": 1.5}}, "seeds.model"),
        ({"device": "tpu"}, "device: .*'tpu'"),
        ({"threat": {"mode": False}}, "threat.mode"),
        ({"train": {"step": 3}, "gird": {}}, "unknown key 'train.step'.*; unknown key 'gird'"),
        ({1: 2}, "1"),
    ],
)
def test_a_wrong_setting_is_told_with_place_value_and_remedy(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Scenario, changes, "settings")
    import re

    assert re.search(message.replace("(got", r"\(got").replace("')", r"'\)"), str(caught.value))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("settings: ")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"grid": {"stages": 3}}, "no stage is open to attackers"),
        ({"threat": {"fraction": 0.1}}, "is not one attacker; at least 0.125 is"),
        ({"threat": {"fraction": 0.5}}, "4 of 8 replicas .* fewer than half"),
        ({"threat": {"start": 100}}, "threat.start 100 must be at least warmup_steps 140"),
        ({"threat": {"start": 350}}, "below steps 350"),
        ({"threat": {"gap": 100}}, "the last of 4 waves would start at step 440"),
        ({"threat": {"schedule": "single"}, "grid": {"replicas": 2}}, "1 of 2 replicas"),
    ],
)
def test_a_threat_without_a_place_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Scenario, changes, "settings").check_threat()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"threat": {"fraction": 0.49}},
        {"threat": {"fraction": 0.5, "allow_majority": True}},
        {"threat": {"fraction": 0.0, "schedule": "single"}},
        {"threat": {"fraction": 1.0, "allow_majority": True, "honest_last": 1}},
        {"threat": {"mode": "both", "honest_first": 0, "honest_last": 0}},
        {"threat": {"start": 274}},
    ],
)
def test_a_threat_with_a_place_is_accepted(changes: dict[str, Any]) -> None:
    build(Scenario, changes, "settings").check_threat()


@pytest.mark.parametrize(
    ("threat", "what"),
    [
        ({"honest_last": 0}, "the last stage send no activation: threat.honest_last"),
        ({"mode": "gradient", "honest_first": 0}, "the first stage send no gradient"),
    ],
)
def test_attackers_that_never_send_are_refused(threat: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build(Scenario, {"threat": threat}, "settings").check_threat()


def test_three_tenths_of_ten_are_three() -> None:
    scenario = Scenario(grid={"replicas": 10}, threat={"fraction": 0.3})
    assert scenario.attackers_per_stage == 3


def resolved(tuned: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    defense = Component(name="sentinel", params=given)
    cell = Cell(
        scenario=Scenario(), attack=Component(name="none"), defense=defense, tuned=tuned
    )  # fmt: skip
    return cell.resolved_defense.params


def test_what_is_given_goes_over_what_the_track_has_tuned() -> None:
    tuned = {"lambda": {"activation": 0.1, "gradient": 0.2}, "window": 50}
    assert resolved(tuned, {}) == tuned
    assert resolved(tuned, {"window": 9}) == {**tuned, "window": 9}
    assert resolved(tuned, {"lambda": {"gradient": 7}}) == {
        "lambda": {"activation": 0.1, "gradient": 7},
        "window": 50,
    }
    assert resolved(tuned, {"lambda": 7}) == {"lambda": 7, "window": 50}


def test_a_named_set_of_values_leaves_the_tuned_ones_out() -> None:
    given = {"values": "llama-3-1.2b-8x8", "window": 9}
    assert resolved({"lambda": 3, "window": 50}, given) == given


def test_a_yaml_value_that_is_none_is_refused() -> None:
    assert parse_value("[1, {a: b}]", "x") == [1, {"a": "b"}]
    for text in ("[", "{a", "2020-13-45", "'", "&", "0b_"):
        with pytest.raises(ConfigError, match="is not a YAML value"):
            parse_value(text, "--set a=...")
