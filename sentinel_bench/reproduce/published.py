"""The published tables of `published.yaml`, and which cell of ours each of their rows is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

import yaml
from pydantic import Field, model_validator

from sentinel_bench.config import Component, Frozen, Named, build, merge
from sentinel_bench.errors import ConfigError, nearest

Scale = Literal["tiny", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
NOT_HELD = ("table10", "table11")
"""Tables of the paper whose numbers are not in `published.yaml`."""


class Numbers(Frozen):
    """What a row prints; None where it prints nothing. Units: see `published.yaml`."""

    precision: float | None = None
    precision_std: float | None = None
    recall: float | None = None
    recall_std: float | None = None
    f1: float | None = None
    f1_std: float | None = None
    detection_steps: float | None = None
    detection_steps_median: float | None = None
    val_loss: float | None = None
    val_loss_std: float | None = None
    val_loss_unprotected: float | None = None
    val_loss_vanilla: float | None = None
    tps: float | None = None
    perplexity_clean: float | None = None
    perplexity_attacked: float | None = None
    perplexity_defended: float | None = None


class Target(Frozen):
    """What a row corresponds to at one scale: a cell of ours, or why there is none.

    Attributes:
        track: named scenario.
        scenario: changes laid on the track.
        defense: None where only the attack alone was published.
        aggregator: what takes the place of the mean.
        note: in what the counterpart differs.
        missing: why there is no counterpart; the others are then empty.
    """

    track: str = ""
    scenario: dict[str, Any] = {}
    defense: Named | None = None
    aggregator: Named = Component(name="mean")
    note: str = ""
    missing: str = ""


class Entry(Frozen):
    """A row of a table, as the file has it."""

    settings: dict[str, str | float] = {}
    mode: Literal["activation", "gradient", "mixed"] | None = None
    attack: Named | None = None
    numbers: Numbers
    paper: dict[str, Any] = {}
    tiny: dict[str, Any] = {}


class Table(Frozen):
    """A published table or figure, as the file has it.

    Attributes:
        of: tables whose rows it shows, in place of its own.
        missing: why it has no rows.
    """

    title: str
    baseline: float | None = None
    paper: dict[str, Any] = {}
    tiny: dict[str, Any] = {}
    notes: list[str] = []
    rows: list[Entry] = []
    of: list[str] = []
    missing: str = ""

    @model_validator(mode="after")
    def _one_content(self) -> Table:
        if sum(map(bool, (self.rows, self.of, self.missing))) != 1:
            raise ValueError(f"{self.title}: give one of rows, of and missing")
        return self


class Published(Frozen):
    """The content of `published.yaml`; see there."""

    spread: float = Field(gt=0)
    absent: dict[str, str]
    shared: dict[str, Any] = {}
    tables: dict[str, Table]


class Row(Frozen):
    """A row with all that its table says.

    Attributes:
        number: its place in the table, from 1.
        source: the table that prints it.
        settings: what tells it from the others, as printed.
        baseline: loss of plain training, if it is printed.
        tiny, paper: its counterpart at both scales.
    """

    number: int
    source: str
    settings: dict[str, str | float]
    mode: str | None
    attack: Component | None
    numbers: Numbers
    baseline: float | None
    tiny: Target
    paper: Target

    def target(self, scale: Scale) -> Target:
        """Return the counterpart at a scale."""
        return self.tiny if scale == "tiny" else self.paper

    @property
    def unprotected(self) -> float | None:
        """Published loss under the attack without defense, nats per token."""
        return _loss(self.numbers.val_loss_unprotected, self.numbers.perplexity_attacked)

    @property
    def protected(self) -> float | None:
        """Published loss under the attack with the defense, nats per token."""
        return _loss(self.numbers.val_loss, self.numbers.perplexity_defended)


@cache
def load() -> Published:
    """Read the file of the package."""
    text = files("sentinel_bench.reproduce").joinpath("published.yaml").read_text(encoding="utf-8")
    return build(Published, yaml.safe_load(text), "published.yaml")


def get(name: str) -> Table:
    """Return the table called `name`, which has rows.

    Raises:
        ConfigError: there is none, or it holds nothing that could be measured; with the reason.
    """
    published = load()
    if name in published.tables:
        table = published.tables[name]
        if table.missing:
            raise ConfigError(f"{name} cannot be reproduced: {table.missing}")
        return table
    if name in published.absent:
        raise ConfigError(f"there is no track {name}: {published.absent[name]}")
    if name in NOT_HELD:
        raise ConfigError(
            f"{name} cannot be reproduced: its numbers are not among those held here "
            "(tables 1-9 and 12-20)"
        )
    raise ConfigError(f"nothing published is called {name!r}{nearest(name, published.tables)}")


def rows(name: str) -> list[Row]:
    """Return the rows of a table in order.

    Raises:
        ConfigError: see `get`.
    """
    table = get(name)
    found = [_resolve(name, table, entry) for entry in table.rows]
    found += [row for other in table.of for row in rows(other)]
    return [row.model_copy(update={"number": i}) for i, row in enumerate(found, start=1)]


def available(name: str, scale: Scale) -> tuple[int, int, str]:
    """Return how many rows of a table have a counterpart, of how many, and why others have none.

    The reasons are joined; empty if nothing is missing.
    """
    table = load().tables[name]
    if table.missing:
        return 0, 0, table.missing
    targets = [row.target(scale) for row in rows(name)]
    reasons = dict.fromkeys(t.missing for t in targets if t.missing)
    return sum(not t.missing for t in targets), len(targets), "; ".join(reasons)


def _resolve(name: str, table: Table, entry: Entry) -> Row:
    numbers = entry.numbers
    printed = _loss(numbers.val_loss_vanilla, numbers.perplexity_clean)
    return Row(
        number=0,
        source=name,
        settings=entry.settings,
        mode=entry.mode,
        attack=entry.attack,
        numbers=numbers,
        baseline=table.baseline if printed is None else printed,
        tiny=_target(name, table.tiny, entry.tiny),
        paper=_target(name, table.paper, entry.paper),
    )


def _target(name: str, table: Mapping[str, Any], row: Mapping[str, Any]) -> Target:
    whole = merge(table, row)
    if whole.get("missing"):
        whole = {"missing": whole["missing"]}
    return build(Target, whole, f"published.yaml, {name}")


def _loss(loss: float | None, perplexity: float | None) -> float | None:
    return loss if perplexity is None else math.log(perplexity)
