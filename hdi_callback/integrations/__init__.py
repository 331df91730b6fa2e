"""Shells around the trainers."""
