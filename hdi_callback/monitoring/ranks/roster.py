"""`Roster`: all layers of the ranks of a run, whether all hold the same or each holds others.

Ranks with the same layers are data-parallel, sharded, or hold other tokens; the stages of a pipeline hold other layers.
A rank adds zeros for the layers that it does not hold, so that every sum has the same shapes on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from hdi_callback.attention import AttentionLayer, Role
from hdi_callback.attention.layer.heads import HeadWeight
from hdi_callback.monitoring.ranks.ranks import Ranks


@dataclass(frozen=True)
class _RemoteWeight:
    """Shape of a weight that another rank holds.

    Attributes:
        in_features: input features.
        heads: number of heads, for a value weight.
    """

    in_features: int
    heads: int = 0


SIZES = ("num_heads", "num_key_heads", "head_dim", "value_dim")
"""Facts that identify a layer: with other values it is another layer."""


class Roster:
    """The layers of all ranks that measure together.

    Args:
        ranks: those that measure together.
        findings: rank -> its findings: ``"layers"``, for each layer its ``"facts"``, ``"roles"`` and whether its
            ``"outputs"`` and ``"inputs"`` are captured; whether it ``"has_parts"`` of parameters; ``"contradicted"``
            and ``"absent"``, with reasons; and whether it ``"awaits"`` a forward that verifies heads.

    Attributes:
        ranks: the ranks that measure together; its `peers` hold the same layers as this one.
        spans: whether the ranks hold different layers.
        facts: facts about each layer, in the order of the whole model.
        contradicted: name of a layer -> what contradicts its heads.
        absent: what ranks with other layers could not capture -> the reason.
        awaits: whether a rank still waits for a forward that verifies heads.
    """

    def __init__(self, ranks: Ranks, findings: Mapping[int, Mapping[str, Any]]) -> None:
        mine = findings[ranks.rank]
        names = _names(mine)
        peers = [rank for rank, finding in findings.items() if _names(finding) == names]
        hold_parts = any(finding["has_parts"] for finding in findings.values())
        self.ranks = Ranks(ranks.group, peers, ranks.agree, give_up=ranks.give_up, hold_parts=hold_parts)
        self.spans = len(peers) < len(findings)
        entries: dict[str, Mapping[str, Any]] = {}
        for one in findings.values():
            for entry in one["layers"]:
                entries.setdefault(entry["facts"]["name"], entry)
        order = list(entries) if not self.spans else in_model_order(entries)
        self._entries = {name: entries[name] for name in order}
        facts = [dict(entry["facts"]) for entry in self._entries.values()]
        for one in facts[1:]:  # the first layer of a stage is not that of the model
            one["is_first"] = False
        self.facts: tuple[dict[str, Any], ...] = tuple(facts)
        self.contradicted: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        for rank, one in findings.items():
            self.contradicted = {**one["contradicted"], **self.contradicted}
            if rank not in peers:
                self.absent = {**one["absent"], **self.absent}
        self.awaits = any(finding["awaits"] for finding in findings.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all layers, in the order of the whole model."""
        return tuple(self._entries)

    def layers(self, held: Sequence[AttentionLayer]) -> list[AttentionLayer]:
        """All layers.

        Args:
            held: the layers of this rank.

        Returns:
            These, and stand-ins of the same sizes for the layers of other ranks.
        """
        here = {layer.name: layer for layer in held}
        return [here.get(name) or _stand_in(entry) for name, entry in self._entries.items()]

    def captured(self, held: Sequence[AttentionLayer], what: str) -> list[AttentionLayer]:
        """The layers of which outputs, or inputs, are captured on some rank.

        Args:
            held: the layers of this rank.
            what: ``"outputs"`` or ``"inputs"``.

        Returns:
            Some of `layers`.
        """
        return [layer for layer in self.layers(held) if self._entries[layer.name][what]]


def why_not_together(findings: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Reason why ranks cannot measure together.

    Args:
        findings: rank -> its findings, see `Roster`.

    Returns:
        A sentence; `None` if they can: any two of them hold the same layers, or none in common.
    """
    first, *others = findings.values()
    if any(other["subject"] != first["subject"] for other in others):
        return f"the {len(findings)} ranks do not watch the same layers and metrics"
    groups: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for finding in findings.values():
        same = groups.setdefault(_names(finding), finding)
        if _sizes(same) != _sizes(finding):
            return f"the {len(findings)} ranks do not watch the same layers and metrics"
        if any(mine and mine != other for mine, other in zip(same["weights"], finding["weights"]) if other):
            return (
                f"the {len(findings)} ranks hold different weights under the same names, as the stages of a pipeline "
                "do whose layers are numbered anew (let every stage keep the names of the whole model), or as models "
                "do that are trained apart"
            )
    known: set[str] = set()
    for names in groups:
        if known & set(names):
            late = any(one["late"] for one in findings.values())
            return (
                "the forwards of the ranks have shown different attention layers; describe the attention with "
                "`register_layout`"
                if late
                else f"the {len(findings)} ranks do not watch the same layers and metrics"
            )
        known |= set(names)
    return None


def in_model_order(names: Iterable[str]) -> list[str]:
    """Names of layers from several ranks in the order of the whole model.

    Numbers count; other parts of names come in the order in which they first occur.

    Args:
        names: dotted paths.

    Returns:
        The same names.

    Example:
        >>> in_model_order(["h.0.attn", "h.10.attn", "h.2.attn", "last.attn", "h.2.cross"])
        ['h.0.attn', 'h.2.attn', 'h.2.cross', 'h.10.attn', 'last.attn']
    """
    names = list(names)
    words: dict[str, int] = {}
    for name in names:
        for word in re.split(r"\d+", name):
            words.setdefault(word, len(words))

    def key(name: str) -> list[int]:
        return [int(part) if part.isdigit() else words[part] for part in re.split(r"(\d+)", name)]

    return sorted(names, key=key)


def _names(found: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(entry["facts"]["name"] for entry in found["layers"])


def _sizes(found: Mapping[str, Any]) -> list[Any]:
    return [([entry["facts"][name] for name in (*SIZES, "width")], entry["roles"]) for entry in found["layers"]]


def _stand_in(entry: Mapping[str, Any]) -> AttentionLayer:
    facts = entry["facts"]
    roles = cast("Sequence[Role]", entry["roles"])
    heads, key_heads, head_dim, value_dim = (int(facts[name]) for name in SIZES)
    of_values = int(facts.get("num_value_heads", key_heads))
    slices = {role: cast("HeadWeight", _RemoteWeight(facts["width"], of_values)) for role in roles}
    return AttentionLayer(facts["name"], nn.Module(), heads, key_heads, head_dim, value_dim, facts["kind"], slices)
