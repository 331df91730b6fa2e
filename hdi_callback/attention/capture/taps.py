"""`Taps`: capture of head outputs on armed steps.

The forwards that train are read: those that autograd records, and of these only those that a backward reached, if it
reached any. A recomputation by activation checkpointing is not counted as another forward; if the forward itself ran
without autograd, its recomputation is read. All forwards of a step are read, up to a bounded number of
tokens in all.

A tap is a forward-pre-hook with a flag. As long as it is not known whether the model is compiled, the hooks stay on it;
once a forward was captured outside of a compiled graph they are installed only on armed steps.

In a compiled graph a custom operator takes the sample and returns its input unchanged. So nothing is
traced that depends on the number of tokens, and nothing is written to Python objects, which inside a checkpointed
region would end compilation for good. A flag is all that the graph has to guard: installed before the first
compiled call, a tap costs no graph break and one recompilation. Where there must be no recompilation the flag stays as
it is.

Where the output projection is a convolution of kernel size one, each image is one sequence, of all its positions.

`nn.MultiheadAttention` uses its output projection without calling it. There the tap sits on the attention itself and
computes the head outputs from its inputs, through torch's own function with the identity in place of the output
projection. They are therefore those without attention dropout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType

from torch import Tensor, nn
from typing_extensions import Self

from hdi_callback.attention.capture.padding import PaddingChoice, takes_masks
from hdi_callback.attention.capture.slopes import SlopeReducer
from hdi_callback.attention.capture.tap import HEAD_OUTPUTS, Capture, Subject, Tap
from hdi_callback.attention.compiled import may_recompile
from hdi_callback.attention.hooks import Handle, Hooks, observe_calls
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.layer.torch_attention import is_torch_attention
from hdi_callback.guard import attempt_each

__all__ = ["Capture", "Taps"]


class Taps(Hooks):
    """Capture the head outputs of layers, on armed steps only.

    Args:
        layers: the layers to tap; those without a known output projection are named in `absent`.
        max_tokens: largest number of tokens kept per layer.
        model: the model around the layers, whose masks show padding.
        padding: how padding is known: ``"auto"`` from masks, a number for the token that is padding, a function that
            takes the arguments of the model and returns ``(batch, length)``, true where a token is padding; `None` to
            count every token.
        subject: what is captured.
        reduce_slopes: computes slopes from head outputs and their gradients; these are not read if it is `None`.

    Attributes:
        passed_over: names of layers that are not captured from the next `arm` on.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        max_tokens: int = 2048,
        model: nn.Module | None = None,
        padding: PaddingChoice = "auto",
        subject: Subject = HEAD_OUTPUTS,
        reduce_slopes: SlopeReducer | None = None,
    ) -> None:
        self._subject, self._reduce_slopes = subject, reduce_slopes
        self._taps: dict[str, Tap] = {}
        self._max_tokens, self._padding = max_tokens, padding
        self._never: dict[str, str] = {}
        self.passed_over: Collection[str] = frozenset()
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
            self._taps[layer.name] = Tap(layer, self._max_tokens, self._padding, self._subject, self._reduce_slopes)
        for tap in self._taps.values():
            tap.takes_masks = any(map(takes_masks, _modules_around(tap.layer.module, self._model)))
        all_layers = [tap.layer for tap in self._taps.values()]
        projections = Counter(id(one.output_projection) for one in all_layers if one.output_projection is not None)
        for layer in all_layers:
            if "output" not in layer.slices or (
                layer.output_projection is None and not is_torch_attention(layer.module)
            ):
                self._never[layer.name] = f"its {self._subject.projection} is not known"
            elif projections[id(layer.output_projection)] > 1:
                self._never[layer.name] = f"it shares its {self._subject.projection} with another layer"
        super().suspend()
        self._suspended = []  # there are others now
        self.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def captures(self) -> Mapping[str, Capture]:
        """Samples captured since `arm`: layer name -> sample."""
        found = {name: tap.captured(self._reads_all) for name, tap in self._taps.items()}
        return {name: capture for name, capture in found.items() if capture is not None}

    @property
    def absent(self) -> Mapping[str, str]:
        """Layers that could not be captured: name -> reason."""
        failed = {name: tap.failure for name, tap in self._taps.items() if tap.failure is not None}
        unread = {
            name: "it ran only without autograd, and only training forwards are captured"
            for name, tap in self._taps.items()
            if tap.is_empty(self._reads_all) and tap.has_run
        }
        return {**self._never, **unread, **failed}

    @property
    def missed(self) -> Sequence[str]:
        """Layers that could have been captured and did not run, though nothing failed."""
        explained, reads_all = {*self.absent, *self.passed_over}, self._reads_all
        return [name for name, tap in self._taps.items() if tap.is_empty(reads_all) and name not in explained]

    @property
    def doubts(self) -> Mapping[str, str]:
        """Layers with a mask that was observed and could not be read: name -> reason."""
        return {name: tap.doubt for name, tap in self._taps.items() if tap.doubt is not None}

    @property
    def was_armed(self) -> bool:
        """Whether a forward was to be captured since the last `release`."""
        return self._is_armed

    @property
    def has_run(self) -> bool:
        """Whether a layer that is captured has run since `arm`."""
        return any(tap.has_run for tap in self._taps.values())

    @property
    def is_limited(self) -> bool:
        """Whether a capture would need a recompilation that is not allowed."""
        return self._was_limited

    def arm(self, *, training_only: bool = False, padding_mask: Tensor | None = None) -> None:
        """Capture the forwards of every layer from now on; forgets what was captured before.

        Args:
            training_only: skip forwards that autograd does not record, even if there are no others.
            padding_mask: ``(batch, length)``, true where a token of these forwards is padding.
        """
        self._is_armed = True
        for name, tap in self._taps.items():
            tap.forget()
            tap.is_armed = name not in self._never and name not in self.passed_over
            tap.training_only, tap.padding_mask = training_only, padding_mask
        if not self._is_suspended:
            if self._is_eager:  # installed again, so that it runs after hooks of the user
                super().suspend()
            super().resume()
        self._mark_graphs(True)
        self._was_limited = self._is_limited

    def disarm(self) -> None:
        """Capture nothing more, and keep what was captured."""
        for tap in self._taps.values():
            tap.is_armed = False

    def release(self) -> None:
        """Discard the captures."""
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

    def skip_forward(self) -> None:
        """Switch sampling in compiled graphs off, before a forward that is not to be captured.

        Not done by `release`, since until then recompilation may be forbidden.
        """
        if not self._is_armed and any(tap.is_in_graph for tap in self._taps.values()):
            self._mark_graphs(False)

    def remove(self) -> None:
        """Remove the hooks and discard the captures; calling it again does nothing."""
        attempt_each([self.suspend, self.release])

    def suspend(self) -> None:
        """Remove the hooks until `resume`."""
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
        """Switch sampling in compiled graphs on or off; each change may recompile them."""
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
