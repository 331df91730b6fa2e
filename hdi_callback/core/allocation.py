r"""The head count and head width that minimise a model of the mean squared error under a fixed total width."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from hdi_callback.errors import MisconfigurationError


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
    arguments: dict[str, Any] = {
        "total_width": total_width, "samples": samples, "bias_scale": bias_scale, "bias_decay": bias_decay,
        "variance_growth": variance_growth, "noise": noise, "multiple_of": multiple_of,
    }  # fmt: skip
    for name, value in arguments.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise MisconfigurationError(f"Every argument must be positive, a finite number; `{name}` is {value!r}.")
        if name in ("total_width", "multiple_of") and not isinstance(value, numbers.Integral):
            raise MisconfigurationError(f"`{name}` must be a whole number, got {value!r}: write {round(value)}.")
    D, n, B, g, L = total_width, samples, bias_scale, bias_decay, variance_growth

    def error(width: float) -> float:
        # Beyond exp(700) the variance is out of the question, and out of the range of a double.
        return B * math.exp(-g * width) + noise / n * (width / D * math.exp(min(L * width, 700)) + 1 - width / D)

    widths = [width for width in range(1, D + 1) if D % width == 0 and width % multiple_of == 0]
    if not widths:
        raise MisconfigurationError(
            f"No divisor of total_width={D} is a multiple of {multiple_of}: write multiple_of=1."
        )
    best = min(widths, key=error)
    # As a sum, since the product of very small numbers would be zero.
    log_argument = math.log((g + L) / L) + (g + L) / L + sum(map(math.log, (g, B, n, D))) - math.log(noise)
    return HeadAllocation(D // best, best, _lambert_w_of_exp(log_argument) / (g + L) - 1 / L, error(best))


def _lambert_w_of_exp(log_argument: float) -> float:
    """Solve y e^y = exp(log_argument) by Newton steps on y + log y, which never overflow."""
    y = math.exp(log_argument) if log_argument < 1 else log_argument
    for _ in range(50):
        y = max(y - (y + math.log(y) - log_argument) / (1 + 1 / y), y / 10)
    return y
