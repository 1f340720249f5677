"""Runs models of other families with transformers."""
