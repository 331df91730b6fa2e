"""Attention as researchers write it by hand, what is true of it, and how much of that is read."""
