"""Folder on PYTHONPATH of the script in ``torchdali explain SCRIPT``, and of all processes that it starts."""
