"""Loads weights, heads and tokenizer before the engine loop begins."""
