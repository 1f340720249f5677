"""The asyncio side of an engine: admits requests, sends them to the engine process, receives results, restarts it."""
