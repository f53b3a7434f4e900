"""A plan, compiled to a DALI pipeline, and the batches that run through it."""
