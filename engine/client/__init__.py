"""The asyncio part of the engine: lets requests in, sends them to the core, hears what it answers, keeps it alive."""
