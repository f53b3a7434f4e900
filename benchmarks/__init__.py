"""Benchmarks of torchdali beside the loaders that it replaces; each module says what it measures."""
