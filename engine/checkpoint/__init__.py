"""Reads the weights in the folder of a model, without torch."""
