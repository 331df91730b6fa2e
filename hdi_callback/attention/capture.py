"""Capture of head outputs on armed steps.

Read are the forwards that train: those that autograd records, and where some of a layer's were reached by a backward,
those alone. The recomputation of activation checkpointing is no forward of its own; where the forward itself was run
without autograd, the recomputation is what is read. All forwards of a step are read, up to a bounded number of
tokens in all.

A tap is a forward-pre-hook with a flag. As long as it is not known whether the model is compiled, the hooks stay on it;
once a forward was captured outside of a compiled graph they are there on armed steps alone.

In a compiled graph the sample is taken by an operator of its own, which hands its input on unchanged. So nothing is
traced that depends on the number of tokens, and nothing is written to Python objects, which inside a checkpointed
region would put an end to compilation for good. A flag is all that the graph has to guard: installed before the first
compiled call, a tap costs no graph break and one recompilation. Where there must be no recompilation the flag stays as
it is.

Where the output projection is a convolution of kernel size one, each image is one sequence, of all its positions.

`nn.MultiheadAttention` uses its output projection without calling it. There the tap sits on the attention itself and
computes the head outputs from what it received, through torch's own function with the identity in place of the output
projection. They are therefore those without attention dropout.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from hdi_callback.attention.calls import Entry, calls_going_on, is_inferring_shapes, is_recomputing, take_in_graph
from hdi_callback.attention.compiled import may_recompile
from hdi_callback.attention.heads import AttentionLayer
from hdi_callback.attention.hooks import Arguments, Handle, Hooks, observe_calls
from hdi_callback.attention.padding import Frame, Padding, PaddingChoice, find_padding, fit_padding, takes_masks
from hdi_callback.attention.projections import feature_dim
from hdi_callback.attention.sampling import TokenSample, joined, sample_tokens, shared_out
from hdi_callback.attention.sharding import as_part
from hdi_callback.attention.slopes import NO_BACKWARD, HeadSlopes, SlopeReducer
from hdi_callback.attention.weight_reading import read_tensor

Pick = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Capture:
    """A sample of the head outputs of the forwards of one step.

    Attributes:
        outputs: ``(tokens, H, d_v)``, detached; a DTensor where the heads are spread over ranks.
        sequences: ``(tokens,)``, the number of the sequence that each token belongs to.
        num_sequences: how many there are.
        weights: ``(tokens,)``, how many tokens each stands for, 0 for padding; `None` if all stand for as many.
        seen: number of tokens, padding included, that the sample was taken from.
        slopes: ``(sequences, H)``, how fast the loss grows with a factor on each head, from all tokens; `None` if it is
            not asked for, or not known.
        no_slopes: why it is not known.
    """

    outputs: Tensor
    sequences: Tensor
    num_sequences: int
    weights: Tensor | None
    seen: int
    slopes: Tensor | None = None
    no_slopes: str | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens of each sequence are in the sample, padding left out; waits for the device."""
        kept = self.sequences if self.weights is None else self.sequences[self.weights > 0]
        return tuple(torch.bincount(kept, minlength=self.num_sequences).tolist())


class Taps(Hooks):
    """Capture the head outputs of layers, on armed steps only.

    Args:
        layers: the layers to tap; those without a known output projection are named in `absent`.
        max_tokens: largest number of tokens kept per layer.
        model: the model around the layers, whose masks tell padding.
        padding: how padding is known: ``"auto"`` from masks, a number for the token that is padding, a function that
            takes the arguments of the model and returns ``(batch, length)``, true where a token is padding; `None` to
            count every token.
        pick: takes what is captured from the module and its arguments; the first argument by default.
        reduce_slopes: computes slopes from head outputs and their gradients; these are not read if it is `None`.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        max_tokens: int = 2048,
        model: nn.Module | None = None,
        padding: PaddingChoice = "auto",
        pick: Pick | None = None,
        reduce_slopes: SlopeReducer | None = None,
    ) -> None:
        self._pick, self._reduce_slopes = pick, reduce_slopes
        self._taps: dict[str, _Tap] = {}
        self._max_tokens, self._padding = max_tokens, padding
        self._never: dict[str, str] = {}
        self._is_armed = False
        self._model = model
        self._is_eager = self._is_suspended = False
        self._is_limited = self._was_limited = self._has_both = False
        super().__init__()
        self.add(layers)

    def add(self, layers: Sequence[AttentionLayer]) -> None:
        """Tap further layers, from the next `arm` on.

        Args:
            layers: layers with names of their own.
        """
        for layer in layers:
            self._taps[layer.name] = _Tap(layer, self._max_tokens, self._padding, self._pick, self._reduce_slopes)
        for tap in self._taps.values():
            tap.takes_masks = any(map(takes_masks, _modules_around(tap.layer.module, self._model)))
        all_layers = [tap.layer for tap in self._taps.values()]
        projections = Counter(id(one.output_projection) for one in all_layers if one.output_projection is not None)
        for layer in all_layers:
            if "output" not in layer.slices or (
                layer.output_projection is None and not _is_torch_attention(layer.module)
            ):
                self._never[layer.name] = "its output projection is not known"
            elif projections[id(layer.output_projection)] > 1:
                self._never[layer.name] = "it shares its output projection with another layer"
        super().suspend()
        self.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def captures(self) -> Mapping[str, Capture]:
        """What was captured since `arm`: layer name -> sample."""
        found = {name: tap.captured(self._reads_all) for name, tap in self._taps.items()}
        return {name: capture for name, capture in found.items() if capture is not None}

    @property
    def absent(self) -> Mapping[str, str]:
        """Layers that could not be captured: name -> reason."""
        failed = {name: tap.failure for name, tap in self._taps.items() if tap.failure is not None}
        unread = {
            name: "it ran only where autograd records nothing, and only forwards that train are read"
            for name, tap in self._taps.items()
            if tap.is_empty(self._reads_all) and tap.has_run
        }
        return {**self._never, **unread, **failed}

    @property
    def missed(self) -> Sequence[str]:
        """Layers that could have been captured and were not seen, though nothing failed."""
        return [
            name
            for name, tap in self._taps.items()
            if tap.is_empty(self._reads_all) and name not in self._never and name not in self.absent
        ]

    @property
    def doubts(self) -> Mapping[str, str]:
        """Layers with a mask that was seen and could not be read: name -> what is odd about it."""
        return {name: tap.doubt for name, tap in self._taps.items() if tap.doubt is not None}

    @property
    def was_armed(self) -> bool:
        """Whether a forward was to be captured since the last `release`."""
        return self._is_armed

    @property
    def is_limited(self) -> bool:
        """Whether a compiled graph would have to be compiled anew for a capture, and must not be."""
        return self._was_limited

    def arm(self, *, training_only: bool = False, padding_mask: Tensor | None = None) -> None:
        """Capture the forwards of every layer from now on; forgets what was captured before.

        Args:
            training_only: pass over forwards that autograd does not record, even if there are no others.
            padding_mask: ``(batch, length)``, true where a token of these forwards is padding.
        """
        self._is_armed = True
        for name, tap in self._taps.items():
            tap.forget()
            tap.is_armed, tap.training_only, tap.padding_mask = name not in self._never, training_only, padding_mask
        if not self._is_suspended:
            if self._is_eager:  # anew, so that what hooks of the user's have changed is seen as well
                super().suspend()
            super().resume()
        self._mark_graphs(True)
        self._was_limited = self._is_limited

    def disarm(self) -> None:
        """Capture nothing more, and keep what was captured."""
        for tap in self._taps.values():
            tap.is_armed = False

    def release(self) -> None:
        """Let go of what was captured."""
        self._is_armed = False
        taps = self._taps.values()
        if any(tap.was_compiled for tap in taps):
            self._is_eager = False
        elif any(tap.was_eager for tap in taps):
            self._is_eager = True
        for tap in taps:
            tap.forget()
            tap.is_armed = False
        if self._is_eager:
            super().suspend()

    def rest(self) -> None:
        """Let compiled graphs take no samples, before a forward that is not to be captured.

        Not done by `release`, since until then it may be forbidden to compile anything anew.
        """
        if not self._is_armed and any(tap.is_in_graph for tap in self._taps.values()):
            self._mark_graphs(False)

    def remove(self) -> None:
        """Take the hooks off and let go of what was captured; calling it again does nothing."""
        self.suspend()
        self.release()

    def suspend(self) -> None:
        """Take the hooks off until `resume`."""
        self._is_suspended = True
        super().suspend()

    def resume(self) -> None:
        """Put the hooks back after `suspend`, where they are needed."""
        self._is_suspended = False
        if self._is_armed or not self._is_eager:
            super().resume()

    @property
    def _reads_all(self) -> bool:
        """Whether forwards without autograd are read, as there are no others."""
        taps = self._taps.values()
        return not any(tap.training_only or tap.has_recorded for tap in taps)

    def _mark_graphs(self, is_armed: bool) -> None:
        """Let compiled graphs take samples, or not; each change may compile them anew."""
        taps = [tap for tap in self._taps.values() if tap.is_in_graph != is_armed]
        self._is_limited = bool(taps) and not may_recompile(self._model, has_both=self._has_both)
        if not self._is_limited:
            for tap in taps:
                tap.is_in_graph = is_armed
            self._has_both |= is_armed and any(tap.was_compiled for tap in taps)

    def _install(self) -> Iterator[Handle]:
        for name, tap in self._taps.items():
            if name in self._never:
                continue
            if tap.layer.output_projection is not None:
                yield from observe_calls(tap.layer.output_projection, tap.take_input)
            else:
                yield from observe_calls(tap.layer.module, tap.take_recomputed, tap.follow)


class _Forward:
    """What was taken of one forward of a layer."""

    def __init__(self, sample: TokenSample, *, is_recorded: bool) -> None:
        self.sample, self.is_recorded = sample, is_recorded
        self.is_reached = False
        self.outputs: Tensor | None = None  # of the whole forward, until its gradient is followed
        self.first_sequence = 0


class _Tap:
    """The hook of one layer, and what it took."""

    def __init__(
        self,
        layer: AttentionLayer,
        max_tokens: int,
        padding: PaddingChoice,
        pick: Pick | None = None,
        reduce_slopes: SlopeReducer | None = None,
    ) -> None:
        self.layer, self._pick, self._reduce_slopes = layer, pick, reduce_slopes
        self.is_armed = self.is_in_graph = self.was_compiled = self.was_eager = False
        self.training_only = self.takes_masks = False
        self.padding_mask: Tensor | None = None
        self.failure: str | None = None
        self.doubt: str | None = None
        self._max_tokens, self._padding = max_tokens, padding
        # Two of each, as a graph that autograd records is known when it is traced, not when it runs.
        self._recorded = Entry(lambda outputs: self._receive(outputs, is_recorded=True))
        self._unrecorded = Entry(lambda outputs: self._receive(outputs, is_recorded=False))
        self._lock = threading.Lock()  # replicas of `nn.DataParallel` run at the same time
        self.forget()

    def forget(self) -> None:
        """Let go of what was taken."""
        self.failure = self.doubt = self.padding_mask = None
        self.has_run = self.has_recorded = self._has_recorded_outside = False
        self._forwards: list[_Forward] = []
        self._sequences: list[tuple[int | weakref.ref[Tensor], int, int]] = []
        self._num_sequences = 0
        self._first_times: dict[tuple[int, torch.Size], Padding] = {}
        self._slopes = None if self._reduce_slopes is None else HeadSlopes(self.layer.num_heads, self._reduce_slopes)

    @property
    def capture(self) -> Capture | None:
        """What was taken of all forwards."""
        return self.captured(True)

    def captured(self, reads_all: bool) -> Capture | None:
        """Join what was taken of the forwards that are read."""
        if self.failure is not None:
            return None
        chosen = self._chosen(reads_all)
        if not chosen:
            return None
        sample = joined([one.sample for one in chosen])
        outputs = sample.rows.view(-1, self.layer.num_heads, self.layer.value_dim)
        slopes = None if self._slopes is None else self._slopes.total()
        why = NO_BACKWARD if self._slopes is None else self._slopes.failure or NO_BACKWARD
        return Capture(outputs, sample.sequences, self._num_sequences, sample.weights, sample.seen, slopes, why)

    def is_empty(self, reads_all: bool) -> bool:
        """Whether it took nothing, and knows no reason."""
        return self.failure is None and not self._chosen(reads_all)

    def _chosen(self, reads_all: bool) -> list[_Forward]:
        forwards = [one for one in self._forwards if one.is_recorded or reads_all]
        return [one for one in forwards if one.is_reached] or forwards

    def take_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Take the input of the output projection."""
        # Asked first, as all that is asked for before it would be guarded in a compiled graph.
        if torch.compiler.is_compiling():
            if not self.is_in_graph:
                return None
            passed = args[0] if args else next(iter(kwargs.values()))
            outputs = passed if self._pick is None else self._pick(module, args, kwargs)
            return self._take_in_graph(passed, outputs, args, kwargs)
        if self.is_armed:
            outputs = args[0] if args else next(iter(kwargs.values()), None)
            if self._pick is not None:
                outputs = self._pick(module, args, kwargs)
            taken = self._take(lambda: outputs, is_recorded=torch.is_grad_enabled())
            _mark_when_reached(taken, outputs)
            self._follow_slopes(taken, outputs, lambda gradient: _features_last(gradient, module))
        return None

    def take_recomputed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Take what the attention would pass to an output projection that it does not call."""
        if torch.compiler.is_compiling():
            if not self.is_in_graph:
                return None
            query = args[0] if args else kwargs["query"]
            outputs = recompute_head_outputs(module, *args, **kwargs)  # type: ignore[arg-type]
            return self._take_in_graph(query, outputs, args, kwargs)
        if self.is_armed:
            recorded = torch.is_grad_enabled()
            self._last = self._take(lambda: _recompute_unseen(module, args, kwargs), is_recorded=recorded)
        return None

    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See whether a backward reaches what the attention gave."""
        if not torch.compiler.is_compiling() and self.is_armed:
            taken, self._last = self._last, None
            output = result[0] if isinstance(result, tuple) else result
            _mark_when_reached(taken, output)
            self._follow_slopes(taken, output, lambda gradient: _before_projection(module, gradient))

    _last: _Forward | None = None

    def _follow_slopes(self, taken: _Forward | None, tensor: Any, gradient_of: Callable[[Tensor], Tensor]) -> None:
        """Read the gradient of a tensor of a forward that was taken."""
        if self._slopes is None or taken is None:
            return
        outputs, taken.outputs = taken.outputs, None
        if taken.is_recorded and outputs is not None and isinstance(tensor, Tensor):
            self._slopes.follow(tensor, outputs, taken.first_sequence, gradient_of)

    def _receive(self, outputs: Tensor, *, is_recorded: bool) -> None:
        """Take what a compiled graph hands over."""
        if self.is_armed:
            self._take(lambda: outputs, is_recorded=is_recorded, is_compiled=True)

    def _take(self, outputs: Callable[[], Any], *, is_recorded: bool, is_compiled: bool = False) -> _Forward | None:
        """Take the outputs of one forward, if it is one that is read."""
        with self._lock:
            try:
                return self._take_one(outputs, is_recorded, is_compiled)
            except Exception as error:
                self.failure = f"its head outputs cannot be captured ({type(error).__name__}: {error})"
                return None

    def _take_one(self, outputs: Callable[[], Any], is_recorded: bool, is_compiled: bool) -> _Forward | None:
        if is_inferring_shapes():
            return None
        self.has_run = True
        self.was_compiled |= is_compiled
        self.was_eager |= not is_compiled
        backward = torch._C._current_graph_task_id()
        if backward != -1 and (self._has_recorded_outside if is_compiled else is_recomputing()):
            return None
        if not is_recorded and (self.training_only or self.has_recorded):
            if self.layer.output_projection is not None and not is_compiled:
                self._remember_padding(outputs())
            return None
        if is_recorded and not self.has_recorded:
            self.has_recorded = True
            self._forwards.clear()
        self._has_recorded_outside |= is_recorded and backward == -1
        return self._keep(outputs(), is_recorded, backward, is_compiled=is_compiled)

    def _keep(self, outputs: Tensor, is_recorded: bool, backward: int, *, is_compiled: bool) -> _Forward | None:
        H, width = self.layer.num_heads, self.layer.value_dim
        if outputs.is_nested:
            self.failure = "nested tensors are not captured"
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(outputs):
            self.failure = "what runs within torch.func or torch.vmap is not captured"
            return None
        outputs = _features_last(outputs, self.layer.output_projection)
        if outputs.shape[-1] != H * width:
            outputs = as_part(outputs, self.layer.output_projection)
        if outputs.shape[-1] != H * width:
            self.failure = f"its output projection received {outputs.shape[-1]} features, expected {H} x {width}"
            return None
        shape = tuple(outputs.shape[:-1])
        frames = calls_going_on()
        padding = self._find_padding(shape, frames, backward)
        if is_compiled and self._may_hide_masks(padding, frames):
            padding = Padding(None, "masks that are made or handed on inside a compiled graph are not seen")
        self.doubt = self.doubt or padding.doubt
        padded = None if padding.padded is None else padding.padded.detach().to(outputs.device)
        batch = math.prod(shape[:-1])
        first = self._first_sequence(batch, frames, backward)
        self._merge()
        shares = shared_out([*(one.sample.seen for one in self._forwards), batch * shape[-1]], self._max_tokens)
        for one, share in zip(self._forwards, shares):
            one.sample = one.sample.thinned(share)
        sample = sample_tokens(outputs, max(2, shares[-1]), padded=padded, first_sequence=first)
        taken = _Forward(sample.thinned(shares[-1]), is_recorded=is_recorded)
        if self._slopes is not None and is_compiled:
            self._slopes.compiled()
        elif self._slopes is not None:
            taken.outputs, taken.first_sequence = outputs, first
        self._forwards.append(taken)
        return taken

    def _merge(self) -> None:
        """Join forwards of which nothing more will be learned, as there may be thousands."""
        if len(self._forwards) < _SEPARATE:
            return
        settled = [one for one in self._forwards if one.is_reached or not one.is_recorded]
        if settled:
            together = _Forward(joined([one.sample for one in settled]), is_recorded=settled[0].is_recorded)
            together.is_reached = settled[0].is_reached
            self._forwards = [together, *(one for one in self._forwards if one not in settled)]

    def _find_padding(self, shape: tuple[int, ...], frames: Sequence[Frame], backward: int) -> Padding:
        if self.padding_mask is not None:
            padded = fit_padding(self.padding_mask.bool(), shape)
            given = f"`padding_mask` has the shape {tuple(self.padding_mask.shape)}, and the tokens have {shape}"
            return Padding(padded, given if padded is None else None)
        if backward != -1:  # of the modules around, only some run again
            for one in frames:
                known = self._first_times.get(_place(one.first))
                if known is not None:
                    return known
        return find_padding(shape, frames, path=self.layer.name, choice=self._padding)

    def _may_hide_masks(self, padding: Padding, frames: Sequence[Frame]) -> bool:
        """Whether modules around the attention take masks, and none of the calls that can be seen does."""
        if self._padding != "auto" or self.padding_mask is not None or padding.padded is not None or padding.doubt:
            return False
        return self.takes_masks and not any(takes_masks(one.module) for one in frames)

    def _remember_padding(self, outputs: Tensor) -> None:
        """Keep what is known of the padding now, for when the forward is repeated within the backward."""
        if outputs.is_nested or len(self._first_times) > _FIRST_TIMES:
            return
        shape = tuple(_features_last(outputs, self.layer.output_projection).shape[:-1])
        frames = calls_going_on()
        padding = find_padding(shape, frames, path=self.layer.name, choice=self._padding)
        self._first_times.update({_place(one.first): padding for one in frames if isinstance(one.first, Tensor)})

    def _first_sequence(self, batch: int, frames: Sequence[Frame], backward: int) -> int:
        """Number the sequences: those of one call of the model are the same, however often it uses the layer."""
        given = frames[-1].first if frames else None
        for known, size, first in self._sequences if batch else ():
            if size == batch and (known == backward if isinstance(known, int) else known() is given is not None):
                return first
        first, self._num_sequences = self._num_sequences, self._num_sequences + batch
        if backward != -1:
            self._sequences.append((backward, batch, first))
        elif given is not None:
            self._sequences = [one for one in self._sequences if isinstance(one[0], int) or one[0]() is not None]
            self._sequences.append((weakref.ref(given), batch, first))
        return first

    def _take_in_graph(
        self, passed: Tensor, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if type(outputs) is not Tensor:  # the operator knows no other kinds, and would end the forward
            return None
        handed_on = take_in_graph(passed, outputs, self._recorded if torch.is_grad_enabled() else self._unrecorded)
        # The attention looks whether query, key and value are one: they stay so.
        return (
            tuple(handed_on if value is passed else value for value in args),
            {name: handed_on if value is passed else value for name, value in kwargs.items()},
        )


_SEPARATE = 16  # forwards that are kept apart
_FIRST_TIMES = 1024


def _modules_around(module: nn.Module, model: nn.Module | None) -> list[nn.Module]:
    """A module and those that it is in, outwards to the model."""
    parents: dict[int, nn.Module] = {}
    for around in () if model is None else model.modules():
        for child in around.children():
            parents.setdefault(id(child), around)
    found = [module]
    while (outer := parents.get(id(found[-1]))) is not None and not any(outer is one for one in found):
        found.append(outer)
    return found


def _place(tensor: Any) -> tuple[int, torch.Size]:
    """What tells a tensor from others that are alive."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta" or tensor.is_nested:
        return 0, torch.Size()
    return tensor.data_ptr(), tensor.shape


def _mark_when_reached(taken: _Forward | None, outputs: Any) -> None:
    """Take note if a backward reaches a forward; its gradient is left as it is."""
    if taken is None or not isinstance(outputs, Tensor) or not outputs.requires_grad:
        return
    engine: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(engine, "compiled_autograd_enabled", False):  # which would be compiled anew
        return
    weak = weakref.ref(taken)

    def mark(_: Tensor) -> None:
        found = weak()
        if found is not None:
            found.is_reached = True

    outputs.register_hook(mark)  # type: ignore[no-untyped-call]


def _before_projection(module: nn.Module, gradient: Tensor) -> Tensor:
    """Take the gradient of what `nn.MultiheadAttention` gives back to what goes into its output projection."""
    attention: Any = module
    weight = read_tensor(attention.out_proj, "weight")
    if weight is None:
        raise ValueError("its output projection has no weight")
    gradient = gradient if attention.batch_first or gradient.dim() < 3 else gradient.transpose(0, 1)
    return gradient @ weight.detach().to(gradient.dtype)


def _features_last(outputs: Tensor, projection: nn.Module | None) -> Tensor:
    """Read what a convolution is given, ``(batch, features, ...)``, as ``(batch, positions, features)``."""
    dim = -1 if projection is None else feature_dim(projection)
    return outputs if dim == -1 else outputs.flatten(dim + 1).mT


def _recompute_unseen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute head outputs unseen by function modes, such as the one that observes the model's own attention."""
    with torch._C.DisableTorchFunction():
        return recompute_head_outputs(module, *args, **kwargs)  # type: ignore[arg-type]


@torch.no_grad()
def recompute_head_outputs(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Tensor:
    """Compute what `nn.MultiheadAttention` passes to its output projection, without attention dropout.

    Args:
        module: the attention.
        query: as its forward takes it, and so are all the others.
        key: see `query`.
        value: see `query`.
        key_padding_mask: see `query`.
        need_weights: not used.
        attn_mask: see `query`.
        average_attn_weights: not used.
        is_causal: see `query`.

    Returns:
        ``(batch, length, H * d_v)``, or ``(length, H * d_v)`` if the query has no batch dimension.
    """
    is_batched = query.dim() == 3
    if module.batch_first and is_batched:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    identity = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
    separate = not module._qkv_same_embed_dim
    # In a graph nothing can be read apart, and the forward has the same parametrization in it.
    read: Any = getattr if torch.compiler.is_compiling() else read_tensor
    outputs, _ = F.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        read(module, "in_proj_weight"),
        read(module, "in_proj_bias"),
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        identity,
        None,
        training=False,
        key_padding_mask=key_padding_mask,
        need_weights=False,
        attn_mask=attn_mask,
        use_separate_proj_weight=separate,
        q_proj_weight=read(module, "q_proj_weight"),
        k_proj_weight=read(module, "k_proj_weight"),
        v_proj_weight=read(module, "v_proj_weight"),
        is_causal=is_causal,
    )
    return outputs.transpose(0, 1) if is_batched else outputs


def _is_torch_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)
