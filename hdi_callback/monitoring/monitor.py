"""`HeadDiversityMonitor`: arm, capture, measure. It knows models and steps, and no trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from hdi_callback.attention import ROLES, AttentionLayer, Capture, Refusal, Role, Taps, survey
from hdi_callback.core import HeadCovariance, head_covariance, head_diversity
from hdi_callback.errors import MisconfigurationError, MonitoringWarning, UnsupportedAttentionWarning
from hdi_callback.monitoring.faults import Faults
from hdi_callback.monitoring.metrics import COVARIANCE, METRICS, choose_metrics
from hdi_callback.monitoring.readings import Measurement, Reading

Method = Literal["whiten", "svd", "exact"]

_CHUNK_BYTES = 512 * 2**20


class HeadDiversityMonitor:
    """Measure the head diversity of a model, reading by reading, without touching its training.

    A reading is what was measured at one step: the diversity of the heads' weights, and the covariance of the head
    outputs if a forward was armed. Between readings the hooks do nothing. Use it as a context manager, so that the
    hooks leave with it; install it before the first call of a compiled model.

    Args:
        model: any module that contains attention layers.
        metrics: names of metrics (see `METRICS`); they decide which weights are read and whether head outputs are
            captured. The key weights always are.
        include: patterns of layer names to watch (``"encoder.*"``); all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.
        strict: make a model without any readable attention layer an error instead of a warning.

    Raises:
        MisconfigurationError: if an argument cannot work, or nothing can be watched and `strict` is set.

    Example:
        >>> import torch
        >>> model = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 10, 32)
        >>> with HeadDiversityMonitor(torch.nn.ModuleDict({"attn": model})) as monitor:
        ...     monitor.arm()
        ...     _ = model(x, x, x)
        ...     record = monitor.measure(step=0).record()
        >>> sorted(record.scalars(["hdi", "head_correlation"]))
        ['hdi/attn', 'hdi/mean', 'hdi/min', 'head_correlation/attn']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        metrics: Sequence[str] | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        max_tokens: int = 2048,
        rank_tol: float = 1e-6,
        method: Method = "whiten",
        strict: bool = False,
    ) -> None:
        check_arguments(max_tokens=max_tokens, rank_tol=rank_tol, method=method)
        self.metrics = choose_metrics(metrics)
        sources = {METRICS[name].source for name in self.metrics}
        self._roles = tuple(role for role in ROLES if role == "key" or role in sources)
        # Standard errors cost as much again as all the rest, so they are computed when asked for.
        self._wants_errors = any(name.endswith("_error") for name in self.metrics)
        self._rank_tol, self._method = rank_tol, method
        found = survey(model, include=include, exclude=exclude)
        self.layers: tuple[AttentionLayer, ...] = tuple(found.layers)
        self.refused: tuple[Refusal, ...] = tuple(found.refused)
        self._say_what_is_left_out(model, strict)
        self.faults = Faults()
        self._taps = Taps(self.layers, max_tokens=max_tokens) if COVARIANCE in sources else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks and release what was captured; calling it again does nothing."""
        if self._taps is not None:
            self._taps.remove()

    def arm(self) -> None:
        """Capture the head outputs of the next forward, for the next `measure`."""
        if self._taps is not None:
            self._taps.arm()

    def disarm(self) -> None:
        """Stop capturing, and keep what was captured for the next `measure`."""
        if self._taps is not None:
            self._taps.disarm()

    def suspend(self) -> None:
        """Take the hooks off for an evaluation, so that it runs exactly as without a monitor."""
        if self._taps is not None:
            self._taps.suspend()

    def resume(self) -> None:
        """Put the hooks back after `suspend`."""
        if self._taps is not None:
            self._taps.resume()

    def measure(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> Reading:
        """Measure the weights as they are now, and the head outputs captured since `arm`.

        Does not wait for the device; `Reading.record` does.

        Args:
            step: optimizer steps taken so far.
            epoch: the epoch, if there are epochs.
            axis: position on the trainer's own logging axis, if it differs from `step`.

        Returns:
            The reading. What could not be measured is named in `Reading.absent`, with the reason.
        """
        absent: dict[str, str] = {}
        measurements: list[Measurement] = []
        for role in self._roles:
            measurements += self._measure_weights(role, absent)
        if self._taps is not None:
            self._taps.disarm()
            measurements += self._measure_outputs(self._taps, absent)
            self._taps.release()
        names = tuple(layer.name for layer in self.layers)
        return Reading(step, names, tuple(measurements), absent, epoch, axis)

    @torch.no_grad()
    def _measure_weights(self, role: Role, absent: dict[str, str]) -> list[Measurement]:
        groups: dict[tuple[torch.Size, torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for layer in self.layers:
            try:
                weight = layer.weight(role).detach()
            except Exception as error:
                self._leave_out(absent, layer.name, f"its {role} weight cannot be read ({error})")
                continue
            groups.setdefault((weight.shape, weight.device, weight.dtype), []).append((layer.name, weight))
        measurements = []
        for (_, device, _), members in groups.items():
            for chunk in _chunks(members):
                names = tuple(name for name, _ in chunk)
                try:
                    # Under the user's autocast the products would run in half precision.
                    with _without_autocast(device):
                        stacked = torch.stack([weight for _, weight in chunk])
                        values = head_diversity(stacked, rank_tol=self._rank_tol, method=self._method)
                except Exception as error:
                    for name in names:
                        self._leave_out(absent, name, f"its {role} weight cannot be measured ({error})")
                else:
                    measurements.append(Measurement(names, role, values))
        return measurements

    @torch.no_grad()
    def _measure_outputs(self, taps: Taps, absent: dict[str, str]) -> list[Measurement]:
        measured: dict[tuple[int, torch.device], list[tuple[str, HeadCovariance]]] = {}
        captures: dict[str, Capture] = dict(taps.captures)
        if taps.was_armed and not captures and self.layers:
            self.faults.say(
                "nothing captured",
                "No head outputs were captured in a forward that was to be captured, so the covariance term is absent. "
                "If the model is compiled, add the monitor before its first call; weights are read all the same.",
            )
        for layer in self.layers:
            if layer.name not in captures:
                if layer.name in taps.absent:
                    absent[f"head outputs/{layer.name}"] = taps.absent[layer.name]
                continue
            capture = captures[layer.name]
            try:
                with _without_autocast(capture.outputs.device):
                    values = head_covariance(
                        capture.outputs,
                        layer.weight("output").detach(),
                        lengths=capture.lengths if self._wants_errors else None,
                    )
            except Exception as error:
                self._leave_out(absent, f"head outputs/{layer.name}", f"they cannot be measured ({error})")
            else:
                group = (layer.num_heads, values.trace.device)
                measured.setdefault(group, []).append((layer.name, values))
        return [
            Measurement(tuple(name for name, _ in group), COVARIANCE, _stack([values for _, values in group]))
            for group in measured.values()
        ]

    def _leave_out(self, absent: dict[str, str], what: str, reason: str) -> None:
        absent[what] = reason
        self.faults.say(what, f"{what}: {reason}. It is left out of the readings; training goes on.")

    def _say_what_is_left_out(self, model: nn.Module, strict: bool) -> None:
        for refusal in self.refused:
            warnings.warn(refusal.message, UnsupportedAttentionWarning, stacklevel=4)
        if self.layers:
            return
        kinds = sorted({type(module).__name__ for module in model.modules()})
        message = (
            f"No attention layer was found whose heads can be read in {type(model).__name__}, so there is nothing to "
            f"watch. Its modules are of these types: {', '.join(kinds)}. Describe the attention with `register_layout`."
        )
        if strict:
            raise MisconfigurationError(message)
        warnings.warn(message, MonitoringWarning, stacklevel=4)


def check_arguments(*, max_tokens: int, rank_tol: float, method: str) -> None:
    """Check what a monitor is asked for.

    Args:
        max_tokens: must be at least 2.
        rank_tol: must lie in (0, 1).
        method: must be ``"whiten"``, ``"svd"`` or ``"exact"``.

    Raises:
        MisconfigurationError: if one of them cannot work; says what to write instead.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 2:
        raise MisconfigurationError(
            f"`max_tokens` must be a whole number of at least 2, got {max_tokens!r}: write 2048."
        )
    if not 0 < rank_tol < 1:
        raise MisconfigurationError(f"`rank_tol` must lie between 0 and 1, got {rank_tol!r}: write 1e-6.")
    if method not in ("whiten", "svd", "exact"):
        raise MisconfigurationError(f'`method` must be "whiten", "svd" or "exact", got {method!r}.')


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _stack(results: list[HeadCovariance]) -> HeadCovariance:
    """Join the results of several layers along a new first dimension."""
    return HeadCovariance(
        **{
            item.name: torch.stack([getattr(result, item.name) for result in results])
            for item in fields(HeadCovariance)
        }
    )


def _chunks(members: list[tuple[str, Tensor]]) -> Iterable[list[tuple[str, Tensor]]]:
    """Cut a group into pieces whose stacked copies stay bounded."""
    weight = members[0][1]
    # Bases and their product are kept in float32 or wider beside the copy of the weights.
    per_chunk = max(1, _CHUNK_BYTES // max(1, weight.numel() * 16))
    for start in range(0, len(members), per_chunk):
        yield members[start : start + per_chunk]
