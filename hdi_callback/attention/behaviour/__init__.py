"""Heads as modules behave, whatever they are called: tried, found and checked on copies."""
