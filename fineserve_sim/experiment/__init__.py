"""Experiments: a strict YAML file in, a results folder out."""

from fineserve_sim.experiment.compare import experiment_for_trace
from fineserve_sim.experiment.errors import ConfigError, Interrupted, ScenarioError
from fineserve_sim.experiment.plan import Experiment, Point
from fineserve_sim.experiment.runner import load_experiment, run_experiment, run_loaded

__all__ = [
    "ConfigError",
    "Experiment",
    "Interrupted",
    "Point",
    "ScenarioError",
    "experiment_for_trace",
    "load_experiment",
    "run_experiment",
    "run_loaded",
]
