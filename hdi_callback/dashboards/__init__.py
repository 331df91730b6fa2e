"""Outputs of results: console, TensorBoard, W&B, figures, reports."""
