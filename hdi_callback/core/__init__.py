"""The mathematics of head diversity: tensors in, tensors out."""
