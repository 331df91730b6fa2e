"""Every attention layer of a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hdi_callback.arguments import function, shown, words
from hdi_callback.attention.behaviour.check import HeadSearch
from hdi_callback.attention.behaviour.received import NoHeadsError
from hdi_callback.attention.heads import AttentionLayer
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layouts import Place, describe_attention, found_alike, found_by_behaviour
from hdi_callback.attention.names import printable
from hdi_callback.attention.wrappers import is_wrapper, users_name
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionError, UnsupportedAttentionWarning

_MOST_SECONDS = 60.0  # for the trials of one module


@dataclass(frozen=True)
class Refusal:
    """A module that looks like attention and is left out.

    Attributes:
        name: dotted path.
        module_type: name of its class.
        message: the whole sentence for a warning: where, why, and what to do.
    """

    name: str
    module_type: str
    message: str

    @property
    def reason(self) -> str:
        """The part of the message between place and remedy."""
        return self.message.split(": ", 1)[-1].split(". ")[0]


@dataclass(frozen=True)
class Survey:
    """What was found in a model.

    Attributes:
        layers: attention layers whose heads are established, in model order.
        refused: modules that look like attention and are left out.
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
        forward: runs the model once on real inputs, such as ``lambda: model(batch)``; called, without gradients, if
            there are modules whose heads cannot be established with inputs that are made up.

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
    places = {place.name: place for place in _places(model)}
    layers: dict[str, AttentionLayer] = {}
    refusals: dict[str, Refusal] = {}
    reasons: dict[str, str] = {}  # what was seen instead of heads
    with isolated(model):
        _describe(places, layers, refusals)
        _look_at_behaviour(places, layers, reasons)
    undecided = {name: places[name] for name in refusals if name not in layers}
    if forward is not None and undecided:
        _look_at_forward(undecided, layers, forward, reasons)
    for name in refusals.keys() & {name for name, why in reasons.items() if why}:
        refusals[name] = Refusal(name, refusals[name].module_type, str(places[name].refuse(reasons[name])))
    described = [name for name in places if name in layers or name in refusals]
    # A wrapper is told apart by its parts: what contains a described or refused attention is not reported itself.
    refused = [
        refusals[name]
        for name in described
        if name not in layers and not any(_is_inside(other, name) for other in described)
    ]
    found = [layers[name] for name in places if name in layers]
    found = [layer for layer in found if not any(_is_inside(layer.name, other.name) for other in found)]
    names = [layer.name for layer in found] + [refusal.name for refusal in refused]
    _check_patterns("include", include, names)
    _check_patterns("exclude", exclude, names)

    def is_chosen(name: str) -> bool:
        return (include is None or _matches(name, include)) and not _matches(name, exclude or ())

    if names and not any(is_chosen(name) for name in names):
        raise MisconfigurationError(
            f"`include` and `exclude` leave none of the {len(names)} attention layers: {', '.join(names)}."
        )
    return Survey(
        tuple(layer for layer in found if is_chosen(layer.name)),
        tuple(refusal for refusal in refused if is_chosen(refusal.name)),
        tuple(places[refusal.name] for refusal in refused if is_chosen(refusal.name)),
    )


def _describe(places: Mapping[str, Place], layers: dict[str, AttentionLayer], refusals: dict[str, Refusal]) -> None:
    """Ask layouts for every module; adds to `layers` and `refusals`."""
    for place in places.values():
        try:
            with isolated(seconds=_MOST_SECONDS):
                layer = describe_attention(place)
        except UnsupportedAttentionError as error:
            refusals[place.name] = Refusal(place.name, type(place.module).__name__, str(error))
            continue
        except Exception as error:  # one odd module costs one refusal
            unreadable = place.refuse(f"looking at it raises {type(error).__name__} ({_first_line(error)})")
            refusals[place.name] = Refusal(place.name, type(place.module).__name__, str(unreadable))
            continue
        if layer is not None:
            layers[place.name] = layer
        elif _looks_like_attention(place):
            unknown = place.refuse("none of the known layouts fits its parameters, and a trial forward shows no heads")
            refusals[place.name] = Refusal(place.name, type(place.module).__name__, str(unknown))


def _look_at_behaviour(places: Mapping[str, Place], layers: dict[str, AttentionLayer], reasons: dict[str, str]) -> None:
    """Find heads where no layout does, from the innermost modules outwards; adds to `layers` and `reasons`."""
    seen: dict[tuple[Any, ...], AttentionLayer | str] = {}  # a model has many alike; where none is found, why
    for name in sorted(places, key=lambda name: len(name.split(".")) if name else 0, reverse=True):
        place = places[name]
        if any(name == other or _is_inside(name, other) or _is_inside(other, name) for other in layers):
            continue
        if any(is_lazy(parameter) for parameter in place.module.parameters()):
            continue
        shapes = tuple((path, tuple(parameter.shape)) for path, parameter in place.module.named_parameters())
        alike = (type(place.module), shapes)
        known = seen.get(alike)
        layer = found_alike(place, known) if isinstance(known, AttentionLayer) else None
        if layer is None and not isinstance(known, str):
            try:
                with isolated(seconds=_MOST_SECONDS):
                    layer = found_by_behaviour(place)
            except NoHeadsError as error:
                known = str(error)
            except Exception as error:  # one odd module costs itself
                known = f"looking at it raises {type(error).__name__} ({_first_line(error)})"
        if layer is not None:
            seen[alike] = layers[name] = layer
        elif isinstance(known, str):
            seen[alike] = reasons[name] = known


def _look_at_forward(
    undecided: Mapping[str, Place],
    layers: dict[str, AttentionLayer],
    forward: Callable[[], Any],
    reasons: dict[str, str],
) -> None:
    """Find heads of what was refused with the inputs of a real forward; adds to `layers` and `reasons`."""
    search = HeadSearch(list(undecided.values()))
    try:
        search.arm()
        with torch.no_grad():
            forward()
    finally:
        search.suspend()
    layers.update({layer.name: layer for layer in search.found()})
    reasons.update({name: why for name, why in search.reasons.items() if why})


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "nothing more is said"


def _places(model: nn.Module) -> Iterable[Place]:
    """Walk the model in its own order; a module under two names is visited once, under its first.

    What wraps a module for training (FSDP, torch.compile, activation checkpointing) is passed over, and is in no name.
    """
    parents: dict[int, nn.Module | None] = {}
    for module in model.modules():
        around = parents.get(id(module)) if is_wrapper(module) else module
        for child in module.children():
            parents.setdefault(id(child), around)
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleDict, nn.ModuleList)) or is_wrapper(module):  # which compute nothing themselves
            continue
        yield Place(users_name(printable(name)), module, parents.get(id(module)))


_ATTENTION_NAME = re.compile(r"(?i:attention|attn)|MLA$")


def _looks_like_attention(place: Place) -> bool:
    """Tell a module that is called attention and holds matrices of its own; a whole model may be called anything."""
    if place.parent is None or not _ATTENTION_NAME.search(type(place.module).__name__):
        return False
    return sum(is_lazy(one) or one.dim() >= 2 for one in place.module.parameters()) >= 2


def _is_inside(name: str, container: str) -> bool:
    return name != container and (container == "" or name.startswith(f"{container}."))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(argument: str, patterns: Sequence[str] | None, names: list[str]) -> None:
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            listed = ", ".join(names) or "none"
            raise MisconfigurationError(
                f"`{argument}` has the pattern {pattern!r}, which matches no attention layer. There are: {listed}."
            )
