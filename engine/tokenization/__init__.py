"""Texts in, token ids out: the tokenizer, what is cut, and what is put around a text. Without torch."""
