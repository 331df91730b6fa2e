"""Verdicts on the heads that a layer claims, by what was observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hdi_callback.attention.layer.heads import Role
from hdi_callback.attention.observe.compare.cores import ObservedCore
from hdi_callback.attention.observe.scores.axes import DimensionRoles

State = Literal["established", "contradicted", "undecided"]


@dataclass(frozen=True)
class RoleVerdict:
    """Verdict on the heads of one role.

    Attributes:
        state: whether they are where the layer claims them.
        sentence: what was observed, or why nothing was.
        tokens: how many tokens of a sequence the map made, where attention takes more; 0 if it made all.
        dims: roles of the leading dimensions in which it is established.
        order: for each claimed head the number of the observed one that it is; empty unless these differ.
    """

    state: State
    sentence: str
    tokens: int = 0
    dims: DimensionRoles | None = None
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Verdict on the heads of a layer.

    Attributes:
        state: ``"contradicted"`` if one role is; ``"established"`` if its queries, keys and values are, as far as it
            claims them.
        sentence: what was observed, or why nothing was.
        roles: the same of each role.
        core: the attention in which it was observed.
        cores: all of them, where each head has one of its own.
        claimed: names of the maps that its layer claims, each with a number of a feature of it.
    """

    state: State
    sentence: str
    roles: Mapping[Role, RoleVerdict] = field(default_factory=dict)
    core: ObservedCore | None = None
    cores: tuple[ObservedCore, ...] = ()
    claimed: frozenset[tuple[str, int]] = frozenset()
