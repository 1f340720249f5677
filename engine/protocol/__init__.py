"""What the frontend and the core have in common: parameters, model, requests, results, errors. Without torch."""
