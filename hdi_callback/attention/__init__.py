"""A model in, its heads out."""

from hdi_callback.attention.discovery.find import find_attention, survey
from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Survey

__all__ = ["AttentionLayer", "HeadWeight", "Survey", "find_attention", "survey"]
