"""Head outputs, their gradients and inputs of layers, taken in the forwards of armed steps."""
