"""Connections: parsing, time limits, and refusals at the head of a request."""
