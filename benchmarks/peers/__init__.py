"""Other servers and libraries to compare with penstock, each in its own environment."""
