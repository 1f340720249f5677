"""What every request passes on its way to a route; app.py lists it in order."""
