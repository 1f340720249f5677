"""Models of other families, which transformers runs."""
