"""Request and response values: JSON bodies, encodings of vectors, headers."""
