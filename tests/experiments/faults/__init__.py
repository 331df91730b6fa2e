"""Which monitor tells which fault of a training, how early, and how often it tells of none: see docs/evidence.md."""
