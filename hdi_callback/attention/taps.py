"""Capture of head outputs on armed steps.

A tap is a forward-pre-hook with a flag. Without the flag it does nothing; with it, it takes a bounded, detached sample
of the output projection's input in the first forward, and lowers the flag, so that neither a second forward nor the
recomputation of activation checkpointing is captured.

In a compiled graph the sample is taken by an operator of its own, which hands its input on unchanged. So nothing is
traced that depends on the number of tokens, and nothing is written to Python objects, which inside a checkpointed
region would put an end to compilation for good. The flag is all that the graph has to guard: installed before the first
compiled call, a tap costs no graph break and one recompilation.

Where the output projection is a convolution of kernel size one, each image is one sequence, of all its positions.

`nn.MultiheadAttention` uses its output projection without calling it. There the tap sits on the attention itself and
computes the head outputs from what it received, through torch's own function with the identity in place of the output
projection. They are therefore those without attention dropout.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from hdi_callback.attention.heads import AttentionLayer
from hdi_callback.attention.hooks import Hooks
from hdi_callback.attention.projections import feature_dim
from hdi_callback.attention.sharding import as_part, on_parts
from hdi_callback.attention.weight_reading import read_tensor


@dataclass(frozen=True)
class Capture:
    """A sample of the head outputs of one forward.

    Attributes:
        outputs: ``(tokens, H, d_v)``, detached; a DTensor where the heads are spread over ranks.
        lengths: how many of the tokens belong to each sequence, in their order.
        seen: number of tokens that the sample was taken from.
    """

    outputs: Tensor
    lengths: tuple[int, ...]
    seen: int


class Taps(Hooks):
    """Capture the head outputs of layers, on armed forwards only.

    Args:
        layers: the layers to tap; those without a known output projection are named in `absent`.
        max_tokens: largest number of tokens kept per layer.
    """

    def __init__(self, layers: Sequence[AttentionLayer], *, max_tokens: int = 2048) -> None:
        self._taps: dict[str, _Tap] = {}
        self._max_tokens = max_tokens
        self._never: dict[str, str] = {}
        self._is_armed = False
        super().__init__()
        self.add(layers)

    def add(self, layers: Sequence[AttentionLayer]) -> None:
        """Tap further layers, from the next `arm` on.

        Args:
            layers: layers with names of their own.
        """
        self._taps.update({layer.name: _Tap(layer, self._max_tokens) for layer in layers})
        all_layers = [tap.layer for tap in self._taps.values()]
        projections = Counter(id(one.output_projection) for one in all_layers if one.output_projection is not None)
        for layer in all_layers:
            if "output" not in layer.slices or (
                layer.output_projection is None and not _is_torch_attention(layer.module)
            ):
                self._never[layer.name] = "its output projection is not known"
            elif projections[id(layer.output_projection)] > 1:
                self._never[layer.name] = "it shares its output projection with another layer"
        self.suspend()
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
        return {name: tap.capture for name, tap in self._taps.items() if tap.capture is not None}

    @property
    def absent(self) -> Mapping[str, str]:
        """Layers that could not be captured: name -> reason."""
        failed = {name: tap.failure for name, tap in self._taps.items() if tap.failure is not None}
        return {**self._never, **failed}

    @property
    def missed(self) -> Sequence[str]:
        """Layers that could have been captured and were not seen, though nothing failed."""
        return [name for name, tap in self._taps.items() if tap.is_empty and name not in self._never]

    @property
    def was_armed(self) -> bool:
        """Whether a forward was to be captured since the last `release`."""
        return self._is_armed

    def arm(self) -> None:
        """Capture the next forward of every layer; forgets what was captured before."""
        self._is_armed = True
        for name, tap in self._taps.items():
            tap.forget()
            tap.is_armed = name not in self._never

    def disarm(self) -> None:
        """Capture nothing more, and keep what was captured."""
        for tap in self._taps.values():
            tap.is_armed = False

    def release(self) -> None:
        """Let go of what was captured."""
        self._is_armed = False
        for tap in self._taps.values():
            tap.forget()
            tap.is_armed = False

    def remove(self) -> None:
        """Take the hooks off and let go of what was captured; calling it again does nothing."""
        self.suspend()
        self.release()

    def _install(self) -> Iterator[RemovableHandle]:
        for name, tap in self._taps.items():
            if name in self._never:
                continue
            if tap.layer.output_projection is not None:
                yield tap.layer.output_projection.register_forward_pre_hook(tap.take_input, with_kwargs=True)
            else:
                yield tap.layer.module.register_forward_pre_hook(tap.take_recomputed, with_kwargs=True)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, _Tap] = weakref.WeakValueDictionary()


# An operator without a result would do, were it not for the compilers of torch before 2.13, which leave it out as dead
# code; so the projection works on what this one hands on.
@torch.library.custom_op("hdi_callback::take", mutates_args=())
def _take(passed: Tensor, outputs: Tensor, number: Tensor) -> Tensor:
    tap = _by_number.get(int(number))
    if tap is not None:
        tap.take(lambda: outputs)
    return passed.clone()


@_take.register_fake
def _(passed: Tensor, outputs: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(passed)


_take.register_autograd(lambda _, gradient: (gradient, None, None))


class _Tap:
    """The hook of one layer, and what it took."""

    def __init__(self, layer: AttentionLayer, max_tokens: int) -> None:
        self.layer = layer
        self.is_armed = False
        self.failure: str | None = None
        self._sampler = Sampler(max_tokens)
        # A tensor, as a graph that is shared by the layers of a model would have to be compiled anew for each number.
        self._number = torch.tensor(next(_numbers))
        _by_number[int(self._number)] = self
        self._rows: Tensor | None = None
        self._shape: tuple[int, ...] = ()

    @property
    def capture(self) -> Capture | None:
        """What was taken in the last armed forward."""
        if self._rows is None:
            return None
        lengths = self._sampler.kept(self._shape)
        rows = self._rows[: sum(lengths)].view(-1, self.layer.num_heads, self.layer.value_dim)
        return Capture(rows, lengths, math.prod(self._shape[:-1]))

    @property
    def is_empty(self) -> bool:
        """Whether it took nothing, and knows no reason."""
        return self._rows is None and self.failure is None

    def forget(self) -> None:
        """Let go of what was taken."""
        self._rows, self.failure = None, None

    def take_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        """Take the input of the output projection."""
        if not self.is_armed:
            return None
        if torch.compiler.is_compiling():
            outputs = args[0] if args else next(iter(kwargs.values()))
            return self._take_in_graph(outputs, outputs, args, kwargs)
        self.take(lambda: args[0] if args else next(iter(kwargs.values())))
        return None

    def take_recomputed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        """Take what the attention would pass to an output projection that it does not call."""
        if not self.is_armed:
            return None
        if torch.compiler.is_compiling():
            query = args[0] if args else kwargs["query"]
            outputs = recompute_head_outputs(module, *args, **kwargs)  # type: ignore[arg-type]
            return self._take_in_graph(query, outputs, args, kwargs)
        self.take(lambda: recompute_head_outputs(module, *args, **kwargs))  # type: ignore[arg-type]
        return None

    def take(self, outputs: Callable[[], Tensor]) -> None:
        """Take the outputs, if the flag is still up, and lower it."""
        if not self.is_armed:
            return
        self.is_armed = False
        try:
            self._keep(outputs())
        except Exception as error:
            self.failure = f"its head outputs cannot be captured ({type(error).__name__}: {error})"

    def _take_in_graph(
        self, passed: Tensor, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        if type(outputs) is not Tensor:  # the operator knows no other kinds, and would end the forward
            return None
        handed_on = torch.ops.hdi_callback.take(passed, outputs.detach(), self._number)
        # The attention looks whether query, key and value are one: they stay so.
        return (
            tuple(handed_on if value is passed else value for value in args),
            {name: handed_on if value is passed else value for name, value in kwargs.items()},
        )

    def _keep(self, outputs: Tensor) -> None:
        H, width = self.layer.num_heads, self.layer.value_dim
        if not outputs.is_nested:
            outputs = _features_last(outputs, self.layer.output_projection)
        if not outputs.is_nested and outputs.shape[-1] != H * width:
            outputs = as_part(outputs, self.layer.output_projection)
        if outputs.is_nested:
            self.failure = "nested tensors are not captured"
        elif outputs.shape[-1] != H * width:
            self.failure = f"its output projection received {outputs.shape[-1]} features, expected {H} x {width}"
        else:
            self._rows, self._shape = on_parts(self._sampler.take, outputs), tuple(outputs.shape)


def _features_last(outputs: Tensor, projection: nn.Module | None) -> Tensor:
    """Read what a convolution is given, ``(batch, features, ...)``, as ``(batch, positions, features)``."""
    dim = -1 if projection is None else feature_dim(projection)
    return outputs if dim == -1 else outputs.flatten(dim + 1).mT


class Sampler:
    """Take tokens spread evenly over all sequences and positions, all of them if they are few.

    Of N tokens it takes floor(j N / P) for j = 0 ... P-1, with P the largest prime up to the limit: of B sequences of
    length T these are the positions T frac(j B / P), which lie evenly in the sequence unless P divides B. A plain
    stride with a common factor would see the same few positions of every sequence.

    Args:
        max_tokens: largest number of tokens to keep, at least 2.
    """

    def __init__(self, max_tokens: int) -> None:
        self._limit = max_tokens

    @functools.cached_property
    def _prime(self) -> int:
        # Asked for only where there are more tokens than the limit, so that a limit without an end costs nothing.
        return next(n for n in range(self._limit, 1, -1) if all(n % f for f in range(2, math.isqrt(n) + 1)))

    def take(self, outputs: Tensor) -> Tensor:
        """Take the sample.

        Args:
            outputs: ``(..., length, features)``.

        Returns:
            ``(tokens, features)``, detached and copied.
        """
        flat = outputs.detach().reshape(-1, outputs.shape[-1])
        seen = flat.shape[0]
        if seen <= self._limit:
            return flat.clone()
        return flat[torch.arange(self._prime, device=flat.device) * seen // self._prime]

    def kept(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Count the tokens of each sequence in the sample.

        Args:
            shape: that of the outputs.

        Returns:
            One number for each sequence, in their order.
        """
        seen = math.prod(shape[:-1])
        if not seen:
            return ()
        length = shape[-2] if len(shape) > 2 else seen
        kept = seen if seen <= self._limit else self._prime
        starts = [-(-start * kept // seen) for start in range(0, seen + 1, length)]
        return tuple(stop - start for start, stop in itertools.pairwise(starts))


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
