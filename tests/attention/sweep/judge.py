"""Compare what a layer claims with what attention received, head by head.

A claimed head is right if what its weight gives on an input of the layer determines what attention received for that
head, up to an invertible map that is the same for all samples and a factor per sample: a bias, a norm, a rotation at
one position. And no other claimed head may do so, so that heads that are swapped or cut across each other are caught.
One position of many sequences is compared, for a rotation differs from position to position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from tests.attention.witness import Call, Computation, Witness

SAME = 2e-3  # relative; float32 leaves about 1e-5
OTHER = 2e-2


@dataclass(frozen=True)
class Claim:
    """What a layer says of itself: the weight of each role ``(heads, width, in_features)``, and its counts."""

    module: nn.Module
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    weight: Callable[[str], Tensor]
    output_projection: nn.Module | None
    roles: frozenset[str] = frozenset({"query", "key", "value", "output"})
    bias: Callable[[str], Tensor | None] = lambda _: None
    is_of_one_stream: bool = False  # it says that the tokens of another one, or queries of some tokens, are left out
    has_added_values: bool = False  # it says that an input is added to its values, which is left out
    order: tuple[int, ...] = ()  # number of each claimed head among those of attention; () if it is the same


@dataclass(frozen=True)
class Finding:
    """Whether a claim holds; where it does not, what contradicts it. `None` where it cannot be compared."""

    is_right: bool | None
    reason: str = ""
    heads: int | None = None
    key_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    remarks: tuple[str, ...] = ()


def merged(computations: list[Computation], batch: int) -> list[Computation]:
    """Join computations that were made sequence by sequence: as many of one call, of equal shapes, as sequences."""
    joined: list[Computation] = []
    groups: dict[tuple, list[Computation]] = {}
    for one in computations:
        shapes = tuple(tuple(tensor.shape) for tensor in (one.query, one.key, one.value, one.output))
        groups.setdefault((one.calls, shapes), []).append(one)
    for group in groups.values():
        if len(group) > 1 and len(group) % batch == 0 and group[0].query.shape[0] == 1:
            first = group[0]
            four = (torch.cat([getattr(one, name) for one in group]) for name in ("query", "key", "value", "output"))
            joined.append(Computation(*four, [], first.calls, group[-1].time))
        else:
            joined.extend(group)
    return sorted(joined, key=lambda one: one.time)


def judge(claim: Claim, observed: Witness, computation: Computation, batch: int) -> Finding:
    """Compare a claim with a computation that ran within a call of the claimed module."""
    findings = []
    for heads in read_by_head(computation, batch, claim.num_heads):
        findings.append(_judge(claim, observed, computation, heads, batch))
        if findings[-1].is_right:
            return findings[-1]
    if not findings:
        return Finding(None, f"tensors of shape {tuple(computation.query.shape)} cannot be told apart by sequence")
    # The closest match says most: a wrong key says more than a wrong way to read the dimensions.
    return max(findings, key=lambda finding: (finding.heads == claim.num_heads, finding.is_right is False))


@dataclass(frozen=True)
class _Heads:
    """The four tensors as ``(batch, positions, heads, width)``."""

    pairs: list[tuple[Tensor, Tensor]]
    value: Tensor
    output: Tensor


def read_by_head(one: Computation, batch: int, wanted: int = 0) -> Iterator[_Heads]:
    """Read leading dimensions as sequences, tiles and heads, in every way in which they can be read.

    `wanted`: heads that tiles and heads within one dimension are divided into.
    """
    lead = list(one.output.shape[:-2])
    # Products with what belongs to no sequence (relative positions) are no queries and keys.
    pairs = [(q, k) for q, k in [(one.query, one.key), *one.others] if k.dim() >= 3 and k.numel() % batch == 0]
    own = [(q, k) for q, k in pairs if q.dim() >= 3 and q.numel() % batch == 0]
    # A query that is a learned vector may be the same tensor for all sequences.
    pairs = own + [(whole, k) for q, k in pairs if not _is_one(q, own) and (whole := _expanded(q, lead)) is not None]

    def alike(tensor: Tensor) -> Tensor:  # sequences and heads may be one dimension in scores, and two in values
        is_flat = tensor.shape[:-2] != one.output.shape[:-2] and tensor.shape[:-2].numel() == torch.Size(lead).numel()
        return tensor.reshape(*lead, *tensor.shape[-2:]) if is_flat else tensor

    pairs = [(alike(q), alike(k)) for q, k in pairs]
    at = next((i for i, size in enumerate(lead) if size % batch == 0 and size > 0), None)
    if at is None:
        length, keys = one.output.shape[-2], one.value.shape[-2]
        if not lead or length % batch or keys % batch or length == 0:
            return
        # Sequences end to end in one dimension.
        rest = [size for size in lead if size != 1]
        if len(rest) > 1:
            return

        def packed(tensor: Tensor) -> Tensor:
            return tensor.reshape(-1, batch, tensor.shape[-2] // batch, tensor.shape[-1]).permute(1, 2, 0, 3)

        yield _Heads([(packed(q), packed(k)) for q, k in pairs], packed(one.value), packed(one.output))
        return
    for first, last in _head_dimensions(lead, at, batch):
        split = partial(_split, at=at, first=first, last=last, batch=batch)
        # A product with what belongs to no sequence may have as many elements by chance.
        apart = [both for q, k in pairs if (both := _both(split, q, k)) is not None]
        if pairs and not apart:
            continue
        with suppress(RuntimeError):
            yield _Heads(apart, split(alike(one.value)), split(one.output))
    yield from _heads_in_queries(pairs, one, batch, wanted)
    yield from _groups_beside_queries(pairs, one, batch, wanted)
    tiles = lead[at] // batch // wanted if wanted > 1 else 1
    if tiles > 1 and lead[at] == batch * tiles * wanted:
        for are_last in (False, True):
            untiled = partial(_untiled, at=at, tiles=tiles, batch=batch, are_last=are_last)
            with suppress(RuntimeError):
                yield _Heads(
                    [(untiled(q), untiled(k)) for q, k in pairs], untiled(alike(one.value)), untiled(one.output)
                )


def _heads_in_queries(
    pairs: list[tuple[Tensor, Tensor]], one: Computation, batch: int, wanted: int
) -> Iterator[_Heads]:
    """Read the queries of several heads on one key head, which lie in one dimension with their positions."""
    tensors = [one.output, one.value, *(tensor for pair in pairs for tensor in pair)]
    is_flat = all(tensor.shape[:-2].numel() == batch for tensor in tensors)
    if wanted < 2 or not is_flat or one.output.shape[-2] % wanted:
        return
    for dims in ((wanted, -1), (-1, wanted)):

        def queries(tensor: Tensor, dims: tuple[int, int] = dims) -> Tensor:
            apart = tensor.reshape(batch, *dims, tensor.shape[-1])
            return apart.transpose(1, 2) if dims[0] == wanted else apart

        def keys(tensor: Tensor) -> Tensor:
            return tensor.reshape(batch, -1, 1, tensor.shape[-1]).expand(-1, -1, wanted, -1)

        with suppress(RuntimeError):
            yield _Heads([(queries(q), keys(k)) for q, k in pairs], keys(one.value), queries(one.output))


def _groups_beside_queries(
    pairs: list[tuple[Tensor, Tensor]], one: Computation, batch: int, wanted: int
) -> Iterator[_Heads]:
    """Read heads of which the places in groups lie in one dimension with positions, and the groups in another."""
    tensors = [one.output, one.value, *(tensor for pair in pairs for tensor in pair)]
    groups = wanted // one.tiles if one.tiles > 1 and wanted % one.tiles == 0 else 1
    if groups < 2 or any(tensor.shape[:-2] != (batch, groups) for tensor in tensors):
        return

    def queries(tensor: Tensor) -> Tensor:
        return tensor.unflatten(2, (one.tiles, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def keys(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).repeat_interleave(one.tiles, 2)

    with suppress(RuntimeError):
        yield _Heads([(queries(q), keys(k)) for q, k in pairs], keys(one.value), queries(one.output))


def _untiled(tensor: Tensor, at: int, tiles: int, batch: int, are_last: bool) -> Tensor:
    """``(*, batch * tiles * heads, *, length, width)`` -> ``(batch, * tiles * length, heads, width)``."""
    *lead, length, width = tensor.shape
    sizes = (batch, -1, tiles) if are_last else (batch, tiles, -1)
    apart = tensor.reshape(*lead[:at], *sizes, *lead[at + 1 :], length, width)
    apart = apart.movedim((at, at + 1 if are_last else at + 2), (0, -2))
    return apart.reshape(batch, -1, *apart.shape[-2:])


def _both(split: Callable[[Tensor], Tensor], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
    try:
        return split(query), split(key)
    except RuntimeError:
        return None


def _is_one(query: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> bool:
    return any(query is other for other, _ in pairs)


def _expanded(query: Tensor, lead: list[int]) -> Tensor | None:
    """Give the queries to every sequence, as a product with the keys would."""
    try:
        return query.expand(*lead, *query.shape[-2:])
    except RuntimeError:
        return None


def _head_dimensions(lead: list[int], at: int, batch: int) -> list[tuple[int, int]]:
    """Give candidates for the dimensions that number heads: a range within ``[*before, rest of batch, *after]``."""
    count = len(lead) + 1
    ranges = [(first, last) for first in range(count) for last in range(first + 1, count + 1)]
    split = [*lead[:at], batch, lead[at] // batch, *lead[at + 1 :]]
    within = [r for r in ranges if not r[0] <= at < r[1]]  # never the sequences themselves
    sized = [r for r in within if torch.Size(split[r[0] : r[1]]).numel() > 1]
    # First the last dimension alone, as it nearly always is; fewer dimensions before more; one head last.
    single = [r for r in within if r not in sized and r[1] - r[0] == 1]
    return sorted(sized, key=lambda r: (r[1] - r[0], -r[1])) + single or [(at + 1, at + 2)]


def _split(tensor: Tensor, at: int, first: int, last: int, batch: int) -> Tensor:
    """``(*lead, length, width)`` -> ``(batch, tiles * length, heads, width)``"""
    *lead, length, width = tensor.shape
    shape = [*lead[:at], batch, lead[at] // batch, *lead[at + 1 :]]
    heads = list(range(first, last))
    tiles = [i for i in range(len(shape)) if i != at and i not in heads]
    n = len(shape)
    tensor = tensor.reshape(*shape, length, width).permute(at, *tiles, n, *heads, n + 1)
    return tensor.reshape(batch, -1, torch.Size([shape[i] for i in heads]).numel(), width)


def _judge(claim: Claim, observed: Witness, computation: Computation, heads: _Heads, batch: int) -> Finding:
    if not heads.pairs:
        return Finding(None, "no product of queries and keys has a part for each sequence")
    H = heads.output.shape[2]
    if len(claim.order) == H:
        at = list(claim.order)
        pairs = [(_in_order(query, at), _in_order(key, at)) for query, key in heads.pairs]
        heads = replace(heads, pairs=pairs, value=_in_order(heads.value, at))
    facts = {
        "heads": H,
        "key_heads": _distinct_heads(heads.pairs[0][1]),
        "key_width": heads.pairs[0][1].shape[-1],
        "value_width": heads.value.shape[-1],
    }
    if claim.num_heads != H:
        return Finding(False, f"it claims {claim.num_heads} heads, attention has {H}", **facts)
    if (G := facts["key_heads"]) != claim.num_key_heads:
        return Finding(False, f"it claims {claim.num_key_heads} key heads, attention has {G}", **facts)
    call = next((call for call in reversed(computation.calls) if call.module is claim.module), None)
    calls = (
        observed.calls
        if call is None
        else [one for one in observed.calls if call.start <= one.start <= (call.end or 1e18)]
    )
    inputs = [tensor for one in calls if one.start < computation.time for tensor in one.inputs]
    remarks: list[str] = []
    roles: list[tuple[str, list[Tensor]]] = [
        ("key", [key for _, key in heads.pairs]),
        ("query", [query for query, _ in heads.pairs]),
        ("value", [heads.value]),
    ]
    for role, actual in roles:
        if role not in claim.roles:
            verdict = _left_out(role, actual[0], inputs, batch)
            if not verdict.is_right:
                return Finding(verdict.is_right, verdict.reason, **facts)
            remarks += verdict.remarks
            continue
        try:
            weight = claim.weight(role).detach().double()
        except Exception as error:
            return Finding(False, f"its {role} weight cannot be read: {error}", **facts)
        if role == "value" and claim.has_added_values:
            actual = [*actual, *_without_an_input(actual[0], inputs, batch, len(weight))]
        may_be_some = role != "query" or claim.is_of_one_stream
        verdicts = [_compare(weight, one, inputs, role, claim.bias(role), may_be_some) for one in actual]
        best = next((verdict for verdict in verdicts if verdict.is_right), verdicts[0])
        if not best.is_right:
            return Finding(best.is_right, best.reason, **facts)
        remarks += best.remarks
    verdict = _compare_output(claim, observed, computation, heads.output, batch)
    if not verdict.is_right:
        return Finding(verdict.is_right, verdict.reason, **facts)
    return Finding(True, remarks=tuple(remarks) + verdict.remarks, **facts)


def _without_an_input(actual: Tensor, inputs: list[Tensor], batch: int, count: int) -> Iterator[Tensor]:
    """Take each input from values that it may have been added to, head by head."""
    for x in inputs:
        for tokens in _tokens(x, batch, count * actual.shape[-1]):
            if tokens.shape[1] == actual.shape[1]:
                added = tokens.unflatten(-1, (count, -1)).repeat_interleave(actual.shape[2] // count, 2)
                yield actual - added


def _in_order(tensor: Tensor, at: list[int]) -> Tensor:
    """Number heads as they are claimed: those that share a key head side by side."""
    return tensor[:, :, at] if tensor.shape[2] == len(at) else tensor


def _left_out(role: str, actual: Tensor, inputs: list[Tensor], batch: int) -> Finding:
    """Tell whether it is true that a role has no weight: what is received is no map of a token of the input."""
    if role == "key":
        return Finding(False, "it claims no key weight")
    actual = actual.double()
    constant = float((actual - actual.mean(0)).abs().max()) < 1e-5 * float(actual.abs().max())
    if constant:
        return Finding(True, remarks=(f"the {role} is a learned vector",))
    is_tried = False
    positions = actual.shape[1]
    for x in inputs:
        for tokens in _tokens(x, batch, x.shape[-1]):
            if tokens.shape[-1] + 8 > batch:
                continue
            is_tried = True
            for position in _spread(positions):
                near = _nearest_first(tokens.shape[1], position, positions)[:40]
                for at in _likeliest(actual[:, position, 0], tokens, near)[:12]:
                    of_token = tokens[:, at, None].double()
                    if float(determined(actual[:, position, :1], of_token)) > SAME:
                        continue
                    if _is_itself(actual[:, position], of_token[:, 0]):
                        return Finding(True, remarks=(f"the {role} is an input, and no map of one",))
                    if float(determined(actual[:, position], of_token).max()) < SAME:
                        if _is_another_map(actual, tokens, position, at):
                            return Finding(
                                True, remarks=(f"no {role} weight: it is turned, at each position in its way",)
                            )
                        return Finding(False, f"its {role} is a map of its input, and no {role} weight is claimed")
    if not is_tried:
        return Finding(None, f"it claims no {role} weight; inputs are too wide to tell whether there is one")
    return Finding(True, remarks=(f"no {role} weight: it is no map of one token",))


def _is_another_map(actual: Tensor, tokens: Tensor, position: int, at: int) -> bool:
    """Tell whether no one map gives what is received at a position and at its neighbour, though one gives each."""
    step = 1 if max(position, at) + 1 < min(actual.shape[1], tokens.shape[1]) else -1
    if min(position, at) + step < 0:
        return False
    both = [(actual[:, position + i, :1], tokens[:, at + i, None].double()) for i in (0, step)]
    received, given = (torch.cat(one) for one in zip(*both))
    return float(determined(*both[1])) < SAME and float(determined(received, given)) > OTHER


def _is_itself(actual: Tensor, token: Tensor) -> bool:
    """Tell whether what heads receive are the features of a token side by side, but for one factor."""
    if actual[0].numel() != token.shape[1]:
        return False
    token = token.reshape(actual.shape)
    factor = (actual * token).sum() / token.square().sum().clamp_min(1e-300)
    return float((actual - factor * token).abs().max()) < 1e-4 * float(actual.abs().max())


def _distinct_heads(keys: Tensor) -> int:
    """Count the key heads before they were repeated."""
    columns = keys.transpose(1, 2).reshape(keys.shape[0], keys.shape[2], -1)
    return 1 + sum(not torch.equal(columns[:, i], columns[:, i - 1]) for i in range(1, columns.shape[1]))


def _tokens(x: Tensor, batch: int, features: int) -> Iterator[Tensor]:
    """Read an input as ``(batch, tokens, features)``."""
    if not x.is_floating_point():
        return
    if x.shape[-1] == features and x.dim() >= 2 and (x.numel() // features) % batch == 0:
        if x.dim() == 3 and x.shape[0] % batch and x.shape[1] == batch:
            x = x.transpose(0, 1)
        yield x.reshape(batch, -1, features)
        for dim in range(1, x.dim() - 1) if x.dim() > 3 and x.shape[0] % batch else ():  # rows and columns before
            if x.shape[dim] == batch:
                yield x.movedim(dim, 0).reshape(batch, -1, features)
    if x.dim() in (3, 4, 5) and x.shape[1] == features and x.shape[0] % batch == 0:  # pixels, perhaps in windows
        yield x.flatten(2).mT.reshape(batch, -1, features)


def _compare(
    weight: Tensor,
    actual: Tensor,
    inputs: list[Tensor],
    role: str,
    bias: Tensor | None = None,
    may_be_some: bool = True,
) -> Finding:
    """Compare the heads that a weight gives on any of the inputs with those that attention received.

    `may_be_some`: those of the first or the last positions alone may be theirs.
    """
    batch, positions, count, width = actual.shape
    G, claimed_width, features = weight.shape
    if count % G:
        return Finding(False, f"it claims {G} {role} heads, attention has {count}")
    if claimed_width > width:
        return Finding(False, f"it claims {role} heads of width {claimed_width}, attention has {width}")
    candidates: list[Tensor] = []
    for x in inputs:
        for tokens in _tokens(x, batch, features):
            is_known = any(tokens.shape == one.shape and torch.equal(tokens, one) for one in candidates)
            if not is_known and bool(tokens.isfinite().all()):
                candidates.append(tokens)
    if not candidates:
        return Finding(None, f"no input of the layer has the {features} features that its {role} weight takes")
    remarks: tuple[str, ...] = ()
    checked, failed, closest = 0, 0, float("inf")
    if not bool(actual.isfinite().all()):
        return Finding(None, f"the {role} is not finite")
    # In double precision only what is looked at: with many positions the whole is large.
    spread = torch.stack([actual[:, i].double().std(0).amax(-1) for i in range(positions)])  # (positions, count)
    # What is the same in all sequences is a token that is added, or padding.
    varying = [
        i for i in range(positions) if float(spread[i].max()) > 1e-6 and float(spread[i, 0] / spread[i].max()) > 1e-6
    ]
    for position in [varying[i] for i in _spread(len(varying))]:
        vectors = actual[:, position].double()  # (batch, count, width)
        checked += 1
        is_found = False
        parts, remark = _parts(vectors, claimed_width, role)
        for tokens, part in itertools.product(candidates, parts):
            near = _nearest_first(tokens.shape[1], position, positions)
            for at in _likeliest(part[:, 0], torch.einsum("bti,ki->btk", tokens.double(), weight[0]), near)[:25]:
                claimed = torch.einsum("bi,hki->bhk", tokens[:, at].double(), weight)
                first = determined(part[:, :1], claimed[:, :1])
                closest = min(closest, float(first))
                if float(first) > SAME:
                    continue
                own = torch.arange(count) // (count // G)
                # Where no head needs factors, no other may do without them either.
                fit = determined(part, claimed, with_factors=False)  # (count, G)
                if float(fit[torch.arange(count), own].max()) > SAME:
                    fit = determined(part, claimed)
                mine = fit[torch.arange(count), own]
                closest = min(closest, float(mine.max()))
                if float(mine.max()) > SAME:
                    continue
                fit[torch.arange(count), own] = float("inf")
                if G > 1 and float(fit.min()) < OTHER:
                    # Heads as wide as their input span the same: what they receive has to be the same then.
                    same = _the_same(part, claimed)
                    mine = same[torch.arange(count), own]
                    same[torch.arange(count), own] = float("inf")
                    if float(mine.max()) > SAME or float(same.min()) < OTHER:
                        return Finding(None, f"its {role} heads cannot be told apart by these samples")
                is_found, remarks = True, remark
                break
            if is_found:
                break
        if not is_found and _of_several_tokens(vectors, weight, candidates, position, positions):
            is_found, remarks = True, (f"{role}: of several tokens",)
        if not is_found and _of_sums_over_tokens(vectors, weight, candidates):
            is_found, remarks = True, (f"{role}: sums over tokens",)
        failed += not is_found
    if not checked:
        reported = f"the {role} is the same in all sequences"
        is_it = role == "query" and _is_one_vector(weight, bias, actual, candidates)
        return Finding(True, remarks=(reported,)) if is_it else Finding(None, reported)
    lengths = sorted({tokens.shape[1] for tokens in candidates if tokens.shape[1] < positions}, reverse=True)
    for length in lengths if failed and may_be_some else ():
        # Keys and values of a cache come from another layer, before or after this one's own; so does a second stream.
        for own in (actual[:, -length:], actual[:, :length]):
            verdict = _compare(weight, own, [tokens for tokens in candidates if tokens.shape[1] == length], role)
            if verdict.is_right:
                return Finding(
                    True, remarks=(*verdict.remarks, f"{role} of {length} positions, the rest from elsewhere")
                )
    if failed and role == "query" and _selected(weight, actual, candidates):
        return Finding(True, remarks=("queries are picked by each sequence",))
    if failed:
        return Finding(
            False, f"what attention receives as {role} is not what the claimed {role} heads give (off by {closest:.1g})"
        )
    return Finding(True, remarks=remarks)


def _is_one_vector(weight: Tensor, bias: Tensor | None, actual: Tensor, candidates: list[Tensor]) -> bool:
    """Tell whether a vector that is the same in all sequences is what weight and bias give, up to a factor per head."""
    heads = actual[0, 0].double()  # (heads, width)
    for tokens in candidates:
        claimed = torch.einsum("ti,hki->thk", tokens[0].double(), weight)
        if claimed.shape[1:] == heads.shape:
            claimed = claimed if bias is None else claimed + bias.double()
            cosines = torch.nn.functional.cosine_similarity(claimed, heads[None], dim=-1)  # (tokens, heads)
            if float(cosines.amin(1).max()) > 1 - SAME:
                return True
            # A gain for each feature that all heads share, and a factor for each head.
            gains = heads / claimed
            gains = gains / gains[..., :1]
            if len(heads) > 1 and float((gains / gains[:, :1] - 1).abs().amax((1, 2)).min()) < SAME:
                return True
    return False


def _of_several_tokens(
    vectors: Tensor, weight: Tensor, candidates: list[Tensor], position: int, positions: int
) -> bool:
    """Tell whether each head is determined by what its own weight gives at tokens side by side, and by no other's.

    A short filter over time, for each feature, comes between such a projection and attention.
    """
    count, G = vectors.shape[1], weight.shape[0]
    own = torch.arange(count) // (count // G)
    for tokens in candidates:
        at = position + tokens.shape[1] - positions
        for first, last in ((at - 1, at), (at - 2, at), (at - 3, at), (at - 1, at + 1)):
            window = tokens[:, max(first, 0) : last + 1].double() if 0 <= last < tokens.shape[1] else tokens[:, :0]
            if window.shape[1] < 2 or window.shape[1] * weight.shape[1] + 8 > window.shape[0]:
                continue
            fit = determined(vectors, torch.einsum("bti,hki->bhtk", window, weight).flatten(2))
            mine = fit[torch.arange(count), own]
            fit[torch.arange(count), own] = float("inf")
            if float(mine.max()) < SAME and float(fit.min()) > OTHER:
                return True
    return False


def _of_sums_over_tokens(vectors: Tensor, weight: Tensor, candidates: list[Tensor]) -> bool:
    """Tell whether each head is, but for a bias, a sum over tokens of what its own weight gives, and of no other's.

    A matrix over tokens comes between: its numbers are the same for all features of a head, and all sequences.
    """
    batch, count, width = vectors.shape
    G, claimed_width, _ = weight.shape
    own = torch.arange(count) // (count // G)
    centred = (vectors - vectors.mean(0)).transpose(0, 1).reshape(count, -1, 1)  # (count, batch x width, 1)
    for tokens in candidates:
        length = tokens.shape[1]
        if claimed_width != width or length < 2 or 2 * length > batch * width:
            continue
        claimed = torch.einsum("bti,hki->hbkt", tokens.double(), weight)
        claimed = (claimed - claimed.mean(1, keepdim=True)).reshape(G, -1, length)
        basis = torch.linalg.qr(claimed)[0][None]  # (1, G, batch x width, length)
        rest = centred[:, None] - basis @ (basis.mT @ centred[:, None])
        fit = rest.flatten(2).norm(dim=2) / centred.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None]  # (count, G)
        mine = fit[torch.arange(count), own]
        fit[torch.arange(count), own] = float("inf")
        if float(mine.max()) < SAME and float(fit.min()) > OTHER:
            return True
    return False


def _selected(weight: Tensor, actual: Tensor, candidates: list[Tensor]) -> bool:
    """Tell whether each vector is one token's, whichever it is, up to a bias and a scale."""
    for tokens in candidates:
        claimed = torch.einsum("bti,hki->bthk", tokens.double(), weight)
        if claimed.shape[2] != actual.shape[2]:
            continue
        for scale in (1.0, weight.shape[1] ** -0.5):
            # (batch, heads, tokens, width): the bias, if that token were the one
            apart = actual[:, 0, :, None] - scale * claimed.transpose(1, 2)
            # How far the nearest token of the worst sequence is, for each token that the first one may have picked.
            off = torch.stack(
                [(apart - apart[:1, :, t, None]).abs().amax(-1).amin(-1).amax(0) for t in range(tokens.shape[1])]
            )
            if float(off.amin(0).max()) < 1e-4 * float(actual.abs().max()):
                return True
    return False


def _spread(positions: int, count: int = 3) -> list[int]:
    return sorted({0, positions // 2, positions - 1}) if positions >= count else list(range(positions))


def _nearest_first(tokens: int, position: int, positions: int) -> list[int]:
    order = sorted(range(tokens), key=lambda at: (at != position, at - position != tokens - positions, at))
    return order[:400]


def _likeliest(actual: Tensor, claimed: Tensor, places: list[int]) -> list[int]:
    """Sort tokens by how well what is claimed at them, ``(samples, tokens, width)``, explains what is received.

    Linearly, without a factor for each sample: where there are such factors, the right token is among the first.
    """
    n = len(actual)
    at_places = claimed[:, places].double().transpose(0, 1)  # (places, samples, width)
    scales = at_places.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None]
    basis, _ = torch.linalg.qr(torch.cat([at_places / scales, at_places.new_full((len(places), n, 1), n**-0.5)], -1))
    explained = (basis.mT @ actual.double()).square().sum((1, 2))
    return [places[i] for i in explained.argsort(descending=True).tolist()]


def _parts(vectors: Tensor, width: int, role: str) -> tuple[list[Tensor], tuple[str, ...]]:
    """Take what a head receives for itself out of what is padded, or shared by all heads."""
    if vectors.shape[-1] == width:
        return [vectors], ()
    varies = vectors.std(0).amax(0) > 1e-9
    if int(varies.sum()) == width:
        return [vectors[..., varies]], (f"{role} padded",)
    parts = [(vectors[..., :width], vectors[..., width:]), (vectors[..., -width:], vectors[..., :-width])]
    if role == "key":  # the rotary part of latent attention is one for all heads
        parts = [(own, rest) for own, rest in parts if torch.equal(rest, rest[:, :1].expand_as(rest))]
    return [own for own, _ in parts], (f"{role}: {width} of {vectors.shape[-1]} features, the rest apart",)


def determined(actual: Tensor, claimed: Tensor, *, with_factors: bool = True) -> Tensor:
    """Measure how far each received head is from being determined by each claimed one.

    For received ``k_t`` and claimed ``u_t``, the smallest relative residual of ``s_t k_t = A u_t + b`` over matrices A,
    vectors b and, where that is necessary, factors ``s_t``. Without factors it is a regression. With them, the rows of
    ``diag(s) K`` have to lie in the column space of ``[U, 1]``: with P the projector on its complement, the residual is
    ``s^T (P o K K^T) s``, smallest at an eigenvector.

    Args:
        actual: ``(samples, heads, width)``.
        claimed: ``(samples, claimed heads, claimed width)``.
        with_factors: whether there may be factors.

    Returns:
        ``(heads, claimed heads)``; 0 is determined, 1 is unrelated.
    """
    n, h, w = actual.shape
    G = claimed.shape[1]
    ones = claimed.new_ones(n, 1)
    residuals = actual.new_full((h, G), float("inf"))
    centred = actual - actual.mean(0)
    total = centred.square().sum((0, 2)).clamp_min(1e-300)
    units = actual / actual.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    gram = torch.einsum("shw,thw->hst", units, units) if with_factors else units
    for g in range(G):
        regressors = torch.cat([claimed[:, g] / claimed[:, g].norm().clamp_min(1e-300), ones / n**0.5], 1)
        basis, singular, _ = torch.linalg.svd(regressors, full_matrices=False)
        basis = basis[:, singular > 1e-9 * singular[0]]
        free = n - basis.shape[1]
        if free < 6:
            continue
        complement = torch.eye(n, dtype=actual.dtype) - basis @ basis.T
        rest = torch.einsum("st,thw->shw", complement, centred)
        residuals[:, g] = (rest.square().sum((0, 2)) / total).sqrt()
        if with_factors and w * free > 1.5 * n:
            smallest = torch.linalg.eigvalsh(complement * gram)[:, 0].clamp_min(0).sqrt()
            residuals[:, g] = torch.minimum(residuals[:, g], smallest)
    return residuals


def _the_same(actual: Tensor, claimed: Tensor) -> Tensor:
    """Measure how far each received head is from being each claimed one, but for a bias and a factor.

    As `determined`, with a multiple of the identity for the matrix.
    """
    k, u = actual - actual.mean(0), claimed - claimed.mean(0)
    if k.shape[-1] != u.shape[-1]:
        return actual.new_full((k.shape[1], u.shape[1]), float("inf"))
    factor = torch.einsum("thw,tgw->hg", k, u) / u.square().sum((0, 2)).clamp_min(1e-300)
    rest = k[:, :, None] - factor[..., None] * u[:, None]
    return (rest.square().sum((0, 3)) / k.square().sum((0, 2)).clamp_min(1e-300)[:, None]).sqrt()


def _compare_output(claim: Claim, observed: Witness, computation: Computation, output: Tensor, batch: int) -> Finding:
    """Compare what the output projection takes, and the claimed weight with what it gives."""
    if "output" not in claim.roles:
        return Finding(True, remarks=("no output weight",))
    try:
        weight = claim.weight("output").detach().float()
        weight = weight[torch.tensor(claim.order).argsort()] if len(claim.order) == len(weight) else weight
    except Exception as error:
        return Finding(False, f"its output weight cannot be read: {error}")
    width, features = weight.shape[1:]
    if width != output.shape[-1]:
        return Finding(False, f"it claims heads with outputs of width {width}, attention has {output.shape[-1]}")
    if claim.output_projection is None:
        gives = [call for call in observed.calls if call.module is claim.module and (call.end or 0) > computation.time]
        heads = output
    else:
        gives = [
            call for call in observed.calls if call.module is claim.output_projection and call.start > computation.time
        ]
        if not gives:
            is_within = any(part is claim.output_projection for part in claim.module.modules())
            if not is_within:
                return Finding(True, remarks=("output not compared",))
            # Its weight may be used without it: then what the whole module gives is compared.
            whole = _compare_output(replace(claim, output_projection=None), observed, computation, output, batch)
            if whole.is_right and whole.remarks in ((), (_SCATTERED,)):
                return whole
            return Finding(None, "its output projection is not called")
        taken = ((call, *_input_to(call, output, batch)) for call in gives)
        call, heads, remark = next((one for one in taken if one[1] is not None), (gives[0], None, ""))
        if heads is None:
            return Finding(False, "its output projection does not take the heads' outputs side by side")
        gives = [call]
    summed = torch.einsum("bthv,hvd->btd", heads, weight)
    offs = []
    for call in gives[:1]:
        for output_of_call in call.outputs:
            for tokens in _tokens(output_of_call, batch, features):  # a square one may be read in two ways
                if summed.shape == tokens.shape:
                    rest = tokens - summed
                    offs.append(float((rest - rest.mean((0, 1))).norm() / (tokens - rest.mean((0, 1))).norm()))
    if not offs:
        return Finding(True, remarks=("output not compared",))
    if min(offs) < SAME:
        return Finding(True, remarks=() if claim.output_projection is None or not remark else (remark,))
    if claim.output_projection is None:
        if _ends_with_a_norm(claim.module):
            return Finding(True, remarks=("output not compared",))
        for output_of_call in (
            tokens for call in gives[:1] for one in call.outputs for tokens in _tokens(one, batch, features)
        ):
            # But for a bias, what windows give is found at other tokens.
            apart = [(one - one.mean((0, 1)))[:, :, None] for one in (output_of_call, summed)]
            if output_of_call.shape == summed.shape and _is_scattered(*apart):
                return Finding(True, remarks=(_SCATTERED,))
        if _is_output_of_a_part(observed, computation, weight, output, batch):
            return Finding(True)
        if _is_taken_beside_others(observed, computation, weight, output, batch):
            return Finding(True, remarks=("the output projection takes more than the heads",))
    return Finding(False, f"its output weight does not give what the layer gives (off by {min(offs):.1g})")


def _is_output_of_a_part(
    observed: Witness, computation: Computation, weight: Tensor, output: Tensor, batch: int
) -> bool:
    """Tell whether some map takes the heads' outputs side by side, holds the claimed weight, and gives what that does.

    Such a map may be of a class of its own, and lie beside the module that computes attention.
    """
    heads, width, features = weight.shape
    matrix = weight.flatten(0, 1)
    for call in observed.calls:
        held = getattr(call.module, "weight", None)
        if call.start < computation.time or not isinstance(held, Tensor) or held.shape != (features, heads * width):
            continue
        if not torch.equal(held.detach().float(), matrix.mT):
            continue
        taken = [one for x in call.inputs for one in _tokens(x, batch, heads * width)]
        output_of_call = [one for x in call.outputs for one in _tokens(x, batch, features)]
        for x, y in itertools.product(taken, output_of_call):
            if x.shape[:2] != output.shape[:2] or y.shape[:2] != x.shape[:2]:
                continue
            off = float((x - output.flatten(2)).abs().max())
            rest = y - x @ matrix
            apart = float((rest - rest.mean((0, 1))).norm() / (y - y.mean((0, 1))).norm())
            if off < 1e-4 * float(output.abs().max()) and apart < SAME:
                return True
    return False


def _is_taken_beside_others(
    observed: Witness, computation: Computation, weight: Tensor, output: Tensor, batch: int
) -> bool:
    """Tell whether a map takes the heads' outputs where its columns are the claimed weight, and more beside."""
    heads, width, features = weight.shape
    claimed = weight.flatten(0, 1)
    for call in observed.calls:
        matrix = getattr(call.module, "weight", None)
        if call.start < computation.time or not isinstance(matrix, Tensor) or matrix.dim() != 2:
            continue
        if matrix.shape[0] != features or matrix.shape[1] <= len(claimed):
            continue
        is_column = (claimed[:, None] == matrix.detach().float().mT[None]).all(-1)
        if not bool((is_column.sum(1) == 1).all()):
            continue
        at = is_column.int().argmax(1)
        for x in call.inputs:
            for tokens in _tokens(x, batch, matrix.shape[1]):
                taken = tokens[..., at].unflatten(-1, (heads, width))
                if taken.shape == output.shape and float((taken - output).abs().max()) < 1e-4 * float(
                    output.abs().max()
                ):
                    return True
    return False


def _ends_with_a_norm(module: nn.Module) -> bool:
    """Tell a module that adds its input and norms the sum before it returns, as XLNet's does."""
    last = [kind for kind in map(type, module.children()) if not issubclass(kind, (nn.Dropout, nn.Identity))][-1:]
    return any("norm" in kind.__name__.lower() for kind in last)


def _input_to(call: Call, output: Tensor, batch: int) -> tuple[Tensor | None, str]:
    """Compare the input of the output projection with the heads' outputs side by side."""
    _, positions, H, width = output.shape
    for x in call.inputs:
        for tokens in _tokens(x, batch, H * width):
            heads = tokens.unflatten(-1, (H, width))
            if tokens.shape[1] != positions:
                if _is_scattered(heads, output):
                    return heads, _SCATTERED
                continue
            if float((heads - output).abs().max()) < 1e-4 * float(output.abs().max()):
                return heads, ""
            for position in _spread(positions):
                fit = determined(heads[:, position].double(), output[:, position].double())
                if float(fit.diagonal().max()) > SAME:
                    break
            else:
                return heads, "heads are scaled before the output projection"
            if bool((heads * output > -1e-9).all()):
                return heads, "heads are gated before the output projection"
            if _is_scattered(heads, output):
                return heads, _SCATTERED
    return None, ""


_SCATTERED = "outputs are at other positions in the output projection"


def _is_scattered(tokens: Tensor, output: Tensor) -> bool:
    """Tell whether all that a head gives is found in its place at some token, or all that is there comes from it.

    Of many sequences, tokens and positions a few are looked for.
    """
    tokens, output = tokens[:8].transpose(1, 2).double(), output[:8].transpose(1, 2).double()
    near = 1e-4 * float(output.abs().max())  # (batch, heads, tokens, positions)

    def are_all_there(those: Tensor, among: Tensor) -> bool:
        few = those[:, :, :: max(1, those.shape[2] // 48)]
        return bool((torch.cdist(few, among).amin(-1) < near).all())

    return are_all_there(tokens, output) or are_all_there(output, tokens)


def is_over_features(computation: Computation, observed: Witness, batch: int) -> bool:
    """Tell whether the softmax runs over features instead of tokens, as in cross-covariance attention.

    Each value that is mixed is looked up, by its numbers in all sequences, in what a part of the module gave. In
    attention a row of the values is one token. Here a column is, and its rows are of many tokens. What is given as
    tokens, heads and features may be read as an image with tokens for channels: a reading of tokens outweighs that.
    """
    value = computation.value
    if value.shape[0] % batch or not computation.calls or min(value.shape[-2:]) < 2:
        return False
    # One tile and head is enough: (batch, keys, features)
    value = value.reshape(batch, -1, *value.shape[-2:])[:, 0]
    rows, columns = (_spread(size, 2) if size > 2 else list(range(size)) for size in value.shape[-2:])
    module = computation.calls[-1]
    is_so = False
    for call in observed.calls:
        if not (module.start <= call.start and call.end is not None and call.end < computation.time):
            continue
        for output_of_call in (output for output in call.outputs if output.dim() > 1):
            for features in {
                output_of_call.shape[-1],
                output_of_call.shape[1] if output_of_call.dim() == 4 else output_of_call.shape[-1],
            }:
                for tokens in _tokens(output_of_call, batch, features):
                    row = [_token_of(value[:, rows[0], j], tokens) for j in columns]
                    if None in row:
                        continue
                    column = [_token_of(value[:, i, columns[0]], tokens) for i in rows]
                    if None in column:
                        continue
                    if len(set(row)) == 1 and len(set(column)) == len(column):
                        return False
                    is_so |= len(set(column)) == 1 and len(set(row)) == len(row)
    return is_so


def _token_of(numbers: Tensor, tokens: Tensor) -> int | None:
    """Find the only token that has a feature with these numbers in all sequences."""
    first = (tokens[0] == numbers[0]).nonzero().tolist()  # most are none already in the first sequence
    found = {token for token, feature in first if torch.equal(tokens[:, token, feature], numbers)}
    return found.pop() if len(found) == 1 else None


def claim_of(layer) -> Claim:
    """What a layer found by the package says of itself."""
    return Claim(
        layer.module,
        layer.num_heads,
        layer.num_key_heads,
        layer.head_dim,
        layer.value_dim,
        layer.weight,
        layer.output_projection,
        frozenset(layer.slices),
        lambda role: getattr(layer.slices[role], "bias", lambda: None)(),
        "second token stream" in layer.left_out
        or "queries of other tokens" in layer.left_out
        or "one of two token streams" in layer.kind,
        "the input that is added to the values" in layer.left_out,
        layer.head_order,
    )


def heads_of(computation: Computation, batch: int, length: int) -> int | None:
    """Count the heads of a computation; `None` where its dimensions cannot be read.

    A dimension of `length` numbers tokens: attention within a token, over layers or streams, has no heads.
    """
    counts = [int(heads.output.shape[2]) for heads in read_by_head(computation, batch)]
    counts = [count for count in counts if count % length]
    if counts[:1] == [1] and computation.tiles > 1:  # the queries of several heads, on one key head
        return computation.tiles
    return counts[0] if counts else None if not list(read_by_head(computation, batch)) else 1
