"""Builds a ready cluster from a scenario: profile, place, divide memory, build engines and schedulers."""
