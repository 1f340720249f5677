"""The weights in a model's folder: files of named tensors, and checked views of them, without torch."""
