"""Read attention where it runs: rows of attention and head outputs, in forwards that train.

Under a slim dispatch mode the attention that was found is recognised again, by the module that runs and its number
there. Queries and keys are taken at the operation, with the mask, scale and groups that it received: a few rows are
copied. Shapes are all that is looked at: no waiting for a device, no random number, no tensor of the forward is kept,
and what is computed here is seen by no mode and no autograd. An error ends in the reasons of its layer.

A mode costs as much as a small layer. Autograd saves what a fused attention received, in the node behind its outputs:
once a forward under the mode has shown that this is the same memory, it is read there, and the mode stays off.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hdi_callback.attention.calls import running_module
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.flex import FlexCall
from hdi_callback.attention.layer import AttentionLayer, Site
from hdi_callback.attention.operations import BATCHED
from hdi_callback.attention.releases import FLEX, Mode, arguments_of, passed_on
from hdi_callback.attention.tape import Tape, op_name, tensors_in
from hdi_callback.guard import describe, without_modes

if TYPE_CHECKING:
    from hdi_callback.attention.capture.capture import Capture
    from hdi_callback.attention.first_forward import FirstForward

aten = torch.ops.aten
_FUSED, _SOFTMAX, _FLEX = "fused", "softmax", "flex"
KINDS = {
    aten._scaled_dot_product_efficient_attention.default: _FUSED,
    aten._scaled_dot_product_cudnn_attention.default: _FUSED,
    aten._scaled_dot_product_fused_attention_overrideable.default: _FUSED,
    aten._scaled_dot_product_flash_attention.default: _FUSED,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _FUSED,
    aten._softmax.default: _SOFTMAX,
    aten._safe_softmax.default: _SOFTMAX,
    FLEX: _FLEX,
}
# Products with values, and the place of their two matrices.
PRODUCTS = {aten.bmm.default: 0, aten.mm.default: 0, aten.baddbmm.default: 1, aten.addmm.default: 1}
# Nodes of autograd that may lie between a fused attention and the projection of its outputs: views and copies.
_VIEWS = {
    f"{name}Backward0"
    for name in (
        "Alias", "Clone", "Permute", "ReshapeAlias", "Slice", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"
    )
}  # fmt: skip
_SAVED_TENSORS = ("query", "key", "attn_mask", "attn_bias")
_SETTINGS = ("scale", "is_causal")
_ADDS_UP = 0.02  # weights in bfloat16 add up to one as exactly as that
_SEEN = -5e3  # scores of keys that a mask hides are less
_MOST_SEQUENCES = 4
_PLAIN = Tensor.__torch_dispatch__
_STACKED = ("logits", "weights", "query", "key", "mask", "padded")  # of a `CoreSample`


@dataclass(frozen=True)
class CoreSample:
    """Sampled rows of one attention, or of several that are alike, stacked in front."""

    positions: Tensor  # ``(q,)``, of the queries among the keys
    logits: Tensor | None = None  # ``(b, H, q, k)`` float32, as they enter the softmax, where it is written out
    weights: Tensor | None = None  # ``(b, H, q, k)`` float32, as they leave it, before dropout
    query: Tensor | None = None  # ``(b, H, q, width)`` float32, where attention is one operation
    key: Tensor | None = None  # ``(b, key heads, k, width)`` float32
    scale: float = 1.0  # what their products are multiplied by
    mask: Tensor | None = None  # ``(b, H, q, k)``, added to them, or true where a key is seen
    later: Tensor | None = None  # ``(q, k)``, true of keys that are behind a query, and so are not seen
    padded: Tensor | None = None  # ``(b, q)``, queries that are padding; `None` for none

    @property
    def kind(self) -> tuple[Any, ...]:
        """Positions, shapes and types that samples must share to be stacked."""
        shapes = [None if each is None else (each.shape, each.dtype, each.device) for each in self.tensors]
        return id(self.positions), id(self.later), self.scale, *shapes

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What is stacked, in the order of `_STACKED`."""
        return self.logits, self.weights, self.query, self.key, self.mask, self.padded

    @cached_property
    def numel(self) -> int:
        """How many numbers it holds, about."""
        return sum(tensor.numel() for tensor in self.tensors if tensor is not None)

    @classmethod
    def stacked(cls, samples: Sequence[CoreSample]) -> CoreSample:
        """Stack samples of one kind, and compute their scores."""
        columns: Any = zip(_STACKED, zip(*[sample.tensors for sample in samples]))
        tensors: dict[str, Any] = {name: None if values[0] is None else torch.stack(values) for name, values in columns}
        together = replace(samples[0], **tensors)
        return together if together.logits is not None else replace(together, logits=together._scores())

    def _scores(self) -> Tensor:
        assert self.query is not None and self.key is not None  # noqa: PT018
        *batch, H, rows, width = self.query.shape
        groups = H // self.key.shape[-3]
        grouped = self.query.reshape(*batch, H // groups, groups * rows, width)
        logits = (grouped * self.scale @ self.key.mT).view(*batch, H, rows, -1)
        if self.mask is not None:
            is_seen = self.mask.dtype == torch.bool
            logits = logits.masked_fill(~self.mask, -math.inf) if is_seen else logits + self.mask
        return logits if self.later is None else logits.masked_fill_(self.later, -math.inf)

    def visible(self) -> Tensor:
        """Return which keys a query sees, none of them if it is padding."""
        assert self.logits is not None
        visible = ~(self.logits <= _SEEN)  # NaN is seen
        return visible if self.padded is None else visible & ~self.padded[..., None, :, None]


class Reader(Mode):
    """Hands samples of the attention of layers to a sink while it is entered, of at most `max_rows` queries each."""

    def __init__(self, names: Mapping[nn.Module, str], sink: Capture | FirstForward, max_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._sink, self._max_rows = names, sink, max_rows
        # Of layers of which autograd was shown to save queries and keys: how to read them; and what the last fused
        # attention received.
        self.shown: dict[str, Site] = {}
        self._received: dict[str, tuple[Site, tuple[Any, ...]]] = {}
        self.watch([])
        self.begin()

    def watch(self, layers: Sequence[AttentionLayer]) -> None:
        """Read the attention of some layers."""
        sites = [(layer, site) for layer in layers for site in layer.sites]
        self._sites = {(site.place, site.ordinal): (layer, site) for layer, site in sites}
        self._periods = {site.place: site.period for _, site in sites}
        self._has_normalisers = any(site.kind == "normaliser" for _, site in sites)

    def begin(self) -> None:
        """Begin another armed step."""
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._places: dict[Any, _Place] = {}
        self._received.clear()
        self.forget()

    def forget(self) -> None:
        """Release all tensors."""
        # The weights that are on their way to a product with values, by storage; kept alive, as addresses are reused.
        self._waiting: dict[int, tuple[AttentionLayer, Site, int, Tensor]] = {}
        self._begun: list[_Begun] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, and look at it if it is one of attention."""
        if types and any(is_sharded(kind) for kind in types):
            return NotImplemented  # a DTensor asks for operations on the part of this rank, which come here
        if func is FLEX:
            call = FlexCall(*args)
            modes = torch._C._len_torch_dispatch_stack()
            is_taped = modes > 0 and isinstance(torch._C._get_dispatch_stack_at(modes - 1), Tape)
            out: Any = func(*args) if is_taped else call.run()
            args = (call,)
        else:
            out = passed_on(func, args, kwargs or {})
        kind = KINDS.get(func)
        is_looked_at = kind is not None or self._waiting or self._has_normalisers
        if is_looked_at and all(each.__torch_dispatch__ is _PLAIN for each in types):
            try:
                if self._has_normalisers:
                    self._go_on(op_name(func), next(tensors_in((out,)), None))
                if kind is None:
                    self._follow(func, args, out)
                else:
                    self._read(kind, func, args, kwargs or {}, out)
            except Exception as error:  # of a kind of tensor that has no storage, or no strides
                for layer in {id(waiting[0]): waiting[0] for waiting in self._waiting.values()}.values():
                    self._sink.fail(layer.name, f"its head outputs cannot be followed ({describe(error)})")
                self.forget()
        return out

    def _read(self, kind: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        layer, site = self._next_site(is_product=False)
        if layer is None or site is None:
            return
        how = site
        if site.kind != kind and kind != _FLEX:
            # torch computes the same call now in one operation, now in several: dropout, weights that are asked for.
            rows = ("bh", "q") if args[0].dim() == 3 else ("b", "h", "q")
            behind = rows if kind == _FUSED else ("bh", "q")
            how = replace(site, kind=kind, rows=rows, out=behind, keys=-1, flipped=False)
        try:
            with aside():
                if kind == _FLEX:
                    self._read_flex(layer, how, args[0], out[0])
                elif kind == _FUSED:
                    received = arguments_of(func, args, kwargs)
                    self._read_fused(layer, how, received, out)
                    if len(layer.sites) == site.period == 1 and not self._sink.wants_outputs(layer.name):
                        self._received[layer.name] = how, _identity(received)
                else:
                    self._read_weights(layer, how, self._rows_of_scores(how, args[0]), out)
        except Exception as error:
            self._sink.fail(layer.name, f"its rows of attention cannot be read ({describe(error)})")

    def _next_site(self, *, is_product: bool) -> tuple[AttentionLayer, Site] | tuple[None, None]:
        """Return the site of an attention that begins in the module that runs now, and count it."""
        path = running_module(self._names)
        if path is None:
            return None, None
        place = path, is_product
        ordinal = self._counts[place] % self._periods.get(place, 1)
        self._counts[place] += 1
        return self._sites.get((place, ordinal), (None, None))

    def _go_on(self, name: str, out: Tensor | None) -> None:
        """Follow each product of queries and keys to its scores and weights, counting operations by their names."""
        if out is None:
            return
        layer, site = self._next_site(is_product=True) if name in BATCHED else (None, None)
        for product in self._begun:
            product.counts[name] += 1
        if layer is not None and site is not None:
            self._begun.append(_Begun(layer, site))
        for product in list(self._begun):
            how, place = product.site, (name, product.counts[name]) if product.counts else ("", 0)
            try:
                with aside():
                    if place == how.scores:
                        product.scores = self._rows_of_scores(how, out)
                    elif place == how.weights:
                        self._begun.remove(product)
                        self._read_weights(product.layer, how, product.scores, out)
            except Exception as error:
                self._sink.fail(product.layer.name, f"its rows of attention cannot be read ({describe(error)})")

    def _rows_of_scores(self, how: Site, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Copy sampled rows of scores, ``(b, H, q, keys)``, and say which keys are hidden, ``(batch, keys)``."""
        if scores.dim() != len(how.rows) + 1:
            how = replace(how, rows=("bh", "q"))  # as a product of batches returns them
        logits = _arranged(scores.movedim(how.keys, -1), how.rows, how)
        sampled = self._sampled(logits)
        rows = _copied(sampled.rows(logits))
        if how.is_causal:
            place = self._place(sampled, logits.shape[3], logits.device)
            rows = rows.masked_fill(place.is_later, -math.inf)
        return rows, logits[:, 0].amax(1) <= _SEEN

    def _read_weights(
        self, layer: AttentionLayer, how: Site, scores: tuple[Tensor, Tensor] | None, out: Tensor
    ) -> None:
        """Read weights; a row of another normaliser than a softmax whose sum is neither 1 nor 0 becomes NaN."""
        if scores is None:
            raise ValueError("its scores were not met")
        if self._sink.wants_outputs(layer.name):
            self._waiting[_memory(out)] = layer, how, out.numel() // out.shape[how.keys], out
        weights = _arranged(out.movedim(how.keys, -1), how.rows, how)
        sampled = self._sampled(weights)
        rows, (logits, hidden_keys) = _copied(sampled.rows(weights)), scores
        if how.is_softmax:  # perhaps by a mask behind the exponentials
            logits, hidden_keys = logits.masked_fill(rows == 0, -math.inf), weights[:, 0].amax(1) == 0
        if how.kind == "normaliser":
            sums = rows.sum(-1, keepdim=True)
            rows = rows.masked_fill(((sums - 1).abs() > _ADDS_UP) & (sums.abs() > _ADDS_UP), math.nan)
        place = self._place(sampled, weights.shape[3], weights.device)
        self._hand_over(layer, CoreSample(place.among_keys, logits, rows), sampled, hidden_keys)

    def show(self, layer: AttentionLayer, outputs: Tensor) -> None:
        """Compare queries and keys that the mode read with those that autograd saved; trust these if equal."""
        if layer.name in self._received:
            how, identity = self._received.pop(layer.name)
            saved = _saved_behind(outputs)
            if saved is not None and _identity(saved) == identity:
                self.shown[layer.name] = how

    def read_behind(self, layer: AttentionLayer, outputs: Tensor) -> None:
        """Read the fused attention before the output projection from the tensors that autograd saved."""
        how, saved = self.shown.get(layer.name), _saved_behind(outputs)
        if how is None or saved is None:
            self.shown.pop(layer.name, None)
            raise ValueError(
                "the attention before its output projection is no longer one fused operation; "
                "the next reading reads it anew"
            )
        self._read_fused(layer, how, saved, None)

    def _read_fused(self, layer: AttentionLayer, how: Site, received: Mapping[str, Any], out: Any) -> None:
        query, key, mask = received["query"], received["key"], received.get("attn_mask")
        mask = received.get("attn_bias") if mask is None else mask
        whole = _arranged(query, how.rows, how)
        groups = how.heads // (math.prod(key.shape[:-2]) // whole.shape[0])
        if how.order and groups > 1:
            raise ValueError("grouped heads in another order")
        of_keys, sampled = replace(how, heads=how.heads // groups, order=()), self._sampled(whole)
        hidden = None
        place = self._place(sampled, key.shape[-2], query.device)
        if mask is not None:
            mask = _arranged(mask.expand(*query.shape[:-1], key.shape[-2]), how.rows, how)
            of_first = mask[:, 0]
            hidden = (~of_first if mask.dtype == torch.bool else of_first <= _SEEN).all(1)
            mask = sampled.rows(mask).clone()
        sample = CoreSample(
            place.among_keys,
            query=_copied(sampled.rows(whole)),
            key=_copied(_arranged(key, how.rows, of_keys)[sampled.sequences]),
            scale=query.shape[-1] ** -0.5 if received["scale"] is None else received["scale"],
            mask=mask,
            later=place.is_later if received.get("is_causal") else None,
        )
        self._hand_over(layer, sample, sampled, hidden)
        if self._sink.wants_outputs(layer.name):
            self._hand_outputs(layer, how, out[0] if isinstance(out, (tuple, list)) else out)

    def _read_flex(self, layer: AttentionLayer, how: Site, call: FlexCall, out: Tensor) -> None:
        sampled = self._sampled(call.query)
        place = self._place(sampled, call.key.shape[2], call.query.device)
        sample = CoreSample(place.among_keys, logits=call.logits(place.among_queries)[sampled.sequences].float())
        self._hand_over(layer, sample, sampled, None)
        if self._sink.wants_outputs(layer.name):
            self._sink.take_outputs(layer.name, out.transpose(1, 2)[..., : layer.value_dim])

    def _hand_over(self, layer: AttentionLayer, sample: CoreSample, sampled: _Sampled, hidden: Any) -> None:
        padded = self._sink.padded_queries(layer.name, sampled.shape, hidden)
        if padded is not None:
            padded = padded[sampled.sequences][:, sampled.queries].to(sample.positions.device)
            sample = replace(sample, padded=padded)
        self._sink.take_rows(layer.name, sample)

    def _follow(self, func: Any, args: Any, out: Any) -> None:
        """Follow weights through dropout, casts and copies, to the product with values."""
        place = PRODUCTS.get(func)
        operands = args if place is None else args[place : place + 2]
        tensors = [item for group in operands for item in (group if isinstance(group, (list, tuple)) else (group,))]
        for tensor in tensors:
            weights = self._waiting.get(_memory(tensor)) if isinstance(tensor, Tensor) else None
            if weights is None:
                continue
            layer, how, rows, _ = weights
            if place is None:
                for result in out if isinstance(out, (list, tuple)) else (out,):
                    if isinstance(result, Tensor) and result.is_floating_point():
                        self._waiting.setdefault(_memory(result), (layer, how, rows, result))
            elif rows in (tensor.numel() // tensor.shape[-1], tensor.numel() // tensor.shape[-2]):
                self._waiting = {key: item for key, item in self._waiting.items() if item[0] is not layer}
                with aside():
                    self._hand_outputs(layer, how, out.mT if how.flipped else out)
                return

    def _hand_outputs(self, layer: AttentionLayer, how: Site, out: Tensor) -> None:
        try:
            outputs = _arranged(out, how.rows if how.kind == _FUSED else how.out, how)
            self._sink.take_outputs(layer.name, outputs.transpose(1, 2)[..., : layer.value_dim])
        except Exception as error:
            self._sink.fail(layer.name, f"its head outputs cannot be read ({describe(error)})")

    def _place(self, sampled: _Sampled, keys: int, device: torch.device) -> _Place:
        """Return where sampled queries are, and what they see; layers share it."""
        key = sampled.shape[1], sampled.queries.start, sampled.queries.step, keys, device
        if key not in self._places:
            numbers = torch.arange(sampled.shape[1], device=device)[sampled.queries]
            is_later = torch.arange(keys, device=device) > numbers[:, None]
            self._places[key] = _Place(numbers + max(0, keys - sampled.shape[1]), numbers, is_later)
        return self._places[key]

    def _sampled(self, rows: Tensor) -> _Sampled:
        """Return which sequences and queries are sampled, the same at each step: others would look like changes."""
        sequences, queries = rows.shape[0], rows.shape[2]
        by_sequence = max(1, math.ceil(sequences / min(_MOST_SEQUENCES, self._max_rows)))
        each = max(1, self._max_rows // max(1, math.ceil(sequences / by_sequence)))
        by_query = max(1, math.ceil(queries / each))
        return _Sampled((sequences, queries), slice(0, None, by_sequence), slice(by_query // 2, None, by_query))


class _Place(NamedTuple):
    """Where sampled queries are."""

    among_keys: Tensor  # ``(q,)``; of more keys the first are of a memory: the last query and key are of one token
    among_queries: Tensor  # ``(q,)``
    is_later: Tensor  # ``(q, keys)``, which keys `is_causal` hides


@dataclass(frozen=True)
class _Sampled:
    """Which rows of an attention are sampled."""

    shape: tuple[int, int]  # sequences and queries
    sequences: slice
    queries: slice

    def rows(self, x: Tensor) -> Tensor:
        """Return them of ``(b, H, q, ...)``."""
        return x[self.sequences][:, :, self.queries]


@dataclass(eq=False)
class _Begun:
    """A product of queries and keys, until weights are made of it by something else than a softmax."""

    layer: AttentionLayer
    site: Site
    counts: Counter[str] = field(default_factory=Counter)  # of operations after it
    scores: tuple[Tensor, Tensor] | None = None


@contextmanager
def aside() -> Iterator[None]:
    """Compute where neither autograd nor autocast nor any mode or subclass of the user's sees it."""
    with torch._C.DisableTorchFunction(), without_modes():
        yield


def _saved_behind(outputs: Tensor) -> dict[str, Any] | None:
    """Return the saved arguments of the fused attention before its outputs; `None` if views do not lead to one.

    Nothing is read that went through hooks, as those of checkpointing: they would run.
    """
    node: Any = outputs.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith("ScaledDotProduct"):
        return None
    if getattr(node._raw_saved_query, "unpack_hook", True) is not None:  # as of all that it saves
        return None
    return {name: getattr(node, f"_saved_{name}", None) for name in (*_SAVED_TENSORS, *_SETTINGS)}


def _identity(received: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return addresses, geometries and settings, equal for fused attentions that received the same memory."""
    values = [received.get(name) for name in (*_SAVED_TENSORS, *_SETTINGS)]
    return tuple(
        (value.data_ptr(), value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
        for value in values
    )


def _copied(x: Tensor) -> Tensor:
    """Copy, as samples are looked at later."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _arranged(x: Tensor, names: tuple[str, ...], how: Site) -> Tensor:
    """View a tensor as ``(batch, heads, queries, last)``, heads in the layer's order."""
    heads = how.heads
    dims: list[str] = []
    split: list[int] = []
    for name, size in zip(names, x.shape):
        dims += list(name)
        both = {"bh": (size // heads, heads), "hb": (heads, size // heads)}
        split += both.get(name, (size,))
    x = x.reshape(*split, x.shape[-1]) if len(split) + 1 > x.dim() else x
    x = x.permute(*[at for kind in "bhq" for at, name in enumerate(dims) if name == kind], -1)
    count = {kind: dims.count(kind) for kind in "bhq"}
    x = x.flatten(0, count["b"] - 1) if count["b"] > 1 else x if count["b"] else x[None]
    x = x.flatten(1, count["h"]) if count["h"] > 1 else x if count["h"] else x.unsqueeze(1)
    x = x.flatten(2, 1 + count["q"]) if count["q"] > 1 else x
    return x[:, list(how.order)] if how.order else x
