from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel_bench.config import Scenario


@pytest.fixture
def call(
    command_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Any]:
    """Return a function that runs the command line in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    return command_line


@pytest.fixture
def tiny(make_scenario: Callable[..., Scenario], tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that writes a tiny scenario to a file and gives the options to run it."""

    def options(**changes: Any) -> list[str]:
        path = tmp_path / "tiny.yaml"
        content = make_scenario(**changes).model_dump(mode="json", exclude={"track"})
        path.write_text(yaml.safe_dump(content))
        return ["--config", str(path), "--threads", "1"]

    return options
