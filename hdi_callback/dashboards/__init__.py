"""Readings made visible."""
