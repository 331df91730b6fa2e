"""Which monitor detects which fault of a training, how early, and with how many false alarms: see docs/evidence.md."""
