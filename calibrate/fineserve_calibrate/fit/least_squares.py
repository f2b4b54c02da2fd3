"""One least-squares fit of step times, with what it can and cannot tell.

A fit minimises the sum of squared relative errors, since the noise of a timing grows with the timing. J is the Jacobian at the
minimum (rows x parameters), s^2 = RSS / (n - p) the residual variance. The covariance of the parameters is s^2 (J'J)^-1. An
interval is the value plus or minus the standard error times Student's t with n - p degrees of freedom. That is exact for linear
curves with independent Gaussian noise, and an approximation at the kinks of a ``max``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.stats import t as student_t

Floats = NDArray[np.float64]

ROWS_PER_PARAMETER = 3
CONFIDENCE = 0.95
RANK_TOLERANCE = 1e-5
"""Ratio of singular values below which parameters are the same direction; finite differences leave about 1e-7."""
TIE = 1e-6
"""Relative difference in the sum of squares, and the relative error, that count as none."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A parameter to fit. Each of ``starts``, non-zero magnitudes to start from, is tried."""

    name: str
    unit: str
    starts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A fitted value with its 95 % confidence interval."""

    name: str
    unit: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors, fitted / measured - 1: median and 90th percentile of their size, and their median (bias)."""

    n: int
    median_abs: float
    p90_abs: float
    bias: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit, or the reason in one line why there is none.

    A ``refused`` fit has no parameters, residuals or fitted values. ``rows`` numbers the rows used; 0 is the first row of data
    in the file. ``measured_s`` and ``fitted_s`` have one value a row. ``held_out`` holds the errors on unseen rows.
    """

    what: str
    rows: tuple[int, ...]
    measured_s: tuple[float, ...]
    parameters: tuple[Parameter, ...] = ()
    residuals: Residuals | None = None
    fitted_s: tuple[float, ...] = ()
    held_out: Residuals | None = None
    refused: str | None = None

    def __getitem__(self, name: str) -> Parameter:
        """Get a parameter by name. Raises ValueError when the fit was refused, KeyError for an unknown name."""
        if self.refused:
            raise ValueError(f"{self.what}: {self.refused}")
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise KeyError(name)

    @property
    def values(self) -> Floats:
        """The parameters in order, shape (p,)."""
        return np.array([parameter.value for parameter in self.parameters])

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def relative_errors(predicted_s: Floats, measured_s: Floats) -> Residuals:
    """Summarise predicted / measured - 1; both of shape (n,), n > 0."""
    errors = predicted_s / measured_s - 1
    size = np.abs(errors)
    return Residuals(len(errors), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(errors)))


def with_held_out(fit: Fit, predicted_s: ArrayLike, measured_s: ArrayLike) -> Fit:
    """Add the errors on unseen rows to a fit. A refused fit, or one without such rows, stays as it is."""
    measured = np.asarray(measured_s, dtype=np.float64)
    if fit.refused or not len(measured):
        return fit
    return replace(fit, held_out=relative_errors(np.asarray(predicted_s, dtype=np.float64), measured))


def fit_curve(
    what: str,
    curve: Callable[[Floats], Floats],
    unknowns: Sequence[Unknown],
    measured_s: Floats,
    rows: Sequence[int],
) -> Fit:
    """Fit ``curve`` (parameters of shape (p,) to seconds of shape (n,)) to positive ``measured_s``, shape (n,).

    The fit is refused with fewer than three rows a parameter, or where the rows do not tell the parameters apart.
    """
    refusal = Fit(what, tuple(map(int, rows)), tuple(measured_s.tolist()))
    needed = ROWS_PER_PARAMETER * len(unknowns)
    if len(measured_s) < needed:
        text = f"{len(measured_s)} rows for {len(unknowns)} parameters; at least {needed} are needed"
        return replace(refusal, refused=text)
    minima = _minima(curve, unknowns, measured_s)
    confused = next((found for _, jacobian in minima if len(found := _confused(jacobian))), None)
    if confused is not None:
        names = " and ".join(unknowns[i].name for i in confused)
        fault = f"no row depends on {names}" if len(confused) == 1 else f"the rows tell {names} only together"
        text = f"{fault} (rank-deficient Jacobian); add rows where the step changes with each parameter"
        return replace(refusal, refused=text)
    values, jacobian = minima[0]
    fitted_s = curve(values)
    half = _half_widths(jacobian, fitted_s / measured_s - 1)
    parameters = tuple(
        Parameter(u.name, u.unit, float(v), float(v - h), float(v + h))
        for u, v, h in zip(unknowns, values, half, strict=True)
    )
    return replace(
        refusal,
        parameters=parameters,
        residuals=relative_errors(fitted_s, measured_s),
        fitted_s=tuple(fitted_s.tolist()),
    )


def _minima(
    curve: Callable[[Floats], Floats], unknowns: Sequence[Unknown], measured_s: Floats
) -> list[tuple[Floats, Floats]]:
    """The best minimum of all starts first, then those as good: parameters, and the Jacobian of the relative errors (n, p).

    As good as the best although nothing depends on a parameter: the best has only come to rest at the edge of a flat.
    """
    scale = np.array([abs(unknown.starts[0]) for unknown in unknowns])
    grids = np.meshgrid(*(unknown.starts for unknown in unknowns), indexing="ij")
    starts = np.stack([grid.ravel() for grid in grids], axis=1) / scale
    solutions = [
        least_squares(
            lambda u: curve(u * scale) / measured_s - 1, start, jac="3-point", xtol=1e-12, ftol=1e-12, gtol=1e-12
        )
        for start in starts
    ]
    solutions.sort(key=lambda solution: float(solution.cost))
    tied = solutions[0].cost * (1 + TIE) + TIE**2
    return [(solution.x * scale, solution.jac / scale) for solution in solutions if solution.cost <= tied]


def _confused(jacobian: Floats) -> NDArray[np.intp]:
    """Indices of parameters that no row depends on, or that change the curve in the same direction."""
    norms = np.linalg.norm(jacobian, axis=0)
    idle = np.flatnonzero(norms == 0)
    if len(idle):
        return idle
    _, singular, directions = np.linalg.svd(jacobian / norms, full_matrices=False)
    if singular[-1] > RANK_TOLERANCE * singular[0]:
        return np.array([], dtype=np.intp)
    return np.flatnonzero(np.abs(directions[-1]) > 0.1)


def _half_widths(jacobian: Floats, errors: Floats) -> Floats:
    """Half widths of the confidence intervals, shape (p,)."""
    n, p = jacobian.shape
    norms = np.linalg.norm(jacobian, axis=0)  # parameters differ by ten orders of magnitude
    unit = jacobian / norms
    variance = float(errors @ errors) / (n - p) * np.diag(np.linalg.inv(unit.T @ unit))
    half: Floats = student_t.ppf((1 + CONFIDENCE) / 2, n - p) * np.sqrt(variance) / norms
    return half
