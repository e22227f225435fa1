"""Whom the harness lets the ledger judge."""

from __future__ import annotations

from typing import Any

import torch

from sentinel_bench.api import Defense, ResponseParams, Signals, Verdict
from sentinel_bench.ledger import Ledger
from sentinel_bench.pipeline.inspect import Inspector
from sentinel_bench.pipeline.tamper import Sent

REPLICAS = 8


def rows(*replicas: int) -> list[bool]:
    """The mask of some replicas."""
    return [r in replicas for r in range(REPLICAS)]


class Suspicious(Defense[ResponseParams]):
    """Flags the replicas that it is told to, tested or not."""

    name = "suspicious"
    goal = formula = source = "test"
    suspects = rows()

    def check(self, signals: Signals) -> Verdict:
        self.active = signals.active.tolist()
        return Verdict(torch.tensor(self.suspects), torch.tensor(rows()))


class Silent:
    def append(self, kind: str, /, **fields: Any) -> None: ...


def test_banned_and_tainted_workers_are_neither_tested_nor_judged():
    defense = Suspicious(ResponseParams(violations=1))
    book = Ledger(defense.params, 3, REPLICAS)
    inspector = Inspector(defense, book, Silent())
    sent = Sent(torch.ones(REPLICAS, 1, 2, 4), [False] * REPLICAS, [True] * REPLICAS)

    def inspect(stage: int, suspects: list[bool], tainted: list[bool]) -> list[bool]:
        defense.suspects = suspects
        return inspector.inspect(stage, "activation", 0, sent, None, tainted)[1]

    tainted = inspect(0, rows(3), rows())
    assert tainted == rows(3)
    assert inspect(1, rows(3, 5), tainted) == rows(3, 5)  # 3 is tainted, and not judged again
    assert defense.active == [not t for t in rows(3)]
    assert book.violations == [rows(3), rows(5), rows()]
    inspector.end_step(0)
    assert (book.banned(0, 3), book.banned(1, 3), book.banned(1, 5)) == (True, False, True)
    assert inspect(0, rows(3, 6), rows()) == rows(6)  # 3 is banned at stage 0
    assert defense.active == [not t for t in rows(3)]
    assert book.violations[0] == rows(3, 6)
