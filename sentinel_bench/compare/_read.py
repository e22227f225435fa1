"""What a set of results holds: read from a folder of them, or from a `board.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sentinel_bench.errors import ConfigError
from sentinel_bench.leaderboard._read import Problem, Result, read
from sentinel_bench.leaderboard._summary import newest

BOARD, RESULT = "board.json", "result.json"

Seeds = tuple[int, ...]


class Key(NamedTuple):
    """Which cell; `scenario` is the digest of its setting. Both may be empty: of no matter."""

    track: str
    scenario: str
    attack: str
    mode: str
    defense: str


@dataclass
class Cell:
    """Scores of the valid runs of a cell by their seeds, and how often it ended how."""

    values: dict[Seeds, dict[str, float | None]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass
class Set:
    """Cells by what they are, the words for their settings, and what could not be read."""

    cells: dict[Key, Cell] = field(default_factory=dict)
    settings: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def open_set(path: Path) -> Set:
    """Read a folder of results or of runs, a `result.json`, or a `board.json` (or its folder).

    Raises:
        ConfigError: it is none of these, or holds nothing that can be used.
    """
    if path.is_file() and path.name != RESULT:
        return _of_board(path)
    found, problems = read([path])
    if found:
        return _of_results(found, problems)
    if (path / BOARD).is_file():
        return _of_board(path / BOARD)
    if problems:
        raise ConfigError(f"{path}: no usable {RESULT}: {problems[0].place}: {problems[0].reason}")
    raise ConfigError(f"{path}: holds no {RESULT} and no {BOARD}; name a folder of finished runs")


def _of_results(found: Sequence[Result], problems: Sequence[Problem]) -> Set:
    told = Set(problems=[f"{p.place}: {p.reason}" for p in problems])
    for item in newest(found)[0]:
        told.settings[item.track, item.scenario] = item.setting
        key = Key(item.track, item.scenario, item.attack, item.mode, item.defense)
        cell = told.cells.setdefault(key, Cell())
        cell.outcomes[item.outcome] += 1
        if item.outcome != "invalid":
            cell.values[item.seeds] = dict(item.scores)
    return told


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Setting(_Part):
    number: int
    digest: str
    text: str


class _Seeds(_Part):
    model: int
    data: int
    threat: int


class _Invalid(_Part):
    seeds: list[int]


class _Row(_Part):
    attack: str
    mode: str
    defense: str
    setting: int
    seeds: list[_Seeds]
    values: dict[str, list[float | None]]
    outcomes: dict[str, int]
    invalid: list[_Invalid]

    def cell(self) -> Cell:
        """Raises ValueError: a metric has not one value for each of the seeds."""
        if any(len(values) != len(self.seeds) for values in self.values.values()):
            raise ValueError(f"a row of {self.attack!r} has not one value for each of its seeds")
        invalid = {tuple(one.seeds) for one in self.invalid}
        cell = Cell(outcomes=Counter({how: n for how, n in self.outcomes.items() if n}))
        for number, one in enumerate(self.seeds):
            seeds = (one.model, one.data, one.threat)
            if seeds not in invalid:
                cell.values[seeds] = {name: v[number] for name, v in self.values.items()}
        return cell


class _Board(_Part):
    version: Literal[1] = Field(alias="schema")
    track: str
    settings: list[_Setting]
    rows: list[_Row]


def _of_board(path: Path) -> Set:
    """Read a `board.json`.

    Raises:
        ConfigError: it is none, or one without the values of single seeds.
    """
    told = Set()
    try:
        board = _Board.model_validate_json(path.read_bytes())
        numbers = {setting.number: setting for setting in board.settings}
        for row in board.rows:
            setting = numbers[row.setting]
            told.settings[board.track, setting.digest] = setting.text
            key = Key(board.track, setting.digest, row.attack, row.mode, row.defense)
            told.cells[key] = row.cell()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path}: cannot be read as a {BOARD}: {_reason(error)}; "
            "'sentinel-bench leaderboard build' writes one"
        ) from error
    if not told.cells:
        raise ConfigError(f"{path}: holds no row")
    return told


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False)[0]
        return " ".join([".".join(map(str, first["loc"])), first["msg"]]).strip()
    if isinstance(error, KeyError):
        return f"a row of a setting that is not listed, {error}"
    return str(error)
