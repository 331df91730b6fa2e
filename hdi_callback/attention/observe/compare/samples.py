"""A few tokens of the inputs and outputs of linear maps, and of the inputs of attention, at the same places.

When a linear map runs, it is unknown which dimensions are sequences, tokens or heads; only its number of tokens N is
known. So a sample is taken at fixed places among N. The inputs of attention are sampled at the same places, in every
order of their dimensions that has N tokens. Features are then compared, and equality shows the right order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.attention.observe.scores.axes import Axes, DimensionRoles, dims_of, unravel

TOKENS = 14
"""Tokens of a sample, fewer if there are fewer."""
MAX_FEATURES = 2**16
"""A map that gives more features, as one to a vocabulary does, is left out."""


def places(tokens: int, device: torch.device) -> Tensor:
    """Choose the tokens of a sample: the first three, at the first positions, and others far apart.

    Args:
        tokens: how many there are.
        device: where the result is needed; nothing is copied from the host.

    Returns:
        ``(min(TOKENS, tokens),)``, whole numbers.
    """
    if tokens <= TOKENS:
        return torch.arange(tokens, device=device)
    far = TOKENS - 3
    return torch.cat([torch.arange(3, device=device), torch.arange(1, far + 1, device=device) * (tokens - 1) // far])


@dataclass(frozen=True, eq=False)
class MapCall:
    """One call of a linear map, or of a norm.

    Attributes:
        order: of the calls of a forward.
        keys: what it may be known by: the id of its parameter, of its module.
        name: dotted path of the module or parameter.
        kind: ``"linear"`` or ``"norm"``.
        tokens: how many tokens its input has.
        inputs: ``(P, in features)``, a sample of its input; empty if that does not fit.
        outputs: ``(P, out features)``, a sample of its output.
        source: where its input is stored, the same for maps of the same input.
        rows: first row of the parameter, where a part of one was multiplied with.
        owner: dotted path of the module in whose forward it ran.
        is_transposed: the parameter is stored ``(in_features, out_features)``.
        parameter: name of the parameter within the innermost module that ran, where it is one of its own.
        ways: of a norm: its input and its output, in every order of the dimensions.
    """

    order: int
    keys: tuple[int, ...]
    name: str
    kind: str
    tokens: int
    inputs: Tensor
    outputs: Tensor
    source: int
    rows: int = 0
    owner: str = ""
    is_transposed: bool = False
    parameter: str = ""
    ways: tuple[tuple[Arrangement, Arrangement], ...] = ()


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A sample of a tensor in one order of its dimensions.

    Attributes:
        features: ``(P, heads, width)``.
        tokens: N, how many tokens the tensor has in this order.
        start: token of each sequence that the first of the N tokens is, where there are more than N.
        is_tied: of the rows of an alignment; such features are equal to those of a map as they are, or not at all.
        roles: which dimensions of the tensor number sequences in this order; None where rows are tied.
    """

    features: Tensor
    tokens: int
    start: int = 0
    is_tied: bool = False
    roles: DimensionRoles | None = None


def sample_of_map(tensor: Tensor, features_dim: int = -1) -> Tensor:
    """Sample the input or the output of a map.

    Args:
        tensor: with its features in one dimension.
        features_dim: that dimension, negative.

    Returns:
        ``(P, features)``, detached and copied.
    """
    last = tensor.detach().movedim(features_dim, -1)
    sizes = last.shape[:-1]
    return last[unravel(places(math.prod(sizes), last.device), sizes)] if sizes else last[None].clone()


def arrangements(tensor: Tensor, tokens: Sequence[int]) -> Iterator[Arrangement]:
    """Sample a tensor of heads, in every order in which it has as many tokens as the input of a map.

    Args:
        tensor: ``(*lead, length, width)``, the input of attention in one role.
        tokens: how many tokens the inputs of maps have, the latest first.

    Yields:
        Samples; none if no order fits.
    """
    tensor = tensor.detach()
    *lead, length, _ = tensor.shape
    for count in dict.fromkeys(tokens):
        if not count:
            continue
        found = False
        if count % length == 0:
            for arrangement in _at_length(tensor, lead, count, count // length, 0, length):
                found = True
                yield arrangement
        if not found:  # a part of the tokens: another stream, a prefix, a cache
            for sequences in sorted({math.prod(lead[:size]) for size in range(len(lead) + 1)}):
                part = count // sequences if count % sequences == 0 else 0
                for start in sorted({0, length - part}) if 0 < part < length else ():
                    yield from itertools.islice(_at_length(tensor, lead, count, sequences, start, part), 1)


def _at_length(
    tensor: Tensor, lead: Sequence[int], count: int, sequences: int, start: int, length: int, *, dims: int = 0
) -> Iterator[Arrangement]:
    if len(lead) == 1 and lead[0] != sequences and lead[0] % sequences == 0:
        for both in {(sequences, lead[0] // sequences), (lead[0] // sequences, sequences)}:
            opened = tensor.reshape(*both, *tensor.shape[1:])
            yield from _at_length(opened, both, count, sequences, start, length, dims=1)
        return
    tokens = tensor.narrow(-2, start, length)
    for batch in dims_of(lead, sequences):
        roles = DimensionRoles.of(Axes(tuple(lead), batch), dims or len(lead))
        yield Arrangement(_sample(tokens, (*batch, len(lead)), count), count, start, roles=roles)
        if sequences > 1 and length > 1:  # length first
            yield Arrangement(_sample(tokens, (len(lead), *batch), count), count, start, roles=roles)


def _sample(tensor: Tensor, order: Sequence[int], count: int) -> Tensor:
    """Sample N tokens that some dimensions number, in an order of these; the others number heads."""
    heads = [dim for dim in range(tensor.dim() - 1) if dim not in order]
    index = unravel(places(count, tensor.device), [tensor.shape[dim] for dim in order])
    taken = tensor.permute(*order, *heads, -1)[index]
    return taken.reshape(taken.shape[0], -1, taken.shape[-1])


def arrangements_of_rows(tensor: Tensor, tokens: Sequence[int], rows: int) -> Iterator[Arrangement]:
    """Sample the rows of an alignment, in every order of rows, sequences and positions.

    Args:
        tensor: ``(*lead, length, width)``, the rows in one of its leading dimensions.
        tokens: how many tokens the inputs of maps have.
        rows: how many rows there are.

    Yields:
        Samples; none if no order fits.
    """
    tensor = tensor.detach()
    *lead, length, _ = tensor.shape
    for count in dict.fromkeys(tokens):
        for batch in dims_of(lead, count // length) if count % length == 0 else ():
            if rows in [lead[dim] for dim in batch]:
                for order in itertools.permutations((*batch, len(lead))):
                    yield Arrangement(_sample(tensor, order, count), count, is_tied=True)
