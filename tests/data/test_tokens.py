import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sentinel_bench.config import DataConfig
from sentinel_bench.data import load_documents
from sentinel_bench.data.tokens import END_OF_DOCUMENT, load_tokens, train_bpe
from sentinel_bench.errors import ConfigError

BPE = train_bpe(["the quick brown fox " * 50], 300)


@given(st.text())
def test_any_text_is_the_same_after_encoding_and_decoding(text: str) -> None:
    assert BPE.decode(BPE.encode(text).ids) == text


def test_the_name_of_the_end_token_within_a_text_is_text() -> None:
    text = f"before {END_OF_DOCUMENT} after"
    ids = BPE.encode(text).ids
    assert BPE.token_to_id(END_OF_DOCUMENT) not in ids
    assert BPE.decode(ids) == text


def test_the_end_token_follows_each_document_and_the_ids_give_the_text_back(corpus: Path) -> None:
    config = DataConfig(path=corpus, vocab_size=400)
    documents, tokens = load_documents(config), load_tokens(config)
    bpe = train_bpe(documents.train, 400)
    end = bpe.token_to_id(END_OF_DOCUMENT)
    for texts, ids in ((documents.train, tokens.train), (documents.held_out, tokens.held_out)):
        assert ids[-1] == end
        parts = np.split(ids, np.flatnonzero(ids == end)[:-1] + 1)
        assert [bpe.decode(part[:-1].tolist()) for part in parts] == texts


def test_ids_are_below_the_vocabulary_that_was_asked_for(corpus: Path) -> None:
    tokens = load_tokens(DataConfig(path=corpus, vocab_size=5000))
    assert tokens.vocab_size == 5000
    assert tokens.train.dtype == tokens.held_out.dtype == np.uint16
    assert max(tokens.train.max(), tokens.held_out.max()) < 5000


def test_a_vocabulary_beyond_65536_has_ids_of_four_bytes(corpus: Path) -> None:
    narrow = load_tokens(DataConfig(path=corpus, vocab_size=65536))
    wide = load_tokens(DataConfig(path=corpus, vocab_size=65537))
    assert (narrow.train.dtype, wide.train.dtype) == (np.uint16, np.uint32)
    assert narrow.digest == wide.digest


def test_the_tokenizer_learns_from_the_corpus(corpus: Path) -> None:
    size = sum(map(len, load_documents(DataConfig(path=corpus)).train))
    assert len(load_tokens(DataConfig(path=corpus, vocab_size=400)).train) < size / 3


def test_the_tokenizer_is_trained_on_the_training_part_only(corpus: Path) -> None:
    before = load_tokens(DataConfig(path=corpus, vocab_size=300))
    (corpus / "06.txt").write_text("zqzqzq " * 5000)
    after = load_tokens(DataConfig(path=corpus, vocab_size=300))
    assert (before.train == after.train).all()
    assert before.digest != after.digest


def test_two_processes_train_the_same_tokenizer(corpus: Path) -> None:
    code = (
        "import sys; from sentinel_bench.config import DataConfig;"
        "from sentinel_bench.data.tokens import load_tokens;"
        "print(load_tokens(DataConfig(path=sys.argv[1], vocab_size=400)).digest)"
    )
    command = [sys.executable, "-c", code, str(corpus)]
    here = load_tokens(DataConfig(path=corpus, vocab_size=400)).digest
    other = {
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={
                **os.environ,
                "SENTINEL_BENCH_CACHE": str(corpus.parent / threads),
                "RAYON_NUM_THREADS": threads,
            },
        ).stdout.strip()
        for threads in ("1", "2")
    }
    assert other == {here}


def test_the_arrays_cannot_be_changed(corpus: Path) -> None:
    for _ in range(2):
        tokens = load_tokens(DataConfig(path=corpus, vocab_size=300))
        with pytest.raises(ValueError, match="read-only"):
            tokens.train[0] = 1


def test_long_work_is_announced(corpus: Path) -> None:
    said: list[str] = []
    load_tokens(DataConfig(path=corpus, vocab_size=300), said.append)
    assert said[0].startswith("training a tokenizer on ")


def test_a_given_tokenizer_file_or_its_folder_is_used(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "tokenizer.json"
    file.parent.mkdir()
    BPE.save(str(file))
    documents = load_documents(DataConfig(path=corpus))
    for name in (file, file.parent):
        tokens = load_tokens(DataConfig(path=corpus, tokenizer=str(name)))
        assert tokens.vocab_size == BPE.get_vocab_size()
        expected = BPE.encode(documents.train[0]).ids
        assert tokens.train[: len(expected)].tolist() == expected
        assert tokens.train[len(expected)] == BPE.token_to_id(END_OF_DOCUMENT)


def test_a_given_tokenizer_file_neither_cuts_nor_pads_the_corpus(
    corpus: Path, tmp_path: Path
) -> None:
    plain, limited = tmp_path / "plain.json", tmp_path / "limited.json"
    BPE.save(str(plain))
    tokenizer = Tokenizer.from_file(str(plain))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=4000)
    tokenizer.save(str(limited))
    plain_digest, limited_digest = (
        load_tokens(DataConfig(path=corpus, tokenizer=str(file))).digest
        for file in (plain, limited)
    )
    assert plain_digest == limited_digest


def test_changing_a_tokenizer_file_is_noticed(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    digests = set()
    for size in (260, 290):
        train_bpe(["the quick brown fox Document says things " * 50], size).save(str(file))
        digests.add(load_tokens(DataConfig(path=corpus, tokenizer=str(file))).digest)
    assert len(digests) == 2


def test_a_bad_or_missing_tokenizer_file_is_named(corpus: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json is not a tokenizer\.json"):
        load_tokens(DataConfig(path=corpus, tokenizer=str(bad)))
    with pytest.raises(ConfigError, match=r"none\.json does not exist"):
        load_tokens(DataConfig(path=corpus, tokenizer=str(tmp_path / "none.json")))


def test_a_tokenizer_from_the_hub_gives_its_own_ends_and_size(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def load(name: str, **_: Any) -> Any:
        assert name == "some/tokenizer"
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=BPE, eos_token=END_OF_DOCUMENT, model_max_length=8
        )

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    tokens = load_tokens(DataConfig(path=corpus, tokenizer="some/tokenizer"))
    assert tokens.vocab_size == BPE.get_vocab_size()
    end = BPE.token_to_id(END_OF_DOCUMENT)
    assert (tokens.train == end).sum() == 22


def test_off_line_a_tokenizer_by_name_is_refused_in_one_line_that_names_bpe(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentinel_bench.data import _hub

    def unreachable() -> None:
        raise _hub.UnreachableError("no network")

    monkeypatch.setattr(_hub, "check_reachable", unreachable)
    with pytest.raises(ConfigError, match=r"no network.*use bpe") as raised:
        load_tokens(DataConfig(path=corpus, tokenizer="no-such-owner/no-such-tokenizer"))
    assert "\n" not in str(raised.value)
