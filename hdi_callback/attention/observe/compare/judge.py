"""Verify by the inputs of attention in a real forward where a layer claims its heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import INPUT_ROLES, PLURAL, AttentionLayer, HeadSlice, Role
from hdi_callback.attention.observe.compare.cores import ObservedCore
from hdi_callback.attention.observe.compare.features import find_features, match_heads, tolerance
from hdi_callback.attention.observe.compare.found_rows import are_all_found, find_rows
from hdi_callback.attention.observe.compare.samples import Arrangement, MapCall
from hdi_callback.attention.observe.compare.verdicts import RoleVerdict, State, Verdict


def judge(layer: AttentionLayer, cores: Sequence[ObservedCore], maps: Sequence[MapCall]) -> Verdict:
    """Compare a claim with every attention that ran in its module.

    Args:
        layer: the claim.
        cores: those that ran in its module.
        maps: all maps of the forward.

    Returns:
        The verdict of the attention that agrees best.
    """
    verdict = _judge(layer, cores, maps)
    parts = [
        piece for role, part in layer.slices.items() if role != "output" for piece in getattr(part, "pieces", [part])
    ]
    claimed = {
        (call.name, feature)
        for part in parts
        for call in maps
        if call.kind == "linear" and _is_of(part.by_token, call)
        for feature in part.by_token.index().flatten().tolist()
    }
    return replace(verdict, claimed=frozenset(claimed))


def _judge(layer: AttentionLayer, cores: Sequence[ObservedCore], maps: Sequence[MapCall]) -> Verdict:
    if not cores:
        return Verdict("undecided", "no attention was observed in its module")
    if hasattr(layer.slices["key"], "pieces"):
        return _judge_pieces(layer, cores, maps)
    # Of several attentions in a module one may be another than the one that is claimed, with maps of its own.
    verdicts = [_judge_core(layer, core, maps, is_alone=len(cores) == 1) for core in cores]
    order: tuple[State, ...] = ("established", "contradicted", "undecided")
    ranks = [
        (order.index(verdict.state), -sum(r.state == "established" for r in verdict.roles.values()))
        for verdict in verdicts
    ]
    best = verdicts[min(range(len(ranks)), key=ranks.__getitem__)]
    if best.state == "contradicted" and len(cores) > 1 and best.core is not None and best.core.heads < layer.num_heads:
        # Heads that are computed one by one, or some at a time, are each a part of what is claimed.
        return replace(
            best, state="undecided", sentence=f"its heads are computed in {len(cores)} separate attention calls"
        )
    return best


def _judge_pieces(layer: AttentionLayer, cores: Sequence[ObservedCore], maps: Sequence[MapCall]) -> Verdict:
    """Judge heads that have a map each, and an attention each: every one must be observed in one of them."""
    count, roles = layer.num_heads, {}
    for role in INPUT_ROLES:
        pieces = getattr(layer.slices.get(role), "pieces", ())
        found = [any(_judge_part(piece, core, maps, role).state == "established" for core in cores) for piece in pieces]
        if pieces and all(found):
            roles[role] = RoleVerdict(
                "established", f"its {PLURAL[role]} are the outputs of the projections of the heads"
            )
        elif pieces:
            why = f"the {PLURAL[role]} of head {found.index(False)} of {count} are not the output of its projection"
            roles[role] = RoleVerdict("undecided", why)
    undecided = [one.sentence for one in roles.values() if one.state != "established"]
    state: State = "undecided" if undecided or not roles else "established"
    sentences = undecided or [one.sentence for one in roles.values()]
    return Verdict(state, "; ".join(sentences), roles, cores[0], tuple(cores))


def _judge_core(layer: AttentionLayer, core: ObservedCore, maps: Sequence[MapCall], *, is_alone: bool) -> Verdict:
    roles: dict[Role, RoleVerdict] = {}
    for role in INPUT_ROLES:
        if role in layer.slices:
            part = layer.slices[role].by_token
            roles[role] = _judge_part(part, core, maps, role, is_alone=is_alone, order=layer.head_order)
    if "output" in layer.slices:
        roles["output"] = _judge_output(layer, core, maps)
    wrong = [one.sentence for one in roles.values() if one.state == "contradicted"]
    if wrong:
        return Verdict("contradicted", "; ".join(wrong), roles, core)
    if core.mixed:
        return Verdict("undecided", f"its scores or weights are mixed by `{core.mixed}`", roles, core)
    undecided = [one.sentence for role, one in roles.items() if one.state != "established" and role != "output"]
    if undecided:
        return Verdict("undecided", "; ".join(dict.fromkeys(undecided)), roles, core)
    return Verdict("established", "; ".join(one.sentence for one in roles.values()), roles, core)


def _judge_part(
    part: HeadSlice,
    core: ObservedCore,
    maps: Sequence[MapCall],
    role: Role,
    *,
    is_alone: bool = False,
    order: Sequence[int] = (),
) -> RoleVerdict:
    names, calls = PLURAL[role], list(_calls_of(part, maps, core.order))
    observed = _in_order(core.samples.get(role, []), order)
    if not calls:
        return RoleVerdict("undecided", f"the projection of its {names} was not called before attention")
    if not observed:
        return RoleVerdict("undecided", f"its {names} match the tokens of no linear map in any order of dimensions")
    for call in reversed(calls):
        norms = [norm for norm in maps if norm.kind == "norm" and call.order <= norm.order < core.order]
        for arrangement, claimed, through in _candidates(call, part, observed, norms):
            verdict = _compare_ends(role, arrangement.features.cpu(), claimed, through, is_tied=arrangement.is_tied)
            if verdict is not None:
                left = core.queries if role == "query" else core.keys
                length = arrangement.tokens // max(core.axes.sequences, 1) if core.axes is not None else 0
                tokens = length if 0 < length < left else 0
                roles = arrangement.roles if verdict.state == "established" or verdict.order else None
                numbers = tuple(order[number] for number in verdict.order) if order else verdict.order
                return RoleVerdict(verdict.state, verdict.sentence, tokens, roles, numbers)
    found = find_rows(core, [*calls], role)
    if found is not None:
        claim = "; ".join(_ranges(row) for row in part.index()[:2].tolist())
        taken = "; ".join(_ranges(sorted(row)) for row in found.rows[:2].tolist())
        counts = f"attention takes {len(found.rows)} heads of {found.rows.shape[1]} features as {names}"
        if found.rows.shape != part.index().shape:
            return RoleVerdict("contradicted", f"{counts}, but the layer claims {part.heads} of {part.width}")
        if [sorted(row) for row in found.rows.tolist()] != [sorted(row) for row in part.index().tolist()]:
            return RoleVerdict(
                "contradicted",
                f"its {names} are rows {taken}, ... of `{found.map}`, head by head; the layer claims {claim}, ...",
            )
        return RoleVerdict("established", f"its {names} are the claimed rows, {found.how}")
    other = find_rows(core, [one for one in maps if one not in calls], role)
    if other is not None:
        claim = calls[-1].name or part.parameter
        state: State = "contradicted" if is_alone else "undecided"
        return RoleVerdict(state, f"its {names} come from `{other.map}`, but the layer claims `{claim}`")
    return RoleVerdict("undecided", f"its {names} are not the outputs of their projection, rotated or not")


def _in_order(observed: Sequence[Arrangement], order: Sequence[int]) -> Sequence[Arrangement]:
    """Sort heads into the order in which the claim has them."""
    chosen = list(order)
    return [
        replace(one, features=one.features[:, chosen]) if one.features.shape[1] == len(chosen) else one
        for one in observed
    ]


def _candidates(
    call: MapCall, part: HeadSlice, observed: Sequence[Arrangement], norms: Sequence[MapCall]
) -> Iterator[tuple[Arrangement, Tensor, str]]:
    """Return the claimed rows of the map's output, and behind each norm of exactly that before attention."""
    index = part.index() - call.rows
    if int(index.min()) < 0 or int(index.max()) >= call.outputs.shape[1]:
        return
    made = call.outputs.cpu()
    stages: list[tuple[Tensor, str]] = [(made[:, index], "")]
    for norm in norms:
        for before, after in norm.ways:
            if before.tokens != call.tokens:
                continue
            inputs, result = before.features.cpu().flatten(1), after.features.cpu().flatten(1)
            tol = tolerance(inputs, made)
            if inputs.shape == made.shape and _are_equal(inputs, made, tol):
                stages.append((result[:, index], f", through `{norm.name}`"))
            elif inputs.shape[1] == index.numel() and _are_equal(inputs, made[:, index].flatten(1), tol):
                stages.append((result.view(-1, *index.shape), f", through `{norm.name}`"))
    for claimed, through in reversed(stages):
        for arrangement in observed:
            if arrangement.tokens == call.tokens and len(arrangement.features) == len(claimed):
                yield arrangement, claimed, through


def _are_equal(one: Tensor, other: Tensor, tol: float) -> bool:
    return bool((one.double() - other.double()).abs().max() <= tol * other.double().abs().max())


def _compare_ends(role: Role, x: Tensor, claimed: Tensor, through: str, *, is_tied: bool) -> RoleVerdict | None:
    """Compare heads, or the first or last features of heads that have others beside those of this map."""
    beside = x.shape[-1] - claimed.shape[-1]
    if not beside:
        return _compare(role, x, claimed, through, as_they_are=is_tied)
    also = f"{through}, beside {beside} other features of a head"
    parts = (x[..., :-beside], x[..., beside:]) if beside > 0 and not is_tied else ()
    verdicts = (_compare(role, part, claimed, also) for part in parts)
    return next((verdict for verdict in verdicts if verdict is not None and verdict.state == "established"), None)


def _compare(role: Role, x: Tensor, claimed: Tensor, through: str, *, as_they_are: bool = False) -> RoleVerdict | None:
    names, H, G = PLURAL[role], x.shape[1], claimed.shape[1]
    if H % G:
        return None
    heads = torch.arange(H, device=x.device)
    expected = heads // (H // G)
    for match in match_heads(x, claimed, tolerance(x, claimed))[: 1 if as_they_are else None]:
        how = f"{match.how}{through}"
        if bool(match.fits[heads, expected].all()):
            where = "columns" if role == "output" else "rows"
            return RoleVerdict("established", f"its {names} are the claimed {where}, {how}")
        of = match.fits.double().argmax(1)
        if bool(match.fits.any(1).all()) and sorted(set(of.tolist())) == list(range(G)):
            head = int((of != expected).nonzero()[0])
            why = f"head {head} attends with the {names} of claimed head {int(of[head])}, not of head "
            why += f"{int(expected[head])} ({how})"
            if role == "output":
                why = f"the outputs of head {head} are the claimed columns of head {int(of[head])}"
            return RoleVerdict("contradicted", why, order=tuple(of.argsort().tolist()) if H == G else ())
    return None


def _judge_output(layer: AttentionLayer, core: ObservedCore, maps: Sequence[MapCall]) -> RoleVerdict:
    part, observed = layer.slices["output"].by_token, _in_order(core.samples.get("output", []), layer.head_order)
    call = next((one for one in maps if one.order > core.order and one.inputs.numel() and _is_of(part, one)), None)
    if call is None:
        return RoleVerdict("undecided", "its output projection was not called after attention")
    index, inputs = part.index(), call.inputs.cpu()
    for arrangement in observed if int(index.max()) < inputs.shape[1] else ():
        x = arrangement.features.cpu()
        if arrangement.tokens != call.tokens or len(x) != len(inputs):
            continue
        verdict = _compare("output", x, inputs[:, index], "", as_they_are=True) if x[0].shape == index.shape else None
        if verdict is not None:
            return verdict
        rows = find_features(x.flatten(1), inputs, tolerance(x, inputs)).view(x.shape[1:])
        if are_all_found(rows):
            taken, claim = _ranges(rows[0].tolist()), _ranges(index[0].tolist())
            why = f"the outputs of head 0 are columns {taken} of `{call.name}`, but the layer claims {claim}"
            return RoleVerdict("contradicted", why)
    return RoleVerdict("undecided", "the input of its output projection is not the unchanged head outputs")


# --- which calls belong to a claim


def _is_of(part: HeadSlice, call: MapCall) -> bool:
    owner, name = part.owner, part.parameter.rpartition(".")[2]
    parameter = owner._parameters.get(name)
    if parameter is not None and call.keys and call.keys[0] == id(parameter):
        return True
    if id(owner) not in call.keys or call.kind != "linear":
        return False
    # A module that was observed as a whole has no parameter to compare.
    return call.parameter == name if call.parameter else name == "weight"


def _calls_of(part: HeadSlice, maps: Sequence[MapCall], before: int) -> Iterator[MapCall]:
    own = [call for call in maps if call.order < before and _is_of(part, call)]
    # Attention uses the output of the adapter, not that of the base under it.
    wholes = [call for call in own if len(call.keys) == 1]
    yield from wholes or own


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers down shortly: 0 to 7, or 0, 4, 8, ..."""
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
