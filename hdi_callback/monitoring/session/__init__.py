"""One watched run: its settings, its trainer, its readings and their results."""
