"""A model in, its heads out."""

from hdi_callback.attention.discovery.find import find_attention, survey
from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Refusal, Rows, Site, Survey, Term

__all__ = ["AttentionLayer", "HeadWeight", "Refusal", "Rows", "Site", "Survey", "Term", "find_attention", "survey"]
