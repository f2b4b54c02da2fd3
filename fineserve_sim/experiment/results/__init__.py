"""From finished simulations to the results folder."""
