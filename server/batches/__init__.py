"""Files that clients upload, and batches of requests that run through the routes while nobody else wants the engine."""
