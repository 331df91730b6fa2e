"""Attention layers: modules in, head weights and head outputs out."""

from hdi_callback.attention.capture.taps import Capture, Taps
from hdi_callback.attention.finding.conventions import is_named_attention
from hdi_callback.attention.finding.discovery import find_attention, survey
from hdi_callback.attention.finding.results import Refusal, Survey, message_of_part
from hdi_callback.attention.finding.runtime_finder import RuntimeFinder, layers_observed
from hdi_callback.attention.finding.runtime_verifier import RuntimeVerifier
from hdi_callback.attention.layer.heads import ROLES, AttentionLayer, HeadPieces, HeadProduct, HeadSlice, Role
from hdi_callback.attention.layer.registry import Place, register_layout

__all__ = [
    "ROLES",
    "AttentionLayer",
    "Capture",
    "HeadPieces",
    "HeadProduct",
    "HeadSlice",
    "Place",
    "Refusal",
    "Role",
    "RuntimeFinder",
    "RuntimeVerifier",
    "Survey",
    "Taps",
    "find_attention",
    "is_named_attention",
    "layers_observed",
    "message_of_part",
    "register_layout",
    "survey",
]
