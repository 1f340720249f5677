"""The cores of one engine, one or several: where each runs, what each has been sent, and their life together."""
