"""The built-in aggregators, one family per file: what a stage takes for the mean of its gradients.

To add one: write the class, add its line here, and the contract tests run over it.
"""

AGGREGATORS = {
    "mean": "sentinel_bench.aggregators.mean:Mean",
    "median": "sentinel_bench.aggregators.coordinate:Median",
    "trimmed-mean": "sentinel_bench.aggregators.coordinate:TrimmedMean",
    "krum": "sentinel_bench.aggregators.krum:Krum",
    "multi-krum": "sentinel_bench.aggregators.krum:MultiKrum",
    "bulyan": "sentinel_bench.aggregators.bulyan:Bulyan",
    "geometric-median": "sentinel_bench.aggregators.geometric_median:GeometricMedian",
    "centered-clipping": "sentinel_bench.aggregators.centered_clipping:CenteredClipping",
}
