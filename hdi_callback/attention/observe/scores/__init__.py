"""From a product of two activations to attention rows: scores, what becomes of them, masks."""
