"""Vectors that have been computed before: kept in memory and on disk, found by all that decides them."""
