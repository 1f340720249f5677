"""Tokenization: texts to token ids, truncation, windows, prompts and chats. Does not import torch."""
