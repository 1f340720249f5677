"""Reads image files, decodes them within limits and preprocesses them for a model, in worker threads.

Only this package imports Pillow.
"""
