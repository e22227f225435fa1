"""Corpora, tokens and batches: from a name or a path to what the pipeline is fed.

`corpora` gives documents with a held-out part, `tokens` turns them into ids (and caches those), and
`batches` draws from the ids. The last two need numpy, so they are imported from their modules:
listing the corpora stays cheap.
"""

from sentinel_bench.data.corpora import CORPORA, CorpusInfo, Documents, load_documents

__all__ = ["CORPORA", "CorpusInfo", "Documents", "load_documents"]
