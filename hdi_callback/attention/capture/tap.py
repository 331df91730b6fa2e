"""`Tap`: the hook of one layer, and what it captured of the forwards of one step."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.calls import Frame, is_inferring_shapes, is_recomputing, running_calls
from hdi_callback.attention.capture.graph_operator import Entry, take_in_graph
from hdi_callback.attention.capture.padding import Padding, PaddingChoice, find_padding, fit_padding, takes_masks
from hdi_callback.attention.capture.sampling import TokenSample, joined, sample_tokens, shared_out
from hdi_callback.attention.capture.slopes import NO_BACKWARD, HeadSlopes, SlopeReducer
from hdi_callback.attention.compiled import is_backward_compiled
from hdi_callback.attention.hooks import Arguments
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.layer.projections import feature_dim
from hdi_callback.attention.layer.sharding import as_part
from hdi_callback.attention.layer.torch_attention import before_projection, recompute_head_outputs, recompute_unseen
from hdi_callback.guard import guarded

Pick = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
_SEPARATE = 16  # forwards that are kept apart
_FIRST_TIMES = 1024


@dataclass(frozen=True)
class Capture:
    """A sample of the head outputs of the forwards of one step.

    Attributes:
        outputs: ``(tokens, H, d_v)``, detached; a DTensor where the heads are spread over ranks.
        sequences: ``(tokens,)``, the number of the sequence that each token belongs to.
        num_sequences: how many there are.
        weights: ``(tokens,)``, how many tokens each represents, 0 for padding; `None` if all represent as many.
        num_tokens: number of tokens, padding included, that the sample was taken from.
        slopes: ``(sequences, H)``, how fast the loss grows with a factor on each head, from all tokens; `None` if it is
            not measured, or not known.
        no_slopes: why it is not known.
    """

    outputs: Tensor
    sequences: Tensor
    num_sequences: int
    weights: Tensor | None
    num_tokens: int
    slopes: Tensor | None = None
    no_slopes: str | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence in the sample, without padding; waits for the device."""
        kept = self.sequences if self.weights is None else self.sequences[self.weights > 0]
        return tuple(torch.bincount(kept, minlength=self.num_sequences).tolist())


@dataclass(frozen=True)
class Subject:
    """The tensor of a layer that is captured.

    Attributes:
        what: its name, for reasons.
        projection: name of the map that takes it.
        pick: takes it from the module and its arguments; `None` for the first argument.
    """

    what: str
    projection: str
    pick: Pick | None = None


HEAD_OUTPUTS = Subject("head outputs", "output projection")


@dataclass(eq=False)
class _Forward:
    """The capture of one forward of a layer."""

    sample: TokenSample
    is_recorded: bool
    is_reached: bool = False
    outputs: Tensor | None = None  # of the whole forward, until its gradient is followed
    first_sequence: int = 0


class Tap:
    """The hook of one layer, and what it captured."""

    def __init__(
        self,
        layer: AttentionLayer,
        max_tokens: int,
        padding: PaddingChoice,
        subject: Subject = HEAD_OUTPUTS,
        reduce_slopes: SlopeReducer | None = None,
    ) -> None:
        self.layer, self._subject, self._reduce_slopes = layer, subject, reduce_slopes
        self.is_armed = self.is_in_graph = self.was_compiled = self.was_eager = False
        self.training_only = self.takes_masks = False
        self.padding_mask: Tensor | None = None
        self.failure: str | None = None
        self.doubt: str | None = None
        self._max_tokens, self._padding = max_tokens, padding
        # Two of each, as a graph that autograd records is known when it is traced, not when it runs.
        self._recorded = Entry(lambda outputs: self._take_compiled(outputs, is_recorded=True))
        self._unrecorded = Entry(lambda outputs: self._take_compiled(outputs, is_recorded=False))
        self._lock = threading.Lock()  # replicas of `nn.DataParallel` run at the same time
        self.forget()

    def forget(self) -> None:
        """Discard the samples."""
        self.failure = self.doubt = self.padding_mask = None
        self.has_run = self.has_recorded = self._has_recorded_outside = False
        self._forwards: list[_Forward] = []
        self._sequences: list[tuple[int | weakref.ref[Tensor], int, int]] = []
        self._num_sequences = 0
        self._first_times: dict[tuple[int, torch.Size], Padding] = {}
        self._slopes = None if self._reduce_slopes is None else HeadSlopes(self.layer.num_heads, self._reduce_slopes)

    def captured(self, reads_all: bool) -> Capture | None:
        """Join the captures of the forwards that are read."""
        if self.failure is not None:
            return None
        chosen = self._chosen(reads_all)
        if not chosen:
            return None
        sample = joined([forward.sample for forward in chosen])
        outputs = sample.rows.view(-1, self.layer.num_heads, self.layer.value_dim)
        slopes = None if self._slopes is None else self._slopes.total()
        if self.layer.head_order:
            order = list(self.layer.head_order)
            outputs, slopes = outputs[:, order], None if slopes is None else slopes[:, order]
        why = NO_BACKWARD if self._slopes is None else self._slopes.failure or NO_BACKWARD
        return Capture(outputs, sample.sequences, self._num_sequences, sample.weights, sample.num_tokens, slopes, why)

    def is_empty(self, reads_all: bool) -> bool:
        """Whether it took nothing, and knows no reason."""
        return self.failure is None and not self._chosen(reads_all)

    def _chosen(self, reads_all: bool) -> list[_Forward]:
        forwards = [forward for forward in self._forwards if forward.is_recorded or reads_all]
        return [forward for forward in forwards if forward.is_reached] or forwards

    @guarded("capturing")
    def take_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Capture the input of the output projection."""
        # Tested first, as everything that is read before it would be guarded in a compiled graph.
        if torch.compiler.is_compiling():
            if not self.is_in_graph:
                return None
            passed = args[0] if args else next(iter(kwargs.values()))
            return self._take_in_graph(passed, self._input_of(module, args, kwargs), args, kwargs)
        if self.is_armed:
            outputs = self._input_of(module, args, kwargs)
            taken = self._take(lambda: outputs, is_recorded=torch.is_grad_enabled())
            self._follow_backward(taken, outputs, lambda gradient: _features_last(gradient, module))
        return None

    def _input_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._subject.pick is not None:
            return self._subject.pick(module, args, kwargs)
        return args[0] if args else next(iter(kwargs.values()), None)

    @guarded("capturing")
    def take_recomputed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Capture the input of an output projection that the attention does not call."""
        if torch.compiler.is_compiling():
            if not self.is_in_graph:
                return None
            query = args[0] if args else kwargs["query"]
            outputs = recompute_head_outputs(module, *args, **kwargs)  # type: ignore[arg-type]
            return self._take_in_graph(query, outputs, args, kwargs)
        if self.is_armed:
            recorded = torch.is_grad_enabled()
            self._last = self._take(lambda: recompute_unseen(module, args, kwargs), is_recorded=recorded)
        return None

    @guarded("following the backward")
    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Mark the forward if a backward reaches the output of the attention."""
        if not torch.compiler.is_compiling() and self.is_armed:
            taken, self._last = self._last, None
            output = result[0] if isinstance(result, tuple) else result
            self._follow_backward(taken, output, lambda gradient: before_projection(module, gradient))

    _last: _Forward | None = None

    def _follow_backward(self, taken: _Forward | None, tensor: Any, gradient_of: Callable[[Tensor], Tensor]) -> None:
        """Mark a forward once a backward reaches a tensor of it, and read the gradient, which is left as it is."""
        if taken is None or not isinstance(tensor, Tensor):
            return
        if tensor.requires_grad and not is_backward_compiled():
            tensor.register_hook(_Reached(taken, self._failed))  # type: ignore[no-untyped-call]
        outputs, taken.outputs = taken.outputs, None
        if self._slopes is not None and taken.is_recorded and outputs is not None:
            self._slopes.follow(tensor, outputs, taken.first_sequence, gradient_of)

    @guarded("capturing")
    def _take_compiled(self, outputs: Tensor, *, is_recorded: bool) -> None:
        """Capture the outputs that a compiled graph passes on."""
        if self.is_armed:
            self._take(lambda: outputs, is_recorded=is_recorded, is_compiled=True)

    def _take(self, outputs: Callable[[], Any], *, is_recorded: bool, is_compiled: bool = False) -> _Forward | None:
        """Capture the outputs of one forward, if it is one that is read."""
        with self._lock:
            return self._take_one(outputs, is_recorded, is_compiled)

    def _failed(self, work: str, error: Exception) -> None:
        self.failure = f"its {self._subject.what} cannot be captured ({type(error).__name__}: {error})"

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
            self.failure = (
                f"the input of its {self._subject.projection} has {outputs.shape[-1]} features, expected {H} x {width}"
            )
            return None
        shape = tuple(outputs.shape[:-1])
        frames = running_calls()
        padding = self._find_padding(shape, frames, backward)
        if is_compiled and self._may_hide_masks(padding, frames):
            padding = Padding(None, "masks that are made or handed on inside a compiled graph are not observed")
        self.doubt = self.doubt or padding.doubt
        padded = None if padding.padded is None else padding.padded.detach().to(outputs.device)
        batch = math.prod(shape[:-1])
        first = self._first_sequence(batch, frames, backward)
        self._merge()
        shares = shared_out([*(one.sample.num_tokens for one in self._forwards), batch * shape[-1]], self._max_tokens)
        for forward, share in zip(self._forwards, shares):
            forward.sample = forward.sample.thinned(share)
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
        settled = [forward for forward in self._forwards if forward.is_reached or not forward.is_recorded]
        if settled:
            together = _Forward(joined([forward.sample for forward in settled]), is_recorded=settled[0].is_recorded)
            together.is_reached = settled[0].is_reached
            self._forwards = [together, *(forward for forward in self._forwards if forward not in settled)]

    def _find_padding(self, shape: tuple[int, ...], frames: Sequence[Frame], backward: int) -> Padding:
        if self.padding_mask is not None:
            padded = fit_padding(self.padding_mask.bool(), shape)
            doubt = f"`padding_mask` has the shape {tuple(self.padding_mask.shape)}, and the tokens have {shape}"
            return Padding(padded, doubt if padded is None else None)
        if backward != -1:  # of the modules around, only some run again
            for frame in frames:
                known = self._first_times.get(_place(frame.first))
                if known is not None:
                    return known
        return find_padding(shape, frames, path=self.layer.name, choice=self._padding)

    def _may_hide_masks(self, padding: Padding, frames: Sequence[Frame]) -> bool:
        """Whether modules around the attention take masks, and none of the calls that are known does."""
        if self._padding != "auto" or self.padding_mask is not None or padding.padded is not None or padding.doubt:
            return False
        return self.takes_masks and not any(takes_masks(frame.module) for frame in frames)

    def _remember_padding(self, outputs: Tensor) -> None:
        """Keep the facts about padding now, for when the forward is repeated within the backward."""
        if outputs.is_nested or len(self._first_times) > _FIRST_TIMES:
            return
        shape = tuple(_features_last(outputs, self.layer.output_projection).shape[:-1])
        frames = running_calls()
        padding = find_padding(shape, frames, path=self.layer.name, choice=self._padding)
        self._first_times.update({_place(frame.first): padding for frame in frames if isinstance(frame.first, Tensor)})

    def _first_sequence(self, batch: int, frames: Sequence[Frame], backward: int) -> int:
        """Number the sequences: those of one call of the model are the same, however often it uses the layer."""
        first_input = frames[-1].first if frames else None
        for known, size, first in self._sequences if batch else ():
            if size == batch and (known == backward if isinstance(known, int) else known() is first_input is not None):
                return first
        first, self._num_sequences = self._num_sequences, self._num_sequences + batch
        if backward != -1:
            self._sequences.append((backward, batch, first))
        elif first_input is not None:
            self._sequences = [
                sequence for sequence in self._sequences if isinstance(sequence[0], int) or sequence[0]() is not None
            ]
            self._sequences.append((weakref.ref(first_input), batch, first))
        return first

    def _take_in_graph(
        self, passed: Tensor, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if type(outputs) is not Tensor:  # the operator knows no other kinds, and would end the forward
            return None
        passed_on = take_in_graph(passed, outputs, self._recorded if torch.is_grad_enabled() else self._unrecorded)
        # The attention may test whether query, key and value are one tensor: they stay so.
        return (
            tuple(passed_on if value is passed else value for value in args),
            {name: passed_on if value is passed else value for name, value in kwargs.items()},
        )


class _Reached:
    """The hook on a tensor by which a backward marks a forward."""

    def __init__(self, taken: _Forward, failed: Callable[[str, Exception], None]) -> None:
        self._taken, self._failed = weakref.ref(taken), failed

    @guarded("following the backward")
    def __call__(self, gradient: Tensor) -> None:
        if (found := self._taken()) is not None:
            found.is_reached = True


def _place(tensor: Any) -> tuple[int, torch.Size]:
    """Address and shape of a tensor, which no other that is alive has."""
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta" or tensor.is_nested:
        return 0, torch.Size()
    return tensor.data_ptr(), tensor.shape


def _features_last(outputs: Tensor, projection: nn.Module | None) -> Tensor:
    """Read the input of a convolution, ``(batch, features, ...)``, as ``(batch, positions, features)``."""
    dim = -1 if projection is None else feature_dim(projection)
    return outputs if dim == -1 else outputs.flatten(dim + 1).mT
