"""What is loaded before the loop begins: weights, heads for single tokens, and the tokenizer."""
