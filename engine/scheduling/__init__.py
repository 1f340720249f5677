"""Which sequences run next, and in which chunks. Plain Python without torch."""
