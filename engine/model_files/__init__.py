"""What a model's folder says about it. Plain Python without torch."""
