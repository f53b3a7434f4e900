"""Pictures, results and reports that all benchmarks share."""
