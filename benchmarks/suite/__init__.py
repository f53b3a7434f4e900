"""The benchmarks of `python -m benchmarks`."""
