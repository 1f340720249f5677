"""Uploaded files, and batches of requests that run through the routes while the engine is idle."""
