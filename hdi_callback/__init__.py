"""Watch the diversity of attention heads while a transformer trains."""

__version__ = "0.1.0"
