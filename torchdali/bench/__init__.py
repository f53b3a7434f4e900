"""``torchdali bench``, and what it shares with the repository's benchmarks."""
