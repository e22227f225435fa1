"""The built-in defenses, one family per file: what a verifier makes of the signals.

To add one: write the class, add its line here, and the contract tests run over it.
"""

DEFENSES = {
    "none": "sentinel_bench.defenses.none:NoDefense",
    "averaging": "sentinel_bench.defenses.sentinel:Averaging",
    "sentinel": "sentinel_bench.defenses.sentinel:Sentinel",
    "coherence": "sentinel_bench.defenses.coherence:Coherence",
    "surrogate": "sentinel_bench.defenses.surrogate:Surrogate",
    "cross-replica": "sentinel_bench.defenses.replicas:CrossReplica",
    "dispersion": "sentinel_bench.defenses.dispersion:Dispersion",
    "layered": "sentinel_bench.defenses.layered:Layered",
    "cascade": "sentinel_bench.defenses.cascade:Cascade",
    "duplicate-work": "sentinel_bench.defenses.recompute:DuplicateWork",
    "audit": "sentinel_bench.defenses.recompute:Audit",
    "freivalds": "sentinel_bench.defenses.freivalds:Freivalds",
    "commitment": "sentinel_bench.defenses.commitment:Commitment",
    "redundant-block": "sentinel_bench.defenses.redundant:RedundantBlock",
    "skip-layer": "sentinel_bench.defenses.redundant:SkipLayer",
}
