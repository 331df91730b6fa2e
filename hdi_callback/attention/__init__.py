"""Attention layers: modules in, head weights and head outputs out."""
