"""Monitoring over time: steps, readings and what follows from them."""
