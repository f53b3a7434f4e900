"""Folder that ``torchdali explain SCRIPT`` puts on PYTHONPATH of the script, and of all processes that it starts."""
