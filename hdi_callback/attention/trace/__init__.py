"""Establish heads by the autograd graph of one forward of a copy."""
