"""Local scheduling: which waiting request starts next."""
