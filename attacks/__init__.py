"""The built-in attacks, one family per file: what a malicious worker sends.

To add one: write the class, add its line here, and the contract tests run over it.
"""

ATTACKS = {
    "none": "sentinel_bench.attacks.none:NoAttack",
    "zeros": "sentinel_bench.attacks.constant:Zeros",
    "ones": "sentinel_bench.attacks.constant:Ones",
    "random-value": "sentinel_bench.attacks.noise:RandomValue",
    "scaling": "sentinel_bench.attacks.sign:Scaling",
    "sign-flip": "sentinel_bench.attacks.sign:SignFlip",
    "random-sign": "sentinel_bench.attacks.sign:RandomSign",
    "delay": "sentinel_bench.attacks.replay:Delay",
    "bias": "sentinel_bench.attacks.noise:Bias",
    "invisible-noise": "sentinel_bench.attacks.noise:InvisibleNoise",
}
