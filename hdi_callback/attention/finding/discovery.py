"""`find_attention`: every attention layer of a model, and every refusal.

In the order in which it is asked (`Search` has the steps): layouts that are registered; traced runs of copies of the
modules, with inputs that are made up; and, where a forward is passed, a real one, which decides what is still open,
checks what is claimed and shows attention that nothing explains. What is left is chosen by `include` and `exclude`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hdi_callback.arguments import function, shown, words
from hdi_callback.attention.finding.argument_recorder import ArgumentRecorder
from hdi_callback.attention.finding.search import Search
from hdi_callback.attention.heads import AttentionLayer
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.names import is_inside, matches
from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.attention.registry import Place
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionWarning


@dataclass(frozen=True)
class Refusal:
    """A module that computes attention, or resembles it, and is left out.

    Attributes:
        name: dotted path.
        module_type: name of its class.
        reason: why its heads cannot be read, as a clause.
        remedy: what to write instead.
    """

    name: str
    module_type: str
    reason: str
    remedy: str = ""

    @property
    def message(self) -> str:
        """The whole sentence for a warning: where, why, and what to do."""
        where = f"`{self.name}` ({self.module_type})"
        remedy = self.remedy or f"Describe it with `register_layout`, or skip it with exclude=[{self.name!r}]."
        return f"The heads of {where} cannot be told apart: {self.reason}. {remedy}"


@dataclass(frozen=True)
class Survey:
    """What was found in a model.

    Attributes:
        layers: attention layers whose heads are established, in model order.
        refused: modules that compute attention, or resemble it, and are left out.
        undecided: the places of those of them whose heads a real forward may show.
    """

    layers: tuple[AttentionLayer, ...]
    refused: tuple[Refusal, ...]
    undecided: tuple[Place, ...] = ()


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
            It decides what cannot be established with inputs that are made up, checks what is claimed, and shows
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


def message_of_part(layer: AttentionLayer) -> str:
    """Say what a layer is read without.

    Args:
        layer: with something left out.

    Returns:
        The sentence for a warning.
    """
    return f"`{layer.name}` ({type(layer.module).__name__}) is read in part: without {layer.left_out}."


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
        search.ask_registry()
        search.trace()
        search.name_what_is_silent()
    if forward is not None:
        _check_by(forward, search)
    return _chosen(search, include, exclude)


def _check_by(forward: Callable[[], Any], search: Search) -> None:
    """Decide what is open, and check what is claimed, by a real forward."""
    claims = tuple(search.layers.values())
    modules = {name: place.module for name, place in search.undecided().items()}
    recorder = ArgumentRecorder({**{layer.name: layer.module for layer in claims}, **modules})
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
    ways = recorder.take()
    with isolated(search.model):
        search.trace_recorded({name: ways[name] for name in modules.keys() & ways.keys()})
        if has_numbers:
            search.compare(observer, ways)
        search.name_what_ran_silently(sorted(modules.keys() & ways.keys()))
    observer.release()


def _chosen(search: Search, include: Sequence[str] | None, exclude: Sequence[str] | None) -> Survey:
    """Put together the layers and the refusals that patterns leave in."""
    undecided = search.undecided()
    order = {id(place.module): number for number, place in enumerate(search.places.values())}
    layers = sorted(search.layers.values(), key=lambda layer: order[id(layer.module)])
    names = [name for name in search.places if name in search.reasons or name in undecided]
    names += [name for name in search.reasons if name not in search.places]
    # What holds a layer and could not be run computes nothing beside, unless maps of its own lie beside that layer.
    names = [
        name for name in names
        if name in search.reasons
        or search.may_attend_beside(name)
        or not any(is_inside(layer.name, name) for layer in layers)
    ]  # fmt: skip
    refused = [Refusal(name, _type_of(search, name), *search.why(name)) for name in names]
    known = [layer.name for layer in layers] + names
    _check_patterns("include", include, known)
    # What a forward showed to attend may be left out, though nothing is known of it before one.
    _check_patterns("exclude", exclude, known, others=search.places)

    def is_chosen(name: str) -> bool:
        return matches(name, include) and not matches(name, exclude or ())

    if known and not any(is_chosen(name) for name in known):
        raise MisconfigurationError(
            f"`include` and `exclude` leave none of the {len(known)} attention layers: {', '.join(known)}."
        )
    kept = tuple(refusal for refusal in refused if is_chosen(refusal.name))
    return Survey(
        tuple(layer for layer in layers if is_chosen(layer.name)),
        kept,
        tuple(undecided[one.name] for one in kept if one.name in undecided),
    )


def _type_of(search: Search, name: str) -> str:
    place = search.places.get(name)
    return "module" if place is None else type(place.module).__name__


def _check_patterns(
    argument: str, patterns: Sequence[str] | None, names: list[str], others: Iterable[str] = ()
) -> None:
    for pattern in patterns or ():
        if not any(matches(name, [pattern]) for name in (*names, *others)):
            listed = ", ".join(names) or "none"
            raise MisconfigurationError(
                f"`{argument}` has the pattern {pattern!r}, which matches no attention layer. There are: {listed}."
            )
