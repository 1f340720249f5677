"""What the frontend and the core say to each other: parameters, model, messages, results, errors. Without torch."""
