"""One architecture, observed: are its rows the weights that it returns, and what is seen of the heads that are claimed?

`observe("llama")` is what a sweep over all architectures calls.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention import survey
from hdi_callback.attention.observe import AttentionObserver
from tests.attention.observe.oracle import Rows, compared, returned
from tests.attention.sweep import architectures, inputs


def observe(model_type: str, batch: int = 3) -> dict[str, Any]:
    """Build an architecture, run it, and compare.

    Args:
        model_type: as transformers calls it.
        batch: sequences.

    Returns:
        ``rows``: implementation -> how many attentions there were, how many agree with returned weights to 1e-5, how
        many do not, and why others were not read; ``verdicts``: state -> how many layers; ``sentences``: of layers that
        were not established; ``unexplained``: sentences of attention that no layer explains.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = next(architectures.variants(model_type)).eval()
        for arguments in islice(inputs.for_model(model, batch), 40):
            with torch.no_grad(), suppress(Exception):
                model(**arguments)
                return _observed(model, arguments)
    return {"error": "no inputs fit"}


def _observed(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    layers = survey(model).layers
    report: dict[str, Any] = {"rows": {}}
    weights = _returned_by(model, arguments)
    for implementation in ("eager", "sdpa"):
        with suppress(Exception):
            model.set_attn_implementation(implementation)
        observer = AttentionObserver(model, layers, reduce_rows=lambda chunk: Rows((chunk,)))
        observer.arm()
        with torch.no_grad(), suppress(Exception):
            model(**arguments)
        observer.disarm()
        comparisons = list(compared(list(observer.cores), weights))
        report["rows"][implementation] = {
            "attentions": len(comparisons),
            "agree": sum(one.error is not None and one.error < 1e-5 for one in comparisons),
            "differ": [(one.module, one.error) for one in comparisons if one.error is not None and one.error >= 1e-5],
            "unread": [(one.module, one.unread) for one in comparisons if one.unread],
            "returned": len(weights),
            "failures": observer.failures,
        }
    verdicts = observer.verdicts()
    report["verdicts"] = dict(Counter(one.state for one in verdicts.values()))
    report["sentences"] = {name: one.sentence for name, one in verdicts.items() if one.state != "established"}
    report["contradicted"] = [name for name, one in verdicts.items() if one.state == "contradicted"]
    report["unexplained"] = [one.message for one in observer.unexplained()]
    return report


def _returned_by(model: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    with suppress(Exception):
        model.set_attn_implementation("eager")  # type: ignore[operator]
    with torch.no_grad(), suppress(Exception):
        return [one for one in returned(model(**arguments, output_attentions=True)) if _are_weights(one)]
    return []


def _are_weights(tensor: Tensor) -> bool:
    """Leave out scores, which some models return under the name of attentions."""
    return bool((tensor >= 0).all()) and bool((tensor.sum(-1) < 1 + 1e-3).all())


def run(model_types: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Observe several architectures; one that cannot be built is reported as such."""
    for model_type in model_types:
        try:
            yield model_type, observe(model_type)
        except Exception as error:  # noqa: PERF203
            yield model_type, {"error": f"{type(error).__name__}: {error}"}
