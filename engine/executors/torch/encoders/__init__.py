"""Models that attend both ways: BERT and its relatives."""
