"""Token ids of a corpus, from a tokenizer that is trained here or given, kept in a cache.

The cache's key is the digest of the text and of everything that turns it into ids. A corpus from
the hub is the exception: its key is where it is read from (path, configuration, split, revision as
asked for, number of documents) and not its text, so that it works off-line the second time. If such
a corpus changes under the same revision, the cached ids stay as they were; `Tokens.digest` always
tells which ids a run has used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sentinel_bench.config import DataConfig
from sentinel_bench.data import _cache, _hub
from sentinel_bench.data.corpora import Documents, find_corpus, load_documents
from sentinel_bench.errors import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"
# Raise it when the same settings give other ids: another split, another trainer.
FORMAT = 1
# Ends of documents in a given tokenizer.json, which does not say which of its tokens it is.
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
# Bounds memory: an encoding takes some 50 times the space of its ids.
_CHUNK_CHARACTERS = 4_000_000

Ids = NDArray[np.unsignedinteger[Any]]
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A corpus as token ids; the arrays are read-only.

    Attributes:
        train: Ids to train on, `[train tokens]`, uint16 or uint32.
        held_out: Ids that are only evaluated on, `[held-out tokens]`, same type.
        vocab_size: Number of ids the model must know; all ids are below it.
        digest: SHA-256, in hexadecimal, over the ids of both parts.
    """

    train: Ids
    held_out: Ids
    vocab_size: int
    digest: str


@dataclass(frozen=True)
class _Encoder:
    encode: Callable[[list[str]], list[list[int]]]
    end: int | None
    vocab_size: int


def load_tokens(config: DataConfig, say: Say = lambda _: None) -> Tokens:
    """Tokenize the corpus, or take its ids from the cache.

    `say` is called with a line before work that takes seconds, and if the cache cannot be used.
    The cache lies in `SENTINEL_BENCH_CACHE`, or else in the user's cache folder.

    Raises:
        ConfigError: the corpus or the tokenizer cannot be read.
    """
    info = find_corpus(config)
    tokenizer = _tokenizer_key(config)
    documents: Documents | None = None
    corpus: dict[str, Any]
    if info is not None and info.hub_path:
        corpus = {
            "hub": info.hub_path,
            "config": info.hub_config,
            "split": info.split,
            "column": info.text_column,
            "lines": info.lines,
            "revision": config.revision or info.revision,
            "documents": config.documents,
        }
    else:
        documents = load_documents(config)
        corpus = {"digest": documents.digest}
    key = {"format": FORMAT, "corpus": corpus, "tokenizer": tokenizer}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()

    if (arrays := _cache.read(name, say)) and (tokens := _from_arrays(arrays)):
        return tokens
    if arrays:
        say(f"cache entry {name[:12]} does not fit its digest; it is built again")
    # Before the corpus is streamed: a tokenizer that is not there should be told at once.
    given = None if config.tokenizer == "bpe" else _given_encoder(config.tokenizer, say)
    if documents is None:
        say(f"reading {config.documents:,} documents of {config.name} from the hub ...")
        documents = load_documents(config)
    encoder = given or _bpe_encoder(documents.train, config.vocab_size, say)
    tokens = _tokenize(documents, encoder, say)
    _cache.write(name, _to_arrays(tokens), say)
    return tokens


def train_bpe(texts: Sequence[str], vocab_size: int) -> Any:
    """Train a byte-level BPE: any text can be encoded, and decoded to the same text.

    Args:
        texts: What the merges are counted on.
        vocab_size: Bytes, merges and `<|endoftext|>` together; a tiny text gives fewer merges.

    Returns:
        A `tokenizers.Tokenizer`. The same texts give the same one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The characters "<|endoftext|>" within a document are text, not its end.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _tokenizer_key(config: DataConfig) -> dict[str, Any]:
    """Return what identifies the tokenizer; for one from the hub, its name."""
    key: dict[str, Any] = {"tokenizers": importlib.metadata.version("tokenizers")}
    if config.tokenizer == "bpe":
        return key | {"kind": "bpe", "vocab_size": config.vocab_size}
    file = _tokenizer_file(config.tokenizer)
    if file is None:
        version = importlib.metadata.version("transformers")
        return key | {"kind": "hub", "name": config.tokenizer, "transformers": version}
    try:
        return key | {"kind": "file", "digest": hashlib.sha256(file.read_bytes()).hexdigest()}
    except OSError as error:
        raise ConfigError(f"tokenizer {file} cannot be read ({error.strerror})") from error


def _tokenizer_file(name: str) -> Path | None:
    """Return the file that `name` means, or None if it can only be a name on the hub.

    Raises:
        ConfigError: it looks like a path, and nothing is there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return path
    if path.suffix == ".json" or path.is_absolute() or name.startswith("."):
        raise ConfigError(f"tokenizer file {path} does not exist; give one, a hub name or bpe")
    return None


def _bpe_encoder(texts: Sequence[str], vocab_size: int, say: Say) -> _Encoder:
    say(f"training a tokenizer on {sum(map(len, texts)):,} characters ...")
    bpe = train_bpe(texts, vocab_size)
    return _of_tokenizer(bpe, bpe.token_to_id(END_OF_DOCUMENT), vocab_size)


def _given_encoder(name: str, say: Say) -> _Encoder:
    file = _tokenizer_file(name)
    return _from_file(file) if file else _from_hub(name, say)


def _of_tokenizer(tokenizer: Any, end: int | None, vocab_size: int) -> _Encoder:
    def encode(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return _Encoder(encode, end, vocab_size)


def _from_file(file: Path) -> _Encoder:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises plain Exception for a file it does not understand.
    except Exception as error:
        raise ConfigError(f"{file} is not a tokenizer.json ({_hub.reason(error)})") from error
    # A given file may ask for cut or padded texts; a corpus is neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    end = next((vocabulary[token] for token in _KNOWN_ENDS if token in vocabulary), None)
    return _of_tokenizer(tokenizer, end, max(vocabulary.values(), default=-1) + 1)


def _from_hub(name: str, say: Say) -> _Encoder:
    """Load a tokenizer by name, from the library's own cache if it is there."""
    say(f"loading tokenizer {name} ...")
    import huggingface_hub.utils
    import transformers

    try:
        with _hub.quiet(huggingface_hub.utils):
            load = transformers.AutoTokenizer.from_pretrained
            try:
                tokenizer = load(name, local_files_only=True)
            except Exception:
                _hub.check_reachable()
                tokenizer = load(name)
    # See `corpora`: the classes are many and unrelated.
    except Exception as error:
        raise ConfigError(
            f"tokenizer {name!r} could not be read from the hub ({_hub.reason(error)}); it needs "
            "internet: use bpe (the default, trained here, works off-line) or a tokenizer.json"
        ) from error

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        return ids

    size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    return _Encoder(encode, tokenizer.eos_token_id, size)


def _tokenize(documents: Documents, encoder: _Encoder, say: Say) -> Tokens:
    count = len(documents.train) + len(documents.held_out)
    say(f"tokenizing {count:,} documents ...")
    train = _encode(documents.train, encoder)
    held_out = _encode(documents.held_out, encoder)
    return _tokens(train, held_out, encoder.vocab_size)


def _encode(texts: Sequence[str], encoder: _Encoder) -> Ids:
    """Encode documents and join them; the end-of-document token follows each.

    Returns:
        `[tokens]`, uint16 if all ids of the vocabulary fit.
    """
    dtype: type[np.unsignedinteger[Any]] = np.uint16 if encoder.vocab_size <= 2**16 else np.uint32
    end = [] if encoder.end is None else [encoder.end]
    parts: list[Ids] = [np.empty(0, dtype)]
    chunk: list[str] = []
    size = 0
    for i, text in enumerate(texts):
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_CHARACTERS or i == len(texts) - 1:
            parts += [np.array(ids + end, dtype) for ids in encoder.encode(chunk)]
            chunk, size = [], 0
    return np.concatenate(parts)


def _tokens(train: Ids, held_out: Ids, vocab_size: int) -> Tokens:
    digest = hashlib.sha256()
    for ids in (train, held_out):
        digest.update(f"{len(ids)}\n".encode())
        digest.update(np.ascontiguousarray(ids, "<u4").data)
        # Each component of a run sees these arrays; none may change them.
        ids.flags.writeable = False
    return Tokens(train, held_out, vocab_size, digest.hexdigest())


def _to_arrays(tokens: Tokens) -> _cache.Arrays:
    return {
        "train": tokens.train,
        "held_out": tokens.held_out,
        "vocab_size": np.array(tokens.vocab_size),
        "digest": np.array(tokens.digest),
    }


def _from_arrays(arrays: _cache.Arrays) -> Tokens | None:
    """Return the tokens of a cache entry, or None if they do not fit the digest beside them."""
    try:
        tokens = _tokens(arrays["train"], arrays["held_out"], int(arrays["vocab_size"]))
        return tokens if tokens.digest == str(arrays["digest"]) else None
    except (KeyError, TypeError, ValueError):
        return None
