"""One sample: its tree of values, its images, and what happens when it is bad."""
