"""KV memory: the engine that gets each block of a GPU."""
