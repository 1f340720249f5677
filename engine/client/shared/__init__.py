"""One engine that several processes ask: what they know of each other's requests, and how each reaches the core."""
