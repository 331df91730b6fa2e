"""Results of a search: layers and refusals, those of them that `include` and `exclude` leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hdi_callback.attention.finding.search import Search
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.layer.registry import Place
from hdi_callback.attention.names import is_inside, matches
from hdi_callback.errors import MisconfigurationError


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
        where = f"`{self.name}` ({self.module_type})" if self.name else f"the model ({self.module_type})"
        # The model itself has no name: a pattern for it alone would leave nothing to watch.
        skip = f", or skip it with exclude=[{self.name!r}]" if self.name else ""
        remedy = self.remedy or f"Describe it with `register_layout`{skip}."
        return f"The heads of {where} cannot be read: {self.reason}. {remedy}"


@dataclass(frozen=True)
class Survey:
    """Layers and refusals found in a model.

    Attributes:
        layers: attention layers whose heads are established, in model order.
        refused: modules that compute attention, or resemble it, and are left out.
        undecided: the places of those of them whose heads a real forward may show.
    """

    layers: tuple[AttentionLayer, ...]
    refused: tuple[Refusal, ...]
    undecided: tuple[Place, ...] = ()


def message_of_part(layer: AttentionLayer) -> str:
    """Return the warning of the tokens that the reading of a layer leaves out.

    Args:
        layer: with something left out.

    Returns:
        The sentence for a warning.
    """
    return f"`{layer.name}` ({type(layer.module).__name__}) is read in part: without {layer.left_out}."


def chosen_from(search: Search, include: Sequence[str] | None, exclude: Sequence[str] | None) -> Survey:
    """Select the layers and the refusals that `include` and `exclude` leave.

    Args:
        search: which is over.
        include: patterns of dotted names; only layers that match one of them.
        exclude: patterns of dotted names to leave out.

    Returns:
        What was found.

    Raises:
        MisconfigurationError: if a pattern matches no attention layer; the message lists what exists.
    """
    undecided = search.undecided()
    order = {id(place.module): number for number, place in enumerate(search.places.values())}
    layers = sorted(search.layers.values(), key=lambda layer: order[id(layer.module)])
    names = [name for name in search.places if name in search.reasons or name in undecided]
    names += [name for name in search.reasons if name not in search.places]
    # A module that holds a layer and could not be run attends no further, unless it has maps beside that layer.
    names = [
        name for name in names
        if name in search.reasons
        or search.may_attend_itself(name)
        or not any(is_inside(layer.name, name) for layer in layers)
    ]  # fmt: skip
    refused = [_refusal(search, name) for name in names]
    known = [layer.name for layer in layers] + names
    _check_patterns("include", include, known)
    # `exclude` may name attention that only a forward can show.
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
        tuple(
            undecided[refusal.name]
            for refusal in kept
            if refusal.name in undecided and not search.is_exported(refusal.name)
        ),
    )


def _refusal(search: Search, name: str) -> Refusal:
    place, why = search.places.get(name), search.reason_of(name)
    return Refusal(name, "module" if place is None else type(place.module).__name__, why.text, why.remedy)


def _check_patterns(
    argument: str, patterns: Sequence[str] | None, names: list[str], others: Iterable[str] = ()
) -> None:
    for pattern in patterns or ():
        if not any(matches(name, [pattern]) for name in (*names, *others)):
            listed = ", ".join(names) or "none"
            raise MisconfigurationError(
                f"`{argument}` has the pattern {pattern!r}, which matches no attention layer. There are: {listed}."
            )
