"""Rules of the transforms: what each draws, and which DALI operators it emits."""
