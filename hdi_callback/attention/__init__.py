"""A model in, its heads out."""

from hdi_callback.attention.find import find_attention, survey
from hdi_callback.attention.layer import AttentionLayer, HeadWeight, Product, Refusal, Rows, Site, Survey
from hdi_callback.attention.registry import register_layout

__all__ = [
    "AttentionLayer", "HeadWeight", "Product", "Refusal", "Rows", "Site", "Survey", "find_attention", "register_layout",
    "survey",
]  # fmt: skip
