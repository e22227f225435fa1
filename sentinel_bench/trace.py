"""The trace of a run: every statistic of every tested worker, for whoever wants to look closer.

`run --trace` writes `trace.jsonl` beside `events.jsonl`, a row for each boundary in each step,
written through like an event. Scores never use it, and it is no part of the identity of a cell.

    {"type": "trace", "schema": 1}
    {"type": "statistics", "names": ["l1", "l2"]}       before its first use; numbered from 0
    {"type": "boundary", "step": 30, "stage": 1, "direction": "activation",
     "statistics": 0, "replicas": [0, 1, 3], "data": "..."}

`data` is base64 of little-endian float32 `[names, replicas + 2]`: the value of each of these
replicas, then low and high of the fence (infinite while it is open). Only who was tested is there.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sentinel_bench.errors import RunError
from sentinel_bench.record import append_row, read_rows

if TYPE_CHECKING:
    import numpy as np

TRACE = "trace.jsonl"
SCHEMA = 1
MAX_INDEX = 2**31


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a defense made of the workers that it tested at one boundary, or of their updates.

    Attributes:
        step, stage: training step, and the stage that sent.
        direction: "activation", "gradient" or "update".
        names: of the statistics.
        replicas: who was tested.
        values: `[names, replicas]` float32.
        low, high: `[names]` float32.
    """

    step: int
    stage: int
    direction: str
    names: tuple[str, ...]
    replicas: tuple[int, ...]
    values: np.typing.NDArray[np.float32]
    low: np.typing.NDArray[np.float32]
    high: np.typing.NDArray[np.float32]


class Trace:
    """A trace that is being written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / TRACE
        self._numbers: dict[tuple[str, ...], int] = {}
        try:
            self._file = self._path.open("xb", buffering=0)
        except OSError as error:
            raise RunError(f"{self._path}: cannot be made: {error.strerror}") from error
        append_row(self._file, self._path, "trace", schema=SCHEMA)

    def append(
        self,
        step: int,
        stage: int,
        direction: str,
        statistics: Mapping[int, Mapping[str, Sequence[float]]],
    ) -> None:
        """Write one boundary; nothing where nobody was tested, or nothing is said.

        Args:
            step, stage, direction: as in `Boundary`.
            statistics: replica to name to value, low and high; the same names for all.

        Raises:
            RunError: the write failed; what was written of the row is taken back.
        """
        import numpy as np

        names = tuple(next(iter(statistics.values()), {}))
        if not names:
            return
        rows = [
            [
                *(own[name][0] for own in statistics.values()),
                *next(iter(statistics.values()))[name][1:],
            ]
            for name in names
        ]
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite
            data = np.asarray(rows, dtype="<f4").tobytes()
        if names not in self._numbers:
            append_row(self._file, self._path, "statistics", names=list(names))
            self._numbers[names] = len(self._numbers)
        append_row(
            self._file,
            self._path,
            "boundary",
            step=step,
            stage=stage,
            direction=direction,
            statistics=self._numbers[names],
            replicas=list(statistics),
            data=base64.b64encode(data).decode(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def tracing(folder: Path, *, wanted: bool) -> AbstractContextManager[Trace | None]:
    """Return a context with a new trace in a run folder, or with None if it is not wanted."""
    return Trace(folder) if wanted else nullcontext()


def read_trace(folder: Path) -> list[Boundary] | None:
    """Read `trace.jsonl`, in order, without a last row that was cut off; None if the run has none.

    Raises:
        RunError: it cannot be read, or holds something else.
    """
    path = folder / TRACE
    if not path.exists():
        return None
    head, *rows = read_rows(path)
    if head != {"type": "trace", "schema": SCHEMA}:
        raise RunError(f"{path}: is no trace of schema {SCHEMA}")
    names: list[tuple[str, ...]] = []
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            if row["type"] == "statistics":
                names.append(tuple(map(str, row["names"])))
            else:
                found.append(_boundary(row, names))
        except (KeyError, IndexError, TypeError, ValueError, binascii.Error) as error:
            raise RunError(f"{path}:{number}: no row of a trace: {error!r}") from error
    return found


def _boundary(row: Mapping[str, Any], known: Sequence[tuple[str, ...]]) -> Boundary:
    import numpy as np

    names, replicas = known[_index(row["statistics"])], tuple(map(_index, row["replicas"]))
    data = np.frombuffer(base64.b64decode(row["data"], validate=True), dtype="<f4")
    data = data.reshape(len(names), len(replicas) + 2)
    return Boundary(
        step=_index(row["step"]),
        stage=_index(row["stage"]),
        direction=str(row["direction"]),
        names=names,
        replicas=replicas,
        values=data[:, :-2],
        low=data[:, -2],
        high=data[:, -1],
    )


def _index(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_INDEX:
        raise ValueError(f"{value!r} is no index")
    return value
