"""Attention, and the places of tokens that it turns by."""
