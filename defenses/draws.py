"""Random draws that depend on what they decide, and on nothing that was drawn before.

The order in which boundaries are visited follows from the schedule and from which process holds
which stage. From one stream of random numbers each order would draw something else; so every draw
has a key of its own here.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from sentinel_bench.api import Signals, Updates

Key = str | int


class Draws:
    """Random numbers of one verifier: the same seeds and key give the same, in any order.

    Different keys are as good as independent, and nobody foresees them who lacks a seed. Two
    verifiers with equal seeds draw the same.

    Args:
        seeds: what sets this verifier apart: its name, its own seed, that of the run.
    """

    def __init__(self, *seeds: Key) -> None:
        self._secret = blake2b(repr(seeds).encode(), digest_size=32).digest()

    def seed(self, *key: Key) -> int:
        """Return 63 random bits, to seed a generator with."""
        digest = blake2b(repr(key).encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def uniform(self, *key: Key) -> float:
        """Return a number from U[0, 1). Takes a microsecond, a fifth of seeding a `Random`."""
        return (self.seed(*key) >> 10) * 2.0**-53

    def random(self, *key: Key) -> Random:
        """Return a generator, for a decision that takes several numbers in a fixed order."""
        return Random(self.seed(*key))

    def state_bytes(self) -> int:
        """Return the bytes that are kept."""
        return len(self._secret)


def place(of: Signals | Updates) -> tuple[Key, ...]:
    """Return what a decision about `of` may depend on, beside the seeds."""
    if isinstance(of, Signals):
        return of.step, of.stage, of.direction, of.microbatch
    return of.step, of.stage, of.kind
