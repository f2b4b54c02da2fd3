"""Measured end-to-end results against the simulator's predictions.

    file --layout--> cases (who serves what on which GPU, under which load, and what was measured)
    case --predict--> TTFT and TPOT of the same rows --> median, p90 and bias of the relative errors --> table, JSON, figures

A file is recognised by its columns alone. Nothing of a row's measurement enters its prediction; what a set does not
record (number of requests, token budget) is an assumption that is printed, with how far the errors move without it.
"""

from fineserve_calibrate.validate.cases import Case, ClosedLoop, MeasuredSet, OpenLoop, Serving, StaticBatch
from fineserve_calibrate.validate.errors import ErrorRow, error_rows
from fineserve_calibrate.validate.layouts import KNOWN_FILES, LayoutError, read_set
from fineserve_calibrate.validate.predict import Predicted, StepFactory, campaign, predict_set, sensitivity

__all__ = [
    "KNOWN_FILES",
    "Case",
    "ClosedLoop",
    "ErrorRow",
    "LayoutError",
    "MeasuredSet",
    "OpenLoop",
    "Predicted",
    "Serving",
    "StaticBatch",
    "StepFactory",
    "campaign",
    "error_rows",
    "predict_set",
    "read_set",
    "sensitivity",
]
