"""``torchdali bench``, and what it shares with the repository's benchmarks.

Its modules are for the command and for ``benchmarks/``, and not a part of the API.
"""
