r"""The head count and head width that minimise a model of the mean squared error under a fixed total width."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hdi_callback.errors import MisconfigurationError

_NEARLY_UNIFORM = 1.05  # n / ESS below which attention is too uniform to show how its variance grows
_PRECISION = 2  # of the model: best widths within this factor are one answer


@dataclass(frozen=True)
class HeadAllocation:
    """An allocation of a total width D to heads.

    Attributes:
        num_heads: H, a whole number with ``H * head_dim == D``.
        head_dim: d_k, the divisor of D with the smallest modelled error.
        continuous_head_dim: the minimiser over the real numbers, of the model's leading terms.
        error: the modelled mean squared error at the whole-number answer.
    """

    num_heads: int
    head_dim: int
    continuous_head_dim: float
    error: float


def allocate_heads(
    total_width: int,
    samples: int,
    *,
    bias_scale: float = 1.0,
    bias_decay: float = 0.1,
    variance_growth: float = 0.1,
    noise: float = 1.0,
    multiple_of: int = 1,
) -> HeadAllocation:
    r"""Find the head count and head width with the smallest modelled error under ``D = H d_k``.

    .. math::

        \mathrm{MSE}(d_k) = B e^{-g d_k}
        + \frac{\sigma^2}{n} \Bigl[ \frac{d_k}{D} e^{L d_k} + 1 - \frac{d_k}{D} \Bigr]

    whose continuous minimiser is :math:`d_k^* = y / (g + L) - 1/L` with
    :math:`y e^y = \frac{g+L}{L} e^{(g+L)/L} g B n D / \sigma^2` (Lambert W). The model is ours, after the abstract of
    Fokoué 2026. It is a diagnostic with factor-2 precision and no advice: the logarithmic law needs a kernel bandwidth
    that does not shrink with n and a variance that grows exponentially in d_k; with 1/sqrt(d_k) scaling and
    unit-variance queries and keys there is no such law, and where no head suffices alone the optimum is one head.

    Args:
        total_width: D, the sum of the heads' widths.
        samples: n, keys that a kernel average draws on.
        bias_scale: B, squared bias at width 0, in units of the target squared.
        bias_decay: g, decay of the squared bias per unit of head width; measure it.
        variance_growth: L, mean over heads of ``log(n / ESS) / d_k``; measure it.
        noise: sigma^2, noise variance, in units of the target squared.
        multiple_of: admit only head widths that are multiples of this (8 or 16 suit the hardware).

    Returns:
        The allocation.

    Raises:
        MisconfigurationError: if an argument is not positive, or no divisor of D is a multiple of `multiple_of`.

    Example:
        >>> answer = allocate_heads(768, 1_000_000)
        >>> answer.num_heads, answer.head_dim
        (12, 64)
    """
    _require_positive(
        total_width=total_width, samples=samples, bias_scale=bias_scale, bias_decay=bias_decay,
        variance_growth=variance_growth, noise=noise, multiple_of=multiple_of,
    )  # fmt: skip
    D, n, B, g, L = total_width, samples, bias_scale, bias_decay, variance_growth

    def error(width: float) -> float:
        # Beyond exp(700) the variance is out of the question, and out of the range of a double.
        return B * math.exp(-g * width) + noise / n * (width / D * math.exp(min(L * width, 700)) + 1 - width / D)

    widths = _divisors(D, multiple_of)
    best = min(widths, key=error)
    # As a sum, since the product of very small numbers would be zero.
    log_argument = math.log((g + L) / L) + (g + L) / L + sum(map(math.log, (g, B, n, D))) - math.log(noise)
    return HeadAllocation(D // best, best, _lambert_w_of_exp(log_argument) / (g + L) - 1 / L, error(best))


@dataclass(frozen=True)
class AllocationChoice:
    """One way to divide a total width into heads.

    Attributes:
        num_heads: H.
        head_dim: d_k.
        bias: modelled squared bias, in units of the target squared.
        variance: modelled variance, in the same units.
        excess: error / error of the best choice - 1: 0 for the best.
        worst_excess: largest excess under any assumption.
    """

    num_heads: int
    head_dim: int
    bias: float
    variance: float
    excess: float
    worst_excess: float

    @property
    def error(self) -> float:
        """The modelled mean squared error."""
        return self.bias + self.variance


@dataclass(frozen=True)
class AllocationRanking:
    """Choices of head count and head width, ranked by modelled error.

    Attributes:
        choices: every admitted choice, the smallest modelled error first; sorted by `head_dim` they are the curve.
        near_best: head widths whose error is within the tolerance of the best: how flat the optimum is.
        best_by_assumption: description of an assumption -> best head width under it.
        variance_growth: L, the growth of the log variance per unit of head width that the measurement implies.
        reason: why no choice can be ranked, or None.
    """

    choices: tuple[AllocationChoice, ...]
    near_best: tuple[int, ...]
    best_by_assumption: dict[str, int]
    variance_growth: float
    reason: str | None

    @property
    def is_conclusive(self) -> bool:
        """Whether the measurements single out an allocation."""
        return self.reason is None

    @property
    def best(self) -> AllocationChoice | None:
        """The choice with the smallest modelled error; None where no choice can be ranked."""
        return None if self.reason is not None else self.choices[0]

    @property
    def span(self) -> tuple[int, int]:
        """The smallest and the largest of the head widths that are best under some assumption."""
        return min(self.best_by_assumption.values()), max(self.best_by_assumption.values())

    @property
    def curve(self) -> tuple[AllocationChoice, ...]:
        """The choices by rising head width."""
        return tuple(sorted(self.choices, key=lambda choice: choice.head_dim))


def rank_allocations(
    total_width: int,
    samples: float,
    *,
    effective_samples: Sequence[float],
    head_dim: int,
    spectrum: Sequence[float] | None = None,
    input_rank: float | None = None,
    smoothness: float = 1.0,
    bias_scale: float = 1.0,
    noise: float = 1.0,
    noise_factor: float = 3.0,
    multiple_of: int = 1,
    tolerance: float = 0.1,
) -> AllocationRanking:
    r"""Rank the ways to divide a width into heads from what was measured in a layer, or say why it cannot be done.

    .. math::

        \mathrm{MSE}(k) = B \tau(k)^s + \frac{\sigma^2}{n} \Bigl[ \frac{k}{D} V(k) + 1 - \frac{k}{D} \Bigr],
        \qquad V(d_k) = \exp \operatorname{mean}_h \log \frac{n}{\mathrm{ESS}_h}

    :math:`\tau(k)` is the share of the input's variance beyond its k leading directions. A measurement at one width
    does not say how V changes with it, so that two assumptions are tried: it grows exponentially, as with a fixed
    bandwidth, and it stays as it is, as scores that are divided by the root of the width have it. The noise is not
    measured either, so that `noise` is tried divided and multiplied by `noise_factor` as well. An allocation is named
    only if the best widths under all of them lie within a factor of 2. The model is ours, after the abstract of
    Fokoué 2026; it orders choices, and predicts no loss.

    Args:
        total_width: D, the sum of the heads' widths.
        samples: n, keys that a query sees.
        effective_samples: effective sample size of each head, the mean of ``1 / ||a||^2`` over its rows of attention.
        head_dim: d_k, the head width at which they were measured.
        spectrum: eigenvalues of the covariance of the layer's input, in any order and scale.
        input_rank: instead of `spectrum`, its participation ratio, ``token_rank`` in the history; eigenvalues are then
            taken to fall exponentially.
        smoothness: s, how the squared bias follows the variance that is left out.
        bias_scale: B, squared bias at width 0, in units of the target squared.
        noise: sigma^2, noise variance, in the same units.
        noise_factor: by how much the noise may be larger or smaller.
        multiple_of: admit only head widths that are multiples of this.
        tolerance: relative error up to which two choices count as equally good.

    Returns:
        All choices ranked, and whether they allow an answer.

    Raises:
        MisconfigurationError: if an argument is out of its range, or not exactly one of `spectrum` and `input_rank` is
            given.

    Example:
        >>> measured = [0.5**i for i in range(64)]  # a spectrum that falls fast
        >>> answer = rank_allocations(64, 64, effective_samples=[9.0, 11.0], head_dim=8, spectrum=measured)
        >>> answer.choices[0].head_dim, answer.span, answer.is_conclusive
        (8, (8, 16), True)
        >>> rank_allocations(64, 64, effective_samples=[63.5], head_dim=8, spectrum=measured).reason[:30]
        'Attention is nearly uniform: h'
    """
    _require_positive(
        total_width=total_width, samples=samples, head_dim=head_dim, smoothness=smoothness, bias_scale=bias_scale,
        noise=noise, noise_factor=noise_factor, multiple_of=multiple_of, tolerance=tolerance,
    )  # fmt: skip
    left_out = _left_out(spectrum, input_rank)
    known = [value for value in effective_samples if math.isfinite(value)]
    if not known or not all(0 < value <= samples * (1 + 1e-6) for value in known):
        raise MisconfigurationError(
            f"`effective_samples` has one number for each head, above 0 and up to samples={samples}, got "
            f"{list(effective_samples)!r}: give the mean of 1 / ||a||^2 over its rows and the number of keys that its "
            "queries see."
        )
    D, n = total_width, samples
    widths = _divisors(D, multiple_of)
    log_inflation = sum(math.log(max(n / value, 1)) for value in known) / len(known)
    L = log_inflation / head_dim

    def parts(width: int, grows: bool, sigma2: float) -> tuple[float, float]:
        inflation = math.exp(min(L * width if grows else log_inflation, 700))
        return bias_scale * left_out(width) ** smoothness, sigma2 / n * (width / D * inflation + 1 - width / D)

    assumptions = {
        f"variance {'grows with' if grows else 'does not depend on'} the width, noise {sigma2:g}": (grows, sigma2)
        for grows in (True, False)
        for sigma2 in (noise, noise / noise_factor, noise * noise_factor)
    }
    errors = {name: {width: sum(parts(width, *which)) for width in widths} for name, which in assumptions.items()}
    excess = {name: {w: _over(e, min(by.values())) for w, e in by.items()} for name, by in errors.items()}
    central = next(iter(assumptions))
    choices = [
        AllocationChoice(
            D // width, width, *parts(width, *assumptions[central]), excess[central][width],
            max(by[width] for by in excess.values()),
        )
        for width in widths
    ]  # fmt: skip
    choices.sort(key=lambda choice: (choice.error, choice.head_dim))
    near_best = tuple(width for width in widths if excess[central][width] <= tolerance)
    best = {name: min(widths, key=by.__getitem__) for name, by in errors.items()}
    reason = _why_not(known, n, widths, best, near_best, tolerance)
    return AllocationRanking(tuple(choices), near_best, best, L, reason)


def _why_not(
    known: list[float], n: float, widths: list[int], best: dict[str, int], near_best: tuple[int, ...], tolerance: float
) -> str | None:
    """Why the measured constants single out no allocation; None if they do."""
    mean = sum(known) / len(known)
    if n / mean < _NEARLY_UNIFORM:
        return (
            f"Attention is nearly uniform: heads average over {mean / n:.0%} of their keys, too evenly to show "
            "how their variance changes with their width. Measure after some training."
        )
    low, high = min(best.values()), max(best.values())
    if high > _PRECISION * low:
        return (
            f"The best head width ranges from {low} to {high}, depending on the noise and on how the variance "
            "changes with the width, which a measurement at one width cannot determine."
        )
    if len(near_best) == len(widths) > 1:
        return (
            f"Every head width from {widths[0]} to {widths[-1]} is within {tolerance:.0%} of the best: it does not "
            "matter here."
        )
    if low == widths[-1]:
        return (
            f"The error falls up to the largest head width, {widths[-1]}: no narrower head suffices alone, and the "
            "model of equal heads that are averaged does not fit."
        )
    return None


def _left_out(spectrum: Sequence[float] | None, input_rank: float | None) -> Callable[[int], float]:
    """tau(k): the share of variance beyond the k leading directions, as a function of k."""
    if (spectrum is None) == (input_rank is None):
        raise MisconfigurationError("Give either `spectrum` or `input_rank`: one of them says what narrow heads miss.")
    if spectrum is not None:
        values = sorted(map(float, spectrum), reverse=True)
        if not values or not all(map(math.isfinite, values)) or values[0] <= 0 or values[-1] < -1e-6 * values[0]:
            raise MisconfigurationError(
                "`spectrum` has the eigenvalues of a covariance: finite, none below 0 and one above it."
            )
        values = [max(value, 0.0) for value in values]
        total = math.fsum(values)
        return lambda width: math.fsum(values[width:]) / total
    if input_rank is None or not 1 <= input_rank < math.inf:
        raise MisconfigurationError(f"`input_rank` is a participation ratio, at least 1, got {input_rank!r}.")
    # Eigenvalues r^i have the participation ratio (1 + r) / (1 - r), and leave out r^k.
    ratio = (input_rank - 1) / (input_rank + 1)
    return lambda width: ratio**width


def _require_positive(**arguments: Any) -> None:
    for name, value in arguments.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise MisconfigurationError(f"Every argument must be positive, a finite number; `{name}` is {value!r}.")
        if name in ("total_width", "multiple_of", "head_dim") and not isinstance(value, numbers.Integral):
            raise MisconfigurationError(f"`{name}` must be a whole number, got {value!r}: write {round(value)}.")


def _divisors(total_width: int, multiple_of: int) -> list[int]:
    widths = [width for width in range(1, total_width + 1) if total_width % width == 0 and width % multiple_of == 0]
    if not widths:
        raise MisconfigurationError(
            f"No divisor of total_width={total_width} is a multiple of {multiple_of}: write multiple_of=1."
        )
    return widths


def _over(error: float, best: float) -> float:
    return error / best - 1 if best > 0 else (0.0 if error == 0 else math.inf)


def _lambert_w_of_exp(log_argument: float) -> float:
    """Solve y e^y = exp(log_argument) by Newton steps on y + log y, which never overflow."""
    y = math.exp(log_argument) if log_argument < 1 else log_argument
    if y == 0:  # below the smallest double, where y and y e^y are the same
        return y
    for _ in range(50):
        y = max(y - (y + math.log(y) - log_argument) / (1 + 1 / y), y / 10)
    return y
