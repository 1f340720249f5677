"""Reads the files of a model's folder into a ModelInfo. Plain Python without torch."""
