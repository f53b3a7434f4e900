"""Datasets that worker processes are asked for samples."""
