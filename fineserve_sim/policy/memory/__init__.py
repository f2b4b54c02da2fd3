"""KV memory: who gets which block of a GPU."""
