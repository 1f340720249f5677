"""Middleware that every request passes before its route. app.py lists it in order."""
