"""Reads image files, decodes them within limits and preprocesses them for a model, in threads.

Only this package imports Pillow.
"""
