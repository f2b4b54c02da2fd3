"""Experiments: a strict YAML file in, a results folder out."""

from fineserve_sim.experiment.file.comparison import experiment_for_trace
from fineserve_sim.experiment.file.errors import ConfigError, Interrupted, ScenarioError
from fineserve_sim.experiment.file.load import experiment_from, load_experiment
from fineserve_sim.experiment.file.plan import Experiment, Point
from fineserve_sim.experiment.results.produce import run_experiment, run_loaded

__all__ = [
    "ConfigError",
    "Experiment",
    "Interrupted",
    "Point",
    "ScenarioError",
    "experiment_for_trace",
    "experiment_from",
    "load_experiment",
    "run_experiment",
    "run_loaded",
]
