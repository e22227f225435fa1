import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sentinel_bench.config import DataConfig
from sentinel_bench.data import _cache
from sentinel_bench.data import tokens as module
from sentinel_bench.data.tokens import load_tokens


@pytest.fixture
def config(corpus: Path) -> DataConfig:
    return DataConfig(path=corpus, vocab_size=300)


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "tokens").iterdir())


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(module, "train_bpe", fail)
    monkeypatch.setattr(module, "_encode", fail)


def test_a_hit_does_no_tokenizing_and_gives_the_same_ids(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_tokens(config)
    forbid(monkeypatch)
    said: list[str] = []
    second = load_tokens(config, said.append)
    assert said == []
    assert (first.train == second.train).all()
    assert (first.held_out == second.held_out).all()
    assert (first.vocab_size, first.digest) == (second.vocab_size, second.digest)
    assert first.train.dtype == second.train.dtype


def test_an_entry_is_one_file_and_no_temporary_file_is_left(
    config: DataConfig, cache: Path
) -> None:
    load_tokens(config)
    assert [path.suffix for path in entries(cache)] == [".npz"]


def test_other_text_or_settings_have_entries_of_their_own(
    config: DataConfig, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokens(config)
    load_tokens(config.model_copy(update={"vocab_size": 301}))
    assert len(entries(cache)) == 2
    (corpus / "00.txt").write_text("changed")
    load_tokens(config)
    assert len(entries(cache)) == 3
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99")
    load_tokens(config)
    assert len(entries(cache)) == 4
    monkeypatch.setattr(module, "FORMAT", 99)
    load_tokens(config)
    assert len(entries(cache)) == 5


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "flipped", "other keys", "other ids"])
def test_a_corrupt_entry_is_built_again_with_a_line(
    config: DataConfig, cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_tokens(config)
    (entry,) = entries(cache)
    data = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        entry.write_bytes(b"")
    elif damage == "text":
        entry.write_text("not an archive")
    elif damage == "flipped":
        middle = len(data) // 2
        entry.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "other keys":
        np.savez(entry, train=first.train)
    else:
        np.savez(
            entry,
            train=first.train[1:],
            held_out=first.held_out,
            vocab_size=first.vocab_size,
            digest=first.digest,
        )
    said: list[str] = []
    again = load_tokens(config, said.append)
    assert again.digest == first.digest
    assert "built again" in said[0]
    forbid(monkeypatch)
    assert load_tokens(config).digest == first.digest


def test_every_cut_of_an_entry_is_noticed(config: DataConfig, cache: Path) -> None:
    load_tokens(config)
    (entry,) = entries(cache)
    data = entry.read_bytes()
    said: list[str] = []
    for size in range(0, len(data), max(1, len(data) // 50)):
        entry.write_bytes(data[:size])
        assert _cache.read(entry.stem, said.append) is None
    assert all("built again" in line for line in said)


def test_a_cache_folder_that_cannot_be_made_gives_one_warning(
    config: DataConfig, cache: Path
) -> None:
    cache.write_text("a file where the folder should be")
    said: list[str] = []
    tokens = load_tokens(config, said.append)
    assert len(tokens.train)
    warnings = [line for line in said if "cache" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: ")
    assert "SENTINEL_BENCH_CACHE" in warnings[0]


def test_a_full_disk_gives_one_warning_and_leaves_nothing_behind(
    config: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said: list[str] = []
    assert len(load_tokens(config, said.append).train)
    assert [line for line in said if "No space left" in line]
    assert entries(cache) == []


def test_an_interrupted_write_leaves_neither_entry_nor_temporary_file(
    config: DataConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_tokens(config)
    assert entries(cache) == []


def test_two_processes_may_write_the_same_entry_at_once(corpus: Path, cache: Path) -> None:
    code = (
        "import sys; from sentinel_bench.config import DataConfig;"
        "from sentinel_bench.data.tokens import load_tokens;"
        "print(load_tokens(DataConfig(path=sys.argv[1], vocab_size=300)).digest)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(corpus)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    digests = {process.communicate(timeout=60)[0] for process in processes}
    assert len(digests) == 1
    assert [process.returncode for process in processes] == [0, 0]
    assert len(entries(cache)) == 1


def test_without_a_setting_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENTINEL_BENCH_CACHE")
    assert "sentinel-bench" in str(_cache.folder())
