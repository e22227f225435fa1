"""Which tokens a worker sees at a step: a function of the seed, the step and the replica alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sentinel_bench.config import Scenario
from sentinel_bench.data.tokens import Ids, Tokens
from sentinel_bench.errors import ConfigError

Pair = tuple[NDArray[np.int64], NDArray[np.int64]]


class Batches:
    """Training batches at random places, and held-out batches at fixed ones."""

    def __init__(
        self, tokens: Tokens, *, batch_size: int, seq_len: int, replicas: int, seed: int
    ) -> None:
        """Check that both parts hold at least one sequence.

        Args:
            tokens: The corpus.
            batch_size: Sequences per replica and step.
            seq_len: Tokens per sequence.
            replicas: Replicas of a stage.
            seed: Of the places of training batches.

        Raises:
            ConfigError: a part is shorter than `seq_len + 1` tokens.
        """
        for part, ids in (("training", tokens.train), ("held-out", tokens.held_out)):
            if len(ids) < seq_len + 1:
                raise ConfigError(
                    f"the {part} part of the corpus has {len(ids):,} tokens, but seq_len {seq_len} "
                    f"needs at least {seq_len + 1:,}: give more text or lower train.seq_len"
                )
        self.tokens = tokens
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.replicas = replicas
        self.seed = seed

    @classmethod
    def of(cls, tokens: Tokens, scenario: Scenario) -> Batches:
        """Return the batches of a scenario.

        Raises:
            ConfigError: a part of the corpus is shorter than one sequence.
        """
        return cls(
            tokens,
            batch_size=scenario.train.batch_size,
            seq_len=scenario.train.seq_len,
            replicas=scenario.grid.replicas,
            seed=scenario.seeds.data,
        )

    def train(self, step: int) -> Pair:
        """Return inputs and targets of a step; targets are one token ahead.

        Replica `r` has the rows from `r * batch_size` on. Its places depend on (seed, step, r),
        not on the number of replicas nor on the steps asked for before.

        Returns:
            Twice `[replicas * batch_size, seq_len]`, int64.
        """
        places = len(self.tokens.train) - self.seq_len
        starts = [
            np.random.default_rng([self.seed, step, replica]).integers(places, size=self.batch_size)
            for replica in range(self.replicas)
        ]
        return self._cut(self.tokens.train, np.concatenate(starts))

    def held_out(self, sequences: int) -> list[Pair]:
        """Return `sequences` held-out sequences, or as many as there are, whatever the seed.

        They do not overlap and are spread evenly from the first to the last held-out token.

        Returns:
            Chunks of at most `replicas * batch_size` sequences: inputs and targets, each
            `[sequences of the chunk, seq_len]`, int64.
        """
        ids, window = self.tokens.held_out, self.seq_len + 1
        count = min(sequences, len(ids) // window)
        # The distance is at least a window, because count windows fit into the ids.
        starts = np.arange(count) * (len(ids) - window) // max(1, count - 1)
        rows = self.replicas * self.batch_size
        return [self._cut(ids, starts[i : i + rows]) for i in range(0, count, rows)]

    def _cut(self, ids: Ids, starts: NDArray[np.int64]) -> Pair:
        """Take `seq_len + 1` ids from each start; return all but the last and all but the first."""
        windows = ids[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]
