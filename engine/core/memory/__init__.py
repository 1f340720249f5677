"""Memory of the device: how much there is, and who has it."""
