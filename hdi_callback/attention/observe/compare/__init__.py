"""Inputs of attention in a real forward, compared with the outputs of linear maps."""
