"""Command ``torchdali bench``, and the measurements that it shares with ``benchmarks/``. Not a part of the API."""
