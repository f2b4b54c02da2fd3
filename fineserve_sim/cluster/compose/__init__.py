"""From a scenario to a cluster that stands ready: profile, place, divide memory, build engines and schedulers."""
