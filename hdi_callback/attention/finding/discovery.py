"""`find_attention`: every attention layer of a model, and every refusal.

Names propose a module, its computation decides. `survey` has six steps; each is a method of `Search`, which keeps
what is known so far:

1. **Registry.** Layouts that users registered, and torch's own attention by its code (`registry`).
2. **Traced runs.** A copy of each module runs once with synthetic inputs (`trace.inputs`). The outputs of its
   linear maps are replaced by random numbers (`trace.graph_cut`). In the autograd graph every softmax-weighted sum over
   tokens is found (`trace.cores`), and derivatives show which features of which map make the queries, keys and values
   of which head (`trace.heads`). From these rows comes the `AttentionLayer` (`trace.layers`). Equal modules are run
   once (`trace.kinds`).
3. **Silent modules.** A module that is called attention and computed none is refused for that (`conventions`).

With ``forward=`` the model runs once for real, with hooks that record arguments and inputs of attention:

4. **Recorded inputs.** What could not run with synthetic inputs is traced with those of the forward.
5. **Observation.** The queries, keys and values of attention are compared with the outputs of the maps
   (`observe.compare.judge`): a layer that they contradict is read again or refused; attention that no layer explains
   is read from them (`observe.compare.proposals`) or named (`observe.compare.unexplained`).
6. **Silent modules** among those that were undecided until then.

Last, `include` and `exclude` choose among layers and refusals (`results`). Why each step is there and what it costs:
docs/decisions/heads-by-behaviour.md and docs/decisions/what-finding-costs.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hdi_callback.arguments import function, shown, words
from hdi_callback.attention.finding.argument_recorder import ArgumentRecorder
from hdi_callback.attention.finding.results import Survey, chosen_from, message_of_part
from hdi_callback.attention.finding.search import Search
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.layer.registry import Place
from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionWarning


def find_attention(
    model: nn.Module,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    forward: Callable[[], Any] | None = None,
) -> list[AttentionLayer]:
    """Find every multi-head attention layer of a model, in model order.

    A layer whose heads cannot be established is left out with a warning that says why; its heads are never guessed.

    Args:
        model: any module.
        include: patterns of dotted names (``"encoder.*"``); only layers that match one of them.
        exclude: patterns of dotted names to leave out.
        forward: runs the model once on real inputs, such as ``lambda: model(batch)``; called once, without gradients.
            It decides what cannot be established with synthetic inputs, checks what is claimed, and shows
            attention that nothing explains.

    Returns:
        The layers.

    Raises:
        MisconfigurationError: if a pattern matches no attention layer; the message lists what exists.

    Example:
        >>> encoder = nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True)
        >>> [(layer.name, layer.num_heads) for layer in find_attention(nn.Sequential(encoder))]
        [('0.self_attn', 4)]
    """
    found = survey(model, include=include, exclude=exclude, forward=forward)
    for refusal in found.refused:
        warnings.warn(refusal.message, UnsupportedAttentionWarning, stacklevel=2)
    for layer in found.layers:
        if layer.left_out:
            warnings.warn(message_of_part(layer), UnsupportedAttentionWarning, stacklevel=2)
    return list(found.layers)


def survey(
    model: nn.Module,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    forward: Callable[[], Any] | None = None,
) -> Survey:
    """Find every attention layer of a model, and those that are left out, without a warning.

    Args:
        model: any module.
        include: patterns of dotted names; only layers that match one of them.
        exclude: patterns of dotted names to leave out.
        forward: see `find_attention`.

    Returns:
        What was found.

    Raises:
        MisconfigurationError: if a pattern matches no attention layer; the message lists what exists.
    """
    if not isinstance(model, nn.Module):
        raise MisconfigurationError(f"`model` must be a torch.nn.Module, got {shown(model)}.")
    function("forward", forward, "nothing and runs the model, such as lambda: model(batch)")
    include = words("include", include, what="patterns of layer names", may_be_empty=False)
    exclude = words("exclude", exclude, what="patterns of layer names")
    search = Search(model)
    with isolated(model):
        search.apply_registry()  # 1
        search.trace()  # 2
        search.refuse_silent_modules()  # 3
    if forward is not None:
        _run_for_real(forward, search)  # 4 to 6
    return chosen_from(search, include, exclude)


def _run_for_real(forward: Callable[[], Any], search: Search) -> None:
    """Run the model once: decide open cases by it, and verify claims."""
    claims = tuple(search.layers.values())
    open_places = search.undecided()
    recorder = ArgumentRecorder({layer.name: layer.module for layer in claims} | _modules(open_places))
    observer = AttentionObserver(search.model, claims)
    has_numbers = not any(parameter.is_meta for parameter in search.model.parameters())
    try:
        recorder.arm()
        if has_numbers:
            observer.arm()
        with torch.no_grad():
            forward()
    finally:
        recorder.suspend()
        observer.suspend()
    observer.note_hooks()
    ways = recorder.take()  # name of a module -> its arguments, cut in several ways
    ran = {name: ways[name] for name in open_places.keys() & ways.keys()}
    with isolated(search.model):
        search.trace_recorded(ran)  # 4
        if has_numbers:
            search.compare(observer, ways)  # 5
        search.refuse_silent_in_forward(sorted(ran))  # 6
    observer.release()


def _modules(places: Mapping[str, Place]) -> dict[str, nn.Module]:
    return {name: place.module for name, place in places.items()}
