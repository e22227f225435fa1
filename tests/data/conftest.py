from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; the entries lie in its folder `tokens`."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SENTINEL_BENCH_CACHE", str(folder))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 24 small text files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(24):
        (folder / f"{i:02}.txt").write_text(f"Document {i} says {i * 7919} things. " * 20)
    return folder
