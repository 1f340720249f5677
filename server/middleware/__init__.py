"""The layers that every request passes before its route; app.py lists them in order."""
