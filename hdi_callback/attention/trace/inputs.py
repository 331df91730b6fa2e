"""Inputs of a traced run: synthetic ones that fit a signature, or those recorded in a real forward.

No result of a run depends on the values of its inputs: supports are those of the outputs of linear maps. The inputs
only have to carry the forward as far as attention.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer import projections
from hdi_callback.attention.trace.arguments import with_tensors
from hdi_callback.attention.trace.kept_lengths import kept_lengths

_TOKENS, _FEW_TOKENS = 8, 5
_MOST_WORDS = 8
_LARGEST = 2**20  # elements of recorded inputs that are kept whole

# Names of arguments only hint at what a forward may accept.
_TOKENS_TOO = frozenset({
    "q", "k", "v", "query", "key", "value", "queries", "keys", "values", "kv", "context", "memory", "src", "tgt",
    "x", "y", "hidden_states", "encoder_hidden_states", "encoder_output", "inputs", "residual",
})  # fmt: skip
_ROTATIONS = frozenset({"position_embeddings", "rotary_pos_emb", "rope", "rotary_emb", "freqs"})
_ROTARY_WIDTHS = (
    "qk_rope_head_dim", "rotary_dim", "rotary_ndims", "rope_dim", "head_dim", "attention_head_size", "head_size",
)  # fmt: skip
_MASKS = frozenset({"attention_mask", "mask", "attn_mask"})
_POSITIONS = frozenset({"position_ids", "positions", "cache_position"})
_BIASES = frozenset({"alibi", "position_bias", "attention_bias", "bias"})
_OF_NO_TOKENS = _ROTATIONS | _MASKS | _POSITIONS | _BIASES
_IS_OF_NO_TOKENS = re.compile(r"(?i)mask|past|cache|pos|bias|rot|rope|freq|len|index|ids|state$|config|scale|dropout")
_STARTS = frozenset({"cu_seqlens", "cu_seqlens_q"})
_SIDES = frozenset({"h", "w", "H", "W", "height", "width"})


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward.

    Attributes:
        args: by position.
        kwargs: by name.
        is_guess: synthetic, of fewer dims than tokens have, or of more for a module that needs more than them: what it
            computes of such inputs may be what nobody would call it for, so that it is no reason to refuse it.
        is_synthetic: no forward was called with them, and equal numbers in two of them mean nothing.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_guess: bool = False
    is_synthetic: bool = False


def synthetic_inputs(module: nn.Module) -> Iterator[Inputs]:
    """Synthetic inputs in the order in which they are tried: the plainest first, optional arguments last.

    Args:
        module: the module.

    Yields:
        One set of arguments after the other.
    """
    try:
        parameters = _parameters(module)
    except (TypeError, ValueError):
        return
    parameters = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    first, others = parameters[:1], parameters[1:]
    required = [other for other in others if other.default is other.empty]
    optional = [other for other in others if other.default is not other.empty]
    names = {parameter.name for parameter in parameters}
    rotations = list(_rotary_widths(module)) if names & _ROTATIONS else [1]
    known = [parameter for parameter in optional if parameter.name in _ROTATIONS | _POSITIONS]
    other_tokens = [parameter for parameter in optional if parameter.name in _TOKENS_TOO]
    chosen = [[], *([known] if known else []), *([[*known, *other_tokens]] if other_tokens else [])]
    is_unclear = any(parameter.name not in _TOKENS_TOO | _ROTATIONS | _POSITIONS | _SIDES for parameter in required)
    is_packed = bool(names & _STARTS)

    def is_guess(tokens: Tensor) -> bool:
        return (tokens.dim() < 3 and not is_packed) or (tokens.dim() > 3 and is_unclear)

    fills = (0, 1, 2, 3) if is_unclear else (0,)
    for tokens, fill, more, rotary in itertools.product(_shapes(module, names), fills, chosen, rotations):
        passed = [parameter for parameter in (*required, *more) if parameter.kind is not parameter.POSITIONAL_ONLY]
        if rotary == rotations[0] or any(parameter.name in _ROTATIONS for parameter in (*first, *passed)):
            made = {parameter.name: _made(parameter, tokens, fill, rotary) for parameter in passed}
            yield Inputs((tokens.clone(),), made, is_guess=is_guess(tokens), is_synthetic=True)


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(module.forward).parameters.values())


def with_other_tokens(inputs: Inputs) -> Inputs | None:
    """Make the tokens of each argument different, as for attention from one sequence to another.

    Args:
        inputs: synthetic ones.

    Returns:
        The same with other tokens; `None` if there is a single argument of tokens.
    """
    generator = torch.Generator().manual_seed(1)
    others = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in inputs.kwargs.items()
        if name in _TOKENS_TOO and isinstance(value, Tensor)
    }
    return replace(inputs, kwargs={**inputs.kwargs, **others}) if others else None


def with_optional(
    module: nn.Module, inputs: Inputs, names: Iterable[str], sizes: Iterable[Sequence[int]]
) -> Iterator[tuple[str, Inputs]]:
    """Add arguments that were left out, one at a time.

    Args:
        module: the module.
        inputs: synthetic ones, the first of them tokens.
        names: of `arguments_left_out`.
        sizes: of the values that are passed for each.

    Yields:
        The name of an argument, and the inputs with it.
    """
    generator = torch.Generator().manual_seed(2)
    for name, size in itertools.product(names, sizes):
        value = torch.randn(tuple(size), generator=generator)
        if name.startswith("*"):
            for count in (1, 2):
                yield name, _with_more(module, inputs, [value] * count)
        else:
            yield name, replace(inputs, kwargs={**inputs.kwargs, name: value})


def other_sizes(module: nn.Module, inputs: Inputs) -> list[tuple[int, ...]]:
    """Size tokens as other maps of a module take them, such as those of a second stream.

    Args:
        module: the module.
        inputs: synthetic ones, the first of them tokens.

    Returns:
        The sizes.
    """
    *lead, width = inputs.args[0].shape
    return [(*lead, size) for size in _widths(module) if size != width]


def arguments_left_out(module: nn.Module, inputs: Inputs, others: Collection[str] = ()) -> list[str]:
    """List arguments of a forward that may be tokens, and that were not passed.

    Args:
        module: the module.
        inputs: that were passed.
        others: names that its parts know, and that it may pass on where it takes any.

    Returns:
        Their names; that of arguments by position with its star.
    """
    names: list[str] = []
    for one in _parameters(module):
        if one.kind is one.VAR_POSITIONAL:
            names.append(f"*{one.name}")
        elif one.kind is one.VAR_KEYWORD:
            names += [name for name in (*others, *_words_in(module)) if name not in names]
        elif one.kind is not one.POSITIONAL_ONLY and inputs.kwargs.get(one.name, one.default) is None:
            names.append(one.name)
    return [
        name for name in names
        if inputs.kwargs.get(name) is None and name not in _OF_NO_TOKENS and not _IS_OF_NO_TOKENS.search(name)
    ]  # fmt: skip


def _words_in(module: nn.Module) -> list[str]:
    """Names by which the code of a forward may look up its keyword arguments."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    found = () if code is None else code.co_consts
    return [word for word in found if isinstance(word, str) and word.isidentifier()][:_MOST_WORDS]


def _with_more(module: nn.Module, inputs: Inputs, values: Sequence[Tensor]) -> Inputs:
    """Add arguments by position, behind all that have names."""
    args, kwargs = list(inputs.args), dict(inputs.kwargs)
    named = [
        parameter
        for parameter in _parameters(module)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    args += [kwargs.pop(parameter.name, parameter.default) for parameter in named[len(args) :]]
    return replace(inputs, args=(*args, *values), kwargs=kwargs)


def _shapes(module: nn.Module, names: set[str]) -> Iterator[Tensor]:
    widths = _widths(module)
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    is_flat = bool(names & _STARTS)
    maps = [part for part in module.modules() if projections.is_pointwise(part)]
    dims = {-1 - projections.feature_dim(part) for part in maps}
    for width in widths:
        if is_flat:
            yield tokens(2 * _TOKENS, width)
        for count in sorted(dims):
            yield tokens(2, width, *[4] * count)
        if len(dims) == 0 or any(projections.is_linear(part) for part in module.modules()):
            for length in (16, 64) if names & _SIDES else (_TOKENS,):
                yield tokens(2, length, width)
    for width in widths[:1]:
        tables = (*module.buffers(recurse=False), *module.parameters(recurse=False))
        for length in dict.fromkeys(kept_lengths(module, tables)):
            yield tokens(2, length, width)
        yield tokens(2, _FEW_TOKENS, width)  # a table of positions may hold no more
        yield tokens(2, 1, _TOKENS, width)
        yield tokens(2, 4, 4, width)
    for width in widths:  # of one sequence, or with a vector for each
        yield tokens(_TOKENS, width)


def _widths(module: nn.Module) -> list[int]:
    """Sizes that tokens may have: input features of the linear maps, else sizes that parameters have in common."""
    taken: list[int] = []
    for part in module.modules():
        if projections.is_map(part):
            with suppress(Exception):
                taken.append(int(projections.features(part)[0]))
        elif type(getattr(part, "in_features", None)) is int:
            taken.append(int(part.in_features))  # type: ignore[arg-type]
        elif isinstance(part, nn.MultiheadAttention):
            taken.append(part.embed_dim)
    sizes = Counter(
        size for parameter in module.parameters(recurse=True) if parameter.dim() > 1 for size in parameter.shape
    )
    common = [size for size, _ in sizes.most_common(2)]
    own = [size for parameter in module.parameters(recurse=False) if parameter.dim() > 1 for size in parameter.shape]
    least = [size for size, _ in Counter(own).most_common(3)] if not taken else []
    return list(dict.fromkeys([*taken[:1], *[size for size, _ in Counter(taken).most_common(1)], *least, *common]))[:4]


def _made(parameter: inspect.Parameter, tokens: Tensor, fill: int, rotary: int) -> Any:
    name, length = parameter.name, tokens.shape[-2] if tokens.dim() > 2 else len(tokens)
    if name in _ROTATIONS:
        lead = (1, length) if tokens.dim() > 2 else (length,)
        if rotary < 0:  # as a complex number for each pair of features
            return torch.ones(*lead, -rotary, dtype=torch.complex64)
        return torch.ones(*lead, rotary), torch.zeros(*lead, rotary)
    if name in ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"):
        return torch.arange(0, len(tokens) + 1, _TOKENS, dtype=torch.int32)
    if name in _POSITIONS:
        return torch.arange(length) if name == "cache_position" else torch.arange(length).expand(len(tokens), -1)
    if name in _SIDES or parameter.annotation is int:
        return max(1, math.isqrt(length))
    if name in _TOKENS_TOO:
        return tokens.clone()
    if name in _MASKS:
        return None if fill == 0 else torch.ones(len(tokens), 1, length, length)
    if name in _BIASES:
        return torch.zeros(1, 1, 1) if fill == 2 else None
    return tokens.clone() if fill == 3 else None


def _rotary_widths(module: nn.Module) -> Iterator[int]:
    found = []
    for owner in (module, getattr(module, "config", None)):
        for name in _ROTARY_WIDTHS:
            with suppress(Exception):
                found.append(int(getattr(owner, name)))
    widths = dict.fromkeys(width for width in [*found, *(width // 2 for width in found), 1] if width > 0)
    yield from widths
    yield from (-width for width in widths)


# --- recorded


def recorded_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Inputs]:
    """Copy the arguments of a forward: cut to two sequences and a few tokens, then as they are if they are small.

    Args:
        args: by position.
        kwargs: by name.

    Yields:
        The arguments, apart from the user's.
    """
    tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1]
    tokens = floats[0] if floats else None
    size = sum(tensor.numel() for tensor in tensors)
    cuts = [_Cut()] if size <= _LARGEST // 8 else []
    if tokens is not None and tokens.dim() == 3:
        for batch in (0, 1):
            alike = [tensor for tensor in floats if tensor.dim() == 3 and tensor.shape[batch] == tokens.shape[batch]]
            cuts.append(_Cut(tokens.shape[batch], frozenset(tensor.shape[1 - batch] for tensor in alike), batch))
    if tokens is not None:
        cuts.append(_Cut(tokens.shape[0]))
    if _LARGEST // 8 < size <= _LARGEST:
        cuts.append(_Cut())
    for cut in cuts:
        yield Inputs(with_tensors(args, cut), with_tensors(dict(kwargs), cut))


@dataclass(frozen=True)
class _Cut:
    """Cuts whatever has as many elements as there are sequences or tokens; nothing if their number is zero."""

    batch: int = 0
    lengths: frozenset[int] = frozenset()
    batch_dim: int = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not self.batch:
            return tensor.clone()
        kept = 2 if self.lengths or self.batch > 2 else self.batch
        if tensor.dim() > self.batch_dim and tensor.shape[self.batch_dim] == self.batch:
            tensor = tensor.narrow(self.batch_dim, 0, min(kept, self.batch))
        elif tensor.dim() == 2 and tensor.shape[0] == self.batch:  # a mask has the batch first all the same
            tensor = tensor[:kept]
        dims = [dim for dim, size in enumerate(tensor.shape) if size in self.lengths]
        if not {tensor.dim() - 2, tensor.dim() - 1} <= set(dims):  # else a mask
            dims = dims[:1]
        for dim in dims:
            tensor = tensor.narrow(dim, 0, min(_TOKENS, *self.lengths))
        return tensor.clone()
