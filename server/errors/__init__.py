"""How errors become statuses and bodies: one table, and how they are worded."""
