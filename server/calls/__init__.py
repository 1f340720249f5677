"""Steps that all routes share: from the validated body to the response."""
