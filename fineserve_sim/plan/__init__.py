"""Search for a plan: which instance of which model, at which precision and degree, on which GPUs, with the simulator in the loop."""
