"""Reads `curves.json` beside a result; what has another form is left out with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sentinel_bench.leaderboard._read import Result
from sentinel_bench.leaderboard.curves import CURVES

LARGEST = 200_000
"""Bytes of a file that is read."""

Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Width = Annotated[int, Field(strict=True, ge=1, lt=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=200)]
Reading = tuple[Count, Number | None, Number | None, Number | None]
"""Step, value, low and high."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Loss(_Part):
    """Means of `every` steps each; None where one was not finite."""

    every: Width
    values: list[Number | None] = Field(max_length=1000)


class Signals(_Part):
    """Checked and flagged signals in parts of `every` steps, from the step `start` on."""

    every: Width
    start: Count = Field(alias="from")
    honest: list[tuple[Count, Count]] = Field(max_length=1000)
    tampered: list[tuple[Count, Count]] = Field(max_length=1000)


class Statistic(_Part):
    """A statistic of one worker over time: at its flags, and in the trace."""

    name: Text
    flags: list[Reading] = Field(max_length=1000)
    trace: list[Reading] = Field(max_length=1000)


class Worker(_Part):
    """A worker that tells something."""

    role: Text
    stage: Count
    replica: Count
    acted: Count | None
    banned: Count | None
    attack: Text
    direction: Text
    statistics: list[Statistic] = Field(max_length=10)


class Curves(_Part):
    """Content of `curves.json`; see `leaderboard.curves`."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=1)]
    digest: str
    steps: Width
    warmup: Count
    loss: Loss
    attackers: list[tuple[Count, Count, int | None, Count | None]] = Field(max_length=1000)
    bans: list[tuple[Count, Count, Count, bool]] = Field(max_length=1000)
    signals: Signals
    workers: list[Worker] = Field(max_length=10)


def read_curves(item: Result) -> Curves | str | None:
    """Return the curves of a result, why they cannot be used, or None if there are none."""
    path: Path = item.path.parent / CURVES
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > LARGEST:
            return f"{CURVES} is larger than {LARGEST:,} bytes"
        found = Curves.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        return f"{CURVES}: {'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}"
    except OSError as error:
        return f"{CURVES} cannot be read: {error.strerror or error}"
    return found if found.digest == item.digest else f"{CURVES} is of another run"
