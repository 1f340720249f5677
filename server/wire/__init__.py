"""Values as they travel: JSON in and out, encodings of vectors, headers."""
