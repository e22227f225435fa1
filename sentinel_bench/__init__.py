"""sentinel-bench: attacks on and defenses of pipeline-parallel LLM training, measured."""

__version__ = "0.1.0"
