"""The attention weights that a model returns itself, against the rows that were observed in its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention.observe import AttentionObserver, ObservedCore, RowChunk
from hdi_callback.core.kernels import AttentionSums
from hdi_callback.core.norms import NormSums
from tests.skips import NEEDS_NEWER_TRANSFORMERS


@dataclass(frozen=True, eq=False)
class Rows:
    """All pieces of rows, kept; `+` puts them one after the other."""

    chunks: tuple[RowChunk, ...]

    def __add__(self, other: Rows) -> Rows:
        return Rows(self.chunks + other.chunks)


@dataclass(frozen=True)
class Comparison:
    """One observed attention beside the one that the model returned.

    Attributes:
        module: where it ran.
        unread: why its rows were not read.
        error: the largest difference; None if the model returned none of this shape.
        place: which of the returned ones it is.
        read: how many queries were compared.
    """

    module: str
    unread: str
    error: float | None
    place: int | None
    read: int


def returned(outputs: Any) -> list[Tensor]:
    """Find everything that a model returned as attention weights."""
    found: list[Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() >= 3:
            found.append(value)
        elif isinstance(value, (tuple, list)):
            for one in value:
                visit(one)

    for name in getattr(outputs, "keys", list)():
        if "attentions" in name:
            visit(outputs[name])
        elif hasattr(outputs[name], "keys"):
            found += returned(outputs[name])
    return found


def observed(model: nn.Module, forward: Callable[[], Any], **options: Any) -> AttentionObserver:
    """Observe one forward, and keep all rows."""
    return _observed(model, forward, reduce_rows=lambda chunk: Rows((chunk,)), **options)


def observed_sums(model: nn.Module, forward: Callable[[], Any]) -> AttentionObserver:
    """Observe one forward, and reduce rows and norms as a reading does."""
    return _observed(
        model,
        forward,
        reduce_rows=lambda chunk: AttentionSums.of(chunk.weights, chunk.visible, logits=chunk.logits),
        reduce_norms=NormSums.of,
    )


def _observed(model: nn.Module, forward: Callable[[], Any], **options: Any) -> AttentionObserver:
    observer = AttentionObserver(model, **options)
    observer.arm()
    try:
        forward()
    finally:
        observer.disarm()
    return observer


def error_of(core: ObservedCore, weights: Tensor) -> tuple[float, int] | None:
    """Compare rows with weights that a model returned.

    Args:
        core: with its rows kept.
        weights: ``(batch, H, queries, keys)``.

    Returns:
        The largest difference over the queries that see anything, and how many those are; None if shapes differ.
    """
    worst, read = 0.0, 0
    for chunk in core.rows.chunks if core.rows is not None else ():
        S, H, q, keys = chunk.weights.shape
        if (
            weights.dim() != 4
            or weights.shape[1] != H
            or weights.shape[-1] != keys
            or weights.shape[-2] != core.queries
        ):
            return None
        if core.axes is None or weights.shape[0] != core.axes.sequences:
            return None
        theirs = weights[chunk.sequences][:, :, chunk.positions].float()
        sees = chunk.visible.any(-1, keepdim=True).expand(S, H, q, 1)
        worst = max(worst, float(((chunk.weights - theirs).abs() * sees).max()))
        read += int(sees[:, 0].sum())
    return worst, read


def compared(cores: list[ObservedCore], weights: list[Tensor]) -> Iterator[Comparison]:
    """Put observed and returned attention together, those that agree best first; each is taken once."""
    ways = {(number, place): way for number, core in enumerate(cores) if core.rows is not None
            for place, one in enumerate(weights) if (way := error_of(core, one)) is not None}  # fmt: skip
    pairs: dict[int, int] = {}
    for number, place in sorted(ways, key=lambda pair: ways[pair][0]):
        if number not in pairs and place not in pairs.values():
            pairs[number] = place
    for number, core in enumerate(cores):
        if number in pairs:
            error, read = ways[number, pairs[number]]
            yield Comparison(core.module, core.unread, error, pairs[number], read)
        else:
            yield Comparison(core.module, core.unread, None, None, 0)


def require_a_kernel_with_softcap(model: Any, implementation: str) -> None:
    """Skip where the model runs another attention than it returns: that of transformers 5.20 for gemma2 under sdpa."""
    if implementation == "sdpa" and getattr(model.config, "attn_logit_softcapping", None) and model._supports_sdpa:
        pytest.skip(NEEDS_NEWER_TRANSFORMERS)


def against_eager(model: Any, inputs: dict[str, Any], implementation: str = "eager") -> tuple[list[Comparison], int]:
    """Compare what is observed under an implementation of attention with what the model returns under ``eager``.

    Args:
        model: of transformers, in evaluation.
        inputs: of its forward.
        implementation: ``"eager"`` or ``"sdpa"``.

    Returns:
        One comparison for each attention that ran, and how many weights the model returned.
    """
    require_a_kernel_with_softcap(model, implementation)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        weights = returned(model(**inputs, output_attentions=True))
        with suppress(ValueError):
            model.set_attn_implementation(implementation)
        observer = observed(model, lambda: model(**inputs))
    return list(compared(list(observer.cores), weights)), len(weights)
