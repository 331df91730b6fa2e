"""A forward that was written down in, its layers out: once a run."""
