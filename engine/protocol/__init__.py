"""What the two sides of the engine say to each other: parameters, model, messages, results, errors. Without torch."""
