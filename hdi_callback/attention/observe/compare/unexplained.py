"""Every attention that ran, with the watched layer that explains it, or a message where none does."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hdi_callback.attention.layer.heads import INPUT_ROLES, Role
from hdi_callback.attention.observe.compare.cores import ObservedCore
from hdi_callback.attention.observe.compare.found_rows import find_rows
from hdi_callback.attention.observe.compare.samples import MapCall
from hdi_callback.attention.observe.compare.verdicts import Verdict


@dataclass(frozen=True)
class Unexplained:
    """Attention that no watched layer explains, or explains in part.

    Attributes:
        name: dotted path of the module in which it ran.
        module_type: name of its class.
        reason: why it is not watched, as a clause.
        message: the whole sentence for a warning: where, what, why, and what to do.
        layer: name of the watched layer that explains it in part; empty if none does.
    """

    name: str
    module_type: str
    reason: str
    message: str
    layer: str = ""


def _kind(core: ObservedCore) -> str:
    heads = f"{core.heads} heads" if core.heads else "an unknown number of heads"
    return heads if core.kind == "softmax" else f"{core.kind} weights, {heads}"


def unexplained(
    cores: Sequence[ObservedCore],
    maps: Sequence[MapCall],
    verdicts: Mapping[str, Verdict],
    paths: Mapping[str, str],
    reasons: Mapping[str, str],
    *,
    reported: Collection[str] = (),
) -> list[Unexplained]:
    """Find the softmax-weighted sums over tokens that no watched layer explains, or explains in part.

    Args:
        cores: all that ran.
        maps: all maps of the forward.
        verdicts: name of a watched layer -> what was observed of it.
        paths: name of a watched layer -> dotted path of its module.
        reasons: dotted path of a module -> why no layer can be made of its attention.
        reported: paths of modules that are reported already, with all that they hold.

    Returns:
        One for each module.
    """
    found: dict[str, Unexplained] = {}
    watched = {path: name for name, path in paths.items()}
    claimed = {call for verdict in verdicts.values() for call in verdict.claimed}
    for core in cores:
        parts = (*core.parts, core.module)
        if core.module in found or not set(parts).isdisjoint(reported) or not _sums_over_tokens(core, maps):
            continue
        around = [watched[part] for part in parts if part in watched]
        if not around:
            if _is_of_a_layer(core, maps, watched):  # whose forward was called without the module's own call
                continue
            if core.heads != 1 or _is_one_of_several(core, cores):
                found[core.module] = _unwatched(core, reasons.get(core.module, ""))
            continue
        verdict = verdicts[around[-1]]
        partial = next(((role, one.tokens) for role, one in verdict.roles.items() if one.tokens), None)
        if core is verdict.core or core in verdict.cores:
            if partial is not None:
                length = core.queries if partial[0] == "query" else core.keys
                beside = [verdicts[name] for name, path in paths.items() if path == paths[around[-1]]]
                if _tokens_of(beside, core, partial[0]) >= length:  # streams with a layer each
                    continue
                why = f"its projections compute {partial[1]} of the {length} tokens that are attended to"
                found[core.module] = _in_part(core, around[-1], why)
        elif claimed:
            keys = find_rows(core, maps, "key")
            # Of one map some heads may attend in one place, and others in another.
            if keys is not None and claimed.isdisjoint((keys.map, row) for row in keys.rows.flatten().tolist()):
                why = f"it computes another attention too, whose keys come from `{keys.map}`"
                found[core.module] = _in_part(core, around[-1], why)
    return list(found.values())


def _sums_over_tokens(core: ObservedCore, maps: Sequence[MapCall]) -> bool:
    if core.kind in ("sigmoid", "relu"):  # gates of other kinds are no attention: all of it must come from maps
        return all(find_rows(core, maps, role) is not None for role in INPUT_ROLES)
    if core.kind not in ("softmax", "exp", "additive", "sparsemax", "entmax"):
        return False
    # Its weights may be those of experts, or of channels: values that maps gave are those of tokens.
    if core.kind == "additive" or core.tied > 1:
        return find_rows(core, maps, "value") is not None
    tokens = {call.tokens for call in core.maps if call.kind == "linear"}
    if not tokens:  # projections that are products of an odd kind
        return True
    if core.axes is None:
        return any(count % length == 0 for count in tokens for length in (core.queries, core.keys) if length)
    tokens |= {count + other for count in tokens for other in tokens}  # two streams attend together
    return bool(tokens & {core.axes.sequences * core.queries, core.axes.sequences * core.keys})


def _tokens_of(verdicts: Sequence[Verdict], core: ObservedCore, role: Role) -> int:
    """Count the tokens of an attention that layers of one module cover together."""
    return sum(verdict.roles[role].tokens for verdict in verdicts if verdict.core is core and role in verdict.roles)


def _is_of_a_layer(core: ObservedCore, maps: Sequence[MapCall], watched: Collection[str]) -> bool:
    """Return whether projections of one watched layer make the inputs of an attention outside of its module."""
    for path in watched:
        inside = [call for call in maps if call.name == path or call.name.startswith(f"{path}." if path else "")]
        if find_rows(core, inside, "query") is not None and find_rows(core, inside, "key") is not None:
            return True
    return False


def _is_one_of_several(core: ObservedCore, cores: Sequence[ObservedCore]) -> bool:
    """Return whether an attention of one head is a head among others: in its module, or in modules beside it."""
    place = _without_numbers(core.module)
    alike = [one for one in cores if _without_numbers(one.module) == place and one.width == core.width]
    return len(alike) > 1 and (
        core.module == alike[0].module == alike[-1].module or re.search(r"\.\d+$", core.module) is not None
    )


def _without_numbers(path: str) -> str:
    return re.sub(r"\.\d+$", "", path)


def _unwatched(core: ObservedCore, why: str) -> Unexplained:
    reason = why or "it belongs to no watched layer"
    if core.heads == 1:
        reason = "its heads are computed one by one, each in a separate attention call"
    leave_out = f", or leave it out with exclude=[{core.module!r}]" if core.module else ""  # the model has no name
    sentence = f"{_place(core)} is not watched: {reason}. Describe it with `register_layout`{leave_out}."
    return Unexplained(core.module, core.module_type, reason, sentence)


def _in_part(core: ObservedCore, layer: str, why: str) -> Unexplained:
    reason = f"`{layer}` covers a part of it: {why}"
    sentence = f"{_place(core)} is watched in part: {why}, so that the curves of `{layer}` describe only a part of it."
    return Unexplained(core.module, core.module_type, reason, sentence, layer)


def _place(core: ObservedCore) -> str:
    size = f", {core.queries} queries and {core.keys} keys" if core.queries else ""
    where = f"`{core.module}`" if core.module else "the model's own forward"
    return f"The attention in {where} ({core.module_type}, {_kind(core)}{size})"
