"""`OutputCapture`: the head outputs of armed forwards, and why those of some layers are missing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from hdi_callback.attention import AttentionLayer, Taps
from hdi_callback.attention.capture.padding import PaddingChoice
from hdi_callback.attention.capture.slopes import SlopeReducer
from hdi_callback.attention.fast_path import takes_fast_path
from hdi_callback.monitoring.absent import FOUND_LATE, Absent, absence_of, listed
from hdi_callback.monitoring.layers import WatchedLayers
from hdi_callback.monitoring.metrics import COVARIANCE
from hdi_callback.monitoring.monitor.collected import Collected
from hdi_callback.monitoring.warn_once import WarnOnce

_NO_RECOMPILATION = "they need a graph of their own, and torch.compile must not or should not compile another one"
_REPLACED = (
    "its output projection is no longer part of the model, as after an adapter was unloaded or merged; a new monitor "
    "finds its replacement"
)
_FAST_PATH = (
    "in evaluation mode the nn.TransformerEncoderLayer around it takes torch's fast path, which computes attention "
    "without calling it; torch.backends.mha.set_fastpath_enabled(False) switches that off, which changes the last "
    "digits of what it computes"
)
_UNCALLED = (
    "its attention ran without calling its output projection, whose weight it uses directly, as by "
    "torch.nn.functional.linear"
)


class OutputCapture(Collected):
    """Capture head outputs, and report which are missing.

    Args:
        layers: the layers that are watched.
        max_tokens: largest number of tokens kept per layer.
        model: the model around them.
        padding: how padding is known.
        warn_once: warns once of each kind of failure.
        reduce_slopes: reduces gradients at head outputs to what is kept; `None` to capture none.
    """

    def __init__(
        self,
        layers: WatchedLayers,
        *,
        max_tokens: int,
        model: nn.Module,
        padding: PaddingChoice,
        warn_once: WarnOnce,
        reduce_slopes: SlopeReducer | None,
    ) -> None:
        self._layers, self._model, self._warn_once = layers, model, warn_once
        self.taps = Taps(layers.all, max_tokens=max_tokens, model=model, padding=padding, reduce_slopes=reduce_slopes)
        self._uncalled: set[str] = set()  # layers whose output projection is used without being called
        self._tap()

    def _tap(self) -> None:
        self._tapped = [layer for layer in self._layers.all if layer.name not in self.taps.absent]

    def add(self, layers: Sequence[AttentionLayer], absent: Absent) -> None:
        """Capture further layers from the next armed forward on.

        Args:
            layers: layers with names of their own.
            absent: notes what this reading lacks of them.
        """
        self.taps.add(layers)
        self._tap()
        for layer in layers:
            absent.reasons[outputs_of(layer.name)] = self.taps.absent.get(layer.name, FOUND_LATE)

    def verified(self, ran: Collection[str]) -> None:
        """Note, after verification, the layers that ran without calling their output projection.

        Args:
            ran: names of the layers that ran.
        """
        self._uncalled = set(self.taps.missed).intersection(ran)

    def pending(self) -> set[str]:
        """Names of armed layers that have not run yet."""
        if not self.taps.was_armed:
            return set()
        return set(self.taps.missed) - self._layers.removed

    def collect(self, names: Collection[str], pending: Collection[str], absent: Absent) -> None:
        """Collect the captures of some layers for the next measurement.

        Args:
            names: of these layers.
            pending: layers that may still run, which are not reported yet.
            absent: notes what was not captured.
        """
        self.taps.disarm()
        self._captures = None
        if self.taps.was_armed:
            self._captures = {name: capture for name, capture in self.taps.captures.items() if name in names}
            tapped = {layer.name for layer in self._tapped}
            for name, reason in self.taps.absent.items():
                if name in tapped and name in names:
                    absent.leave_out(outputs_of(name), reason, kind="capturing")
                elif name not in tapped:  # known from the start
                    absent.reasons[outputs_of(name)] = reason
            missed = [name for name in self.taps.missed if name in names and name not in self._layers.removed]
            if self.taps.is_limited:
                absent.reasons.update({outputs_of(name): _NO_RECOMPILATION for name in missed})
                self._warn_once.warn(
                    "no recompilation", f"Head outputs of {listed(missed)} are absent: {_NO_RECOMPILATION}."
                )
                missed = []
            absent.reasons.update({outputs_of(name): self._why_missed(name) for name in missed})
            if absent_now := [name for name in missed if name not in pending]:
                self._warn_of_missed(absent_now)
            self._warn_of_padding(names)
        self.taps.release()

    def _why_missed(self, name: str) -> str:
        layer = self._layers.named(name)
        projection = layer.output_projection
        if projection is not None and projection not in set(self._model.modules()):
            return _REPLACED
        if name not in self._uncalled and takes_fast_path(layer.module, self._model):
            return _FAST_PATH
        return _UNCALLED if name in self._uncalled else "no call of its output projection was captured"

    def _warn_of_padding(self, names: Collection[str]) -> None:
        doubts = {name: why for name, why in self.taps.doubts.items() if name in names}
        if doubts:
            self._warn_once.warn(
                "padding",
                f"The padding tokens of {listed(list(doubts))} are not known, so that all tokens are counted: "
                f"{next(iter(doubts.values()))}. Pass padding=..., or padding=None if there is no padding.",
            )

    def _warn_of_missed(self, names: Sequence[str]) -> None:
        for reason in (_REPLACED, _UNCALLED, _FAST_PATH):
            if alike := [name for name in names if self._why_missed(name) == reason]:
                self._warn_once.warn(
                    reason,
                    f"No head outputs of {listed(alike)} were captured, so their covariance is absent; weights are "
                    f"read all the same: {reason}.",
                )
        names = [name for name in names if self._why_missed(name) not in (_REPLACED, _UNCALLED, _FAST_PATH)]
        if not names:
            return
        if len(names) == len(self._layers.all):
            what = "No head outputs were captured"
        else:
            what = f"No head outputs of {listed(names)} were captured"
        self._warn_once.warn(
            "nothing captured",
            f"{what} in a forward that was to be captured, so their covariance is absent there; weights are read all "
            "the same. Either it was not called in that forward, or that ran outside of `with heads.step():`, or "
            "it was compiled and called before the monitor was made: then make the monitor before the first call, or "
            "write torch.compiler.reset() after making it.",
        )


def outputs_of(name: str) -> str:
    """Key of a layer's head outputs in `Reading.absent`.

    Args:
        name: of the layer.

    Returns:
        See `absence_of`.
    """
    return absence_of(COVARIANCE, name)
