"""The loaders that are measured."""
