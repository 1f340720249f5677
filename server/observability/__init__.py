"""Metrics, access log and traces of requests."""
