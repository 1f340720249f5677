"""Types and messages shared by the engine process and its clients: requests, results, parameters, errors."""
