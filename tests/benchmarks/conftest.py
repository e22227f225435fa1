from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import one another by their names."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
