"""Search for a plan with the simulator in the loop: which model in which precision and degree on which GPUs."""
