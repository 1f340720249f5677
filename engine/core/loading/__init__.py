"""What is loaded before the loop begins: weights, heads for single tokens, the tokenizer; and the first batch."""
