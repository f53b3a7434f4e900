"""A rule for each transform: what it draws and what it emits in DALI."""
