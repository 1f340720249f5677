"""Types and messages shared by the engine process and engine clients: requests, results, parameters, errors."""
