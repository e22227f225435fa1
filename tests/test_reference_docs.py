"""The pages of `docs/`: what they hold, which files are touched, and that they are up to date."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from sentinel_bench import reference
from sentinel_bench.aggregators import AGGREGATORS
from sentinel_bench.api import (
    Aggregator,
    AggregatorParams,
    Attack,
    AttackContext,
    Defense,
    Knowledge,
    ResponseParams,
)
from sentinel_bench.attacks import ATTACKS
from sentinel_bench.cli import main
from sentinel_bench.config import Cell, Component, Frozen, Scenario
from sentinel_bench.defenses import DEFENSES
from sentinel_bench.errors import ConfigError, PluginError, RunError
from sentinel_bench.leaderboard import measured, summarize

ROOT = Path(__file__).parents[1]
PIPES = "|a - b| * c"
LONG = "all that " + 40 * "very long " + "text"


class Sides(Frozen):
    activation: float = Field(0.5, ge=0, lt=1)
    gradient: float = Field(0.25, ge=0, lt=1)


class NeedyParams(Frozen):
    """Parameters of every form that there is."""

    depth: int = Field(gt=1, description="has to be given")
    kind: Literal["one", "two"] = Field("one", description=f"which; {PIPES}")
    limit: float | None = Field(None, gt=0, description="none: no limit")
    beta: Sides = Field(Sides(), description="for each direction")
    inner: Component = Field(Component(name="zeros"), description="another one")
    names: tuple[Literal["a", "b"], ...] = Field(("a", "b"), description="some")
    wide: bool = Field(True, alias="very-wide", description="or narrow")


class Needy(Attack[NeedyParams]):
    """Needs a parameter.

    And more text, which is not the summary.
    """

    name = "needy"
    goal = f"be <odd> {PIPES}"
    formula = PIPES
    source = LONG
    knowledge = frozenset({Knowledge.HONEST, Knowledge.DETECTOR})
    adaptive = True
    axis = "weights"
    Params = NeedyParams

    @classmethod
    def wraps(cls, params: Any) -> list[Component]:
        return [params.inner]

    def signal(self, x: Any, ctx: AttackContext) -> Any:
        return x


class Blind(Defense[ResponseParams]):
    """Sees nothing."""

    name = "blind"
    goal = source = "test"
    formula = "the `code`"
    blind_to: ClassVar[str] = f"everything; {LONG}"


class Picky(Aggregator[AggregatorParams]):
    """Takes the first row."""

    name: ClassVar[str] = "picky"
    goal = formula = source = "test"

    def requires(self, n: int, f: int) -> str | None:
        return self.condition("n > 8f", 8 * f + 1, n, f)


@pytest.fixture
def few(plug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in plugins are these three."""
    plug(Needy, Blind, Picky)
    names = {"attack": ["needy"], "defense": ["blind"], "aggregator": ["picky"]}
    monkeypatch.setattr(reference, "_BUILTINS", names)


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, list[str]]]]:
    """Return a function that runs `docs build` and returns its exit status and its output."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*args: object) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["sentinel-bench", "docs", "build", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capsys.readouterr().out.splitlines()

    yield run
    signal.signal(signal.SIGTERM, handler)


def save(root: Path, attack: str, defense: str, mode: str = "activation") -> None:
    """Write a result as far as a table needs it."""
    zero = dict.fromkeys(("model", "data", "threat"), 0)
    names = {"track": "core", "attack": attack, "defense": defense, "mode": mode}
    scores = {"outcome": "defended", "recall": 90.0, "f1": 80.0, "false_bans": 0}
    content = {
        "schema": 1,
        "digest": f"{attack} {defense}",
        "cell": {**names, "scenario": "s", "seeds": zero},
        "scores": {**scores, "excess_loss": 0.5, "undetected_damage": 0.0},
    }
    path = root / f"{attack}-{defense}" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


# The pages that are committed.


def test_the_committed_pages_are_what_docs_build_writes() -> None:
    wrong = reference.changes(ROOT / "docs", ROOT / "leaderboards")
    assert [f"{c.what}: {c.path.relative_to(ROOT)}" for c in wrong] == []


def test_every_built_in_plugin_has_a_page_and_a_line_in_the_index_and_no_other_has(
    plug: Callable[..., None], tmp_path: Path
) -> None:
    plug(Needy, Blind, Picky)
    texts = reference.pages(tmp_path)
    kinds = {"attacks": ATTACKS, "defenses": DEFENSES, "aggregators": AGGREGATORS}
    assert {path.partition("/")[0] for path in texts} == {*kinds}
    for kind, names in kinds.items():
        pages = {path for path in texts if path.startswith(kind)}
        assert pages == {f"{kind}/{name}.md" for name in (*names, "README")}
        index = texts[f"{kind}/README.md"].splitlines()
        assert [line.split("](")[0] for line in index[6:]] == [f"| [{name}" for name in names]
    assert all(reference.MARK in text for text in texts.values())
    assert all("Not measured yet." in t for path, t in texts.items() if "README" not in path)


# What a page holds.


def test_a_page_of_an_attack_by_hand(few: None, tmp_path: Path) -> None:
    save(tmp_path, "needy:depth=2", "sentinel")
    assert reference.pages(tmp_path)["attacks/needy.md"] == (
        f"""\
# needy

Generated by `sentinel-bench docs build`; do not edit.

Needs a parameter.

* Goal: be &lt;odd&gt; \\|a - b\\| \\* c
* Formula: `{PIPES}`
* Knowledge: honest+detector, and what the attacks inside see
* Adaptive: yes
* Axis: weights
* Source: {LONG}

## Parameters

| name | default | allowed | description |
| :-- | :-- | :-- | :-- |
| `depth` | `required` | integer &gt; 1 | has to be given |
| `kind` | `one` | one of one, two | which; \\|a - b\\| \\* c |
| `limit` | `null` | number &gt; 0 or null | none: no limit |
"""
        """\
| `beta` | `{"activation": 0.5, "gradient": 0.25}` | number &gt;= 0 and &lt; 1, or .activation \
and .gradient | for each direction |
| `inner` | `{"name": "zeros", "params": {}}` | name, or name:key=value | another one |
| `names` | `["a", "b"]` | list: one of a, b | some |
| `very-wide` | `true` | boolean | or narrow |

## Use

    sentinel-bench run --attack needy --defense sentinel

## Measured

* core, activation, depth=2, 1 seed: under sentinel excess loss +0.500, recall 90, F1 80, \
false bans 0
"""
    )


def test_a_page_of_a_defense_by_hand(few: None, tmp_path: Path) -> None:
    text = reference.pages(tmp_path)["defenses/blind.md"]
    assert text.startswith(
        f"""\
# blind

{reference.MARK}

Sees nothing.

* Goal: test
* Formula: `` the `code` ``
* Source: test

## Does not protect against

everything; {LONG}

## Parameters
"""
    )
    assert "    sentinel-bench run --attack zeros --defense blind\n" in text
    assert text.endswith("## Measured\n\nNot measured yet.\n")


def test_a_page_of_an_aggregator_by_hand(few: None, tmp_path: Path) -> None:
    assert reference.pages(tmp_path)["aggregators/picky.md"] == (
        f"""\
# picky

{reference.MARK}

Takes the first row.

* Goal: test
* Formula: `test`
* Condition: n &gt; 8f: 9 rows for f = 1
* Source: test

## Parameters

| name | default | allowed | description |
| :-- | :-- | :-- | :-- |
| `f` | `null` | integer &gt;= 0 or null | faulty rows to withstand; default: what the \
harness says |
| `strict` | `true` | boolean | refuse numbers of rows that the rule is not proven for |

## Use

    sentinel-bench run --attack update-sign-flip --defense none --aggregator picky

## Measured

Not measured yet.
"""
    )


def test_an_index_holds_what_tells_the_plugins_of_a_kind_apart(few: None, tmp_path: Path) -> None:
    pages = reference.pages(tmp_path)
    heads = {kind: pages[f"{kind}/README.md"].splitlines()[4] for kind in ("attacks", "defenses")}
    assert heads["attacks"] == "| name | goal | knowledge | source |"
    assert heads["defenses"] == "| name | goal | source |"
    assert pages["aggregators/README.md"].splitlines()[4:] == [
        "| name | goal | condition | source |",
        "| :-- | :-- | :-- | :-- |",
        "| [picky](picky.md) | test | n &gt; 8f: 9 rows for f = 1 | test |",
    ]


class Undemanding(Picky):
    """Needs nothing."""

    name = "undemanding"

    def requires(self, n: int, f: int) -> str | None:
        return None


class Wordy(Picky):
    """Says it in its own words."""

    name = "wordy"

    def requires(self, n: int, f: int) -> str | None:
        return "rows, and plenty of them"


class DepthParams(AggregatorParams):
    depth: int


class Deep(Picky):
    """Needs a parameter."""

    name = "deep"
    Params = DepthParams


class Mute(Picky):
    """Cannot say what it needs."""

    name = "mute"

    def requires(self, n: int, f: int) -> str | None:
        raise ValueError("no idea")


def test_a_condition_is_what_the_rule_says_itself() -> None:
    assert reference.condition(Picky) == "n > 8f: 9 rows for f = 1"
    assert reference.condition(Undemanding) == "none"
    assert reference.condition(Wordy) == "rows, and plenty of them"
    assert reference.condition(Deep) == "depends on its parameters"
    with pytest.raises(PluginError, match=r"aggregator 'mute' .* ValueError: no idea"):
        reference.condition(Mute)


@pytest.mark.parametrize("rule", ["mean", "krum"])
def test_of_an_aggregator_is_told_what_was_measured_without_a_defense(
    rule: str, tmp_path: Path
) -> None:
    none, robust = Component(name="none"), Component(name=rule)
    cell = Cell(scenario=Scenario(), attack=none, defense=none, aggregator=robust)
    save(tmp_path, "zeros", cell.protection)
    save(tmp_path, "zeros", "sentinel + krum")
    tracks = summarize([tmp_path])["tracks"]
    lines = measured("defense", cell.protection, tracks, ("sentinel",))
    pages = reference.pages(tmp_path)
    assert lines
    for name in ("mean", "krum", "median"):
        text = pages[f"aggregators/{name}.md"]
        found = text.partition("## Measured\n\n")[2].splitlines()
        assert found == ([f"* {x}" for x in lines] if name == rule else ["Not measured yet."])


def test_the_measured_lines_are_those_of_the_results(few: None, tmp_path: Path) -> None:
    save(tmp_path, "needy", "none")
    save(tmp_path, "needy", "blind")
    tracks = summarize([tmp_path])["tracks"]
    for kind, name in (("attack", "needy"), ("defense", "blind")):
        lines = measured(kind, name, tracks, "sentinel")  # type: ignore[arg-type]
        text = reference.pages(tmp_path)[f"{kind}s/{name}.md"]
        assert lines and text.endswith("\n" + "".join(f"* {line}\n" for line in lines))


# Which files are touched.


def test_what_is_written_once_is_not_written_again(
    few: None, call: Callable[..., Any], tmp_path: Path
) -> None:
    out, results = tmp_path / "docs", tmp_path / "results"
    results.mkdir()
    names = [
        *("attacks/README.md", "attacks/needy.md", "defenses/README.md", "defenses/blind.md"),
        *("aggregators/README.md", "aggregators/picky.md"),
    ]
    options = ("--out", out, "--results", results)
    status, lines = call(*options)
    assert (status, lines) == (0, [f"missing: {out / name}" for name in names])
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*.*")) == sorted(names)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.rglob("*.md")}
    assert call(*options) == (0, [])
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in out.rglob("*.md")} == before


def test_check_names_what_differs_and_writes_nothing(
    few: None, call: Callable[..., Any], tmp_path: Path
) -> None:
    out, results = tmp_path / "docs", tmp_path / "results"
    results.mkdir()
    options = ("--out", out, "--results", results)
    assert call(*options, "--check")[0] == 1
    assert not out.exists()
    call(*options)
    assert call(*options, "--check") == (0, [])
    page, index = out / "attacks" / "needy.md", out / "defenses" / "README.md"
    page.write_text(page.read_text() + " ")
    index.unlink()
    old = out / "defenses" / "old.md"
    old.write_text(f"# old\n\n{reference.MARK}\n")
    status, lines = call(*options, "--check")
    assert status == 1
    assert lines == [f"different: {page}", f"missing: {index}", f"stale: {old}"]
    assert page.read_text().endswith(" ") and not index.exists() and old.exists()


def test_a_new_result_makes_a_page_differ(few: None, tmp_path: Path) -> None:
    out, results = tmp_path / "docs", tmp_path / "results"
    results.mkdir()
    reference.build(out, results)
    save(results, "needy", "none")
    assert [c.path.name for c in reference.changes(out, results)] == ["needy.md"]


def test_only_a_generated_page_is_removed(few: None, tmp_path: Path) -> None:
    out = tmp_path / "docs"
    (out / "attacks").mkdir(parents=True)
    old, mine = out / "attacks" / "old.md", out / "attacks" / "mine.md"
    old.write_text(f"# old\n\n{reference.MARK}\n")
    mine.write_text("# mine\n")
    outside = out / "other.md"
    outside.write_text(reference.MARK)
    reference.build(out, tmp_path)
    assert not old.exists()
    assert mine.read_text() == "# mine\n" and outside.exists()


def test_results_that_are_not_there_are_an_error(few: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        reference.changes(tmp_path, tmp_path / "gone")
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ConfigError, match="no usable"):
        reference.changes(tmp_path, tmp_path)


def test_a_place_that_cannot_be_written_is_an_error(few: None, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "attacks").write_text("a file")
    with pytest.raises(RunError, match="attacks"):
        reference.build(tmp_path / "docs", tmp_path)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    script = """
import sys
from sentinel_bench.cli import main
sys.argv = ["sentinel-bench", "docs", "build", "--out", "docs", "--results", "."]
try:
    main()
except SystemExit as ended:
    print([m for m in ("torch", "transformers", "sklearn") if m in sys.modules], ended.code)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr
    assert (tmp_path / "docs" / "attacks" / "zeros.md").exists()
