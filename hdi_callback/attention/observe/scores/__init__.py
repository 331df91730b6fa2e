"""Attention rows from a product of two activations: scores, operations on them, masks."""
