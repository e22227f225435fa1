"""What the one that writes the record asks of the processes that run a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench import plugins
from sentinel_bench.config import Scenario
from sentinel_bench.pipeline.remote import Remote

SOURCE = '''"""A file."""
from sentinel_bench.api import Attack, NoParams
class Twice(Attack[NoParams]):
    """Sends twice the signal."""
    name, goal, formula, source = "twice", "none", "2 x", "ours"
'''


class Crew:
    """Remembers what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def call(self, method: str, /, *args: Any, listen: Any = None) -> Any:
        self.asked.append((method, *args))
        return 0


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    plugins.use([path])
    yield path
    plugins.use([])


def test_the_processes_get_the_sources_of_plugin_files(
    file: Path, make_scenario: Callable[..., Scenario]
) -> None:
    crew: Any = Crew()
    file.write_text("changed meanwhile")
    Remote(lambda: crew, make_scenario(), [], "digest")
    assert crew.asked[0][0] == "open"
    assert crew.asked[0][-1] == {file: SOURCE.encode()}


def test_a_session_is_opened_and_warmed_up_again_where_the_crew_is_another(
    make_scenario: Callable[..., Scenario],
) -> None:
    crews: list[Any] = [Crew(), Crew()]
    session = Remote(lambda: crews[0], make_scenario(), [], "digest")
    session.warm_up()
    del crews[0]
    cell: Any = object()
    session.state_bytes(cell)
    assert [asked[0] for asked in crews[0].asked] == ["open", "warm_up", "state_bytes"]
