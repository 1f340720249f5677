"""Sockets and bytes: connections, what is refused at the head of a request, and at what pace."""
