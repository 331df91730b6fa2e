"""Layers in, samples of their outputs, inputs and attention rows out: at each armed step."""
