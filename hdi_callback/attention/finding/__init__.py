"""Finding the attention layers of a model: before training, and with the inputs of a real forward."""
