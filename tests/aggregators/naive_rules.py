"""The rules in plain Python, read literally from their definitions, on lists of floats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

Row = list[float]


def columns(rows: list[Row]) -> list[Row]:
    return [list(column) for column in zip(*rows, strict=True)]


def mean(rows: list[Row], f: int) -> Row:
    return [sum(column) / len(column) for column in columns(rows)]


def median(rows: list[Row], f: int) -> Row:
    return [statistics.median(column) for column in columns(rows)]


def trimmed_mean(rows: list[Row], f: int) -> Row:
    f = min(f, (len(rows) - 1) // 2)
    return [statistics.fmean(sorted(column)[f : len(rows) - f]) for column in columns(rows)]


def squared_distance(a: Row, b: Row) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def krum_order(rows: list[Row], f: int) -> list[int]:
    n = len(rows)
    scores = []
    for i in range(n):
        others = sorted(squared_distance(rows[i], rows[j]) for j in range(n) if j != i)
        scores.append(sum(others[: max(1, n - f - 2)]))
    return sorted(range(n), key=lambda i: (scores[i], i))


def krum(rows: list[Row], f: int) -> Row:
    return rows[krum_order(rows, f)[0]]


def multi_krum(rows: list[Row], f: int) -> Row:
    return mean([rows[i] for i in krum_order(rows, f)[: max(1, len(rows) - f)]], f)


def bulyan(rows: list[Row], f: int) -> Row:
    left, chosen = list(rows), []
    for _ in range(max(1, len(rows) - 2 * f)):
        chosen.append(left.pop(krum_order(left, f)[0]))
    theta = len(chosen)
    beta = theta - 2 * f
    if beta < 1:
        return median(chosen, f)
    out = []
    for column in columns(chosen):
        middle = statistics.median(column)
        out.append(statistics.fmean(sorted(column, key=lambda v: (abs(v - middle), v))[:beta]))
    return out


def geometric_median(rows: list[Row], f: int) -> Row:
    z = mean(rows, f)
    for _ in range(3000):
        weights = [1 / max(1e-12, math.dist(row, z)) for row in rows]
        total = sum(weights)
        z = [
            sum(w * v for w, v in zip(weights, column, strict=True)) / total
            for column in columns(rows)
        ]
    return z


def centered_clipping(rows: list[Row], f: int) -> Row:
    v = median(rows, f)
    tau = statistics.median(math.dist(row, v) for row in rows)
    for _ in range(3):
        clipped = []
        for row in rows:
            distance = math.dist(row, v)
            factor = 1.0 if distance <= tau else tau / distance
            clipped.append([(x - c) * factor for x, c in zip(row, v, strict=True)])
        v = [c + m for c, m in zip(v, mean(clipped, f), strict=True)]
    return v


RULES: dict[str, Callable[[list[Row], int], Row]] = {
    "mean": mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
    "bulyan": bulyan,
    "geometric-median": geometric_median,
    "centered-clipping": centered_clipping,
}
