"""What penstock is measured beside: other servers and libraries, each in an environment of its own."""
