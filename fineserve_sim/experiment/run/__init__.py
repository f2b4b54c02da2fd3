"""From an experiment to finished simulations."""
