"""Monitoring of a model over time: steps, readings, alerts and interventions."""
