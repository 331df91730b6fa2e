"""`HeadDiversityMonitor`: arm, capture, measure. It knows models and steps, and no trainer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from hdi_callback.arguments import shown
from hdi_callback.attention import ROLES, AttentionLayer, Capture, HeadCheck, HeadSearch, Refusal, Role, Taps, survey
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.attention.sharding import Sharding, as_if_whole, is_first_holder, whole
from hdi_callback.attention.wrappers import inner_model, users_name
from hdi_callback.core import HeadCovariance, HeadDiversity, head_covariance, head_diversity
from hdi_callback.core.covariance import HeadMoments, HeadSums
from hdi_callback.errors import (
    HDIError,
    MisconfigurationError,
    MonitoringWarning,
    NothingToWatchError,
    UnsupportedAttentionWarning,
)
from hdi_callback.monitoring.faults import Faults
from hdi_callback.monitoring.metrics import COVARIANCE, METRICS
from hdi_callback.monitoring.ranks import Meeting, Ranks, number_of_processes
from hdi_callback.monitoring.readings import Measurement, Reading
from hdi_callback.monitoring.settings import Method, check_arguments

_NO_RECOMPILATION = "they need a graph of their own, and torch.compile must not or should not compile another one"

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
        strict: make a model without any readable attention layer an error instead of a warning: at once, or at the
            first reading where a real forward may still show the heads of modules that look like attention.
        check_heads: check once, on a few tokens of the first armed forward, that every layer computes attention with
            the heads that were found; a layer that does not is left out from then on, with a warning that shows why.
            Modules that were refused are looked at again there, and watched from then on if it shows their heads.
        process_group: the ranks that measure together, each its share of the weights and its own tokens: ``"auto"`` for
            all of them once `torch.distributed` is initialised, a process group, or `None` for this rank alone.
        padding: how it is known which tokens are padding, whose outputs are left out: ``"auto"`` from the masks that
            attention and the modules around it receive; the number of the token that is padding, among the integers
            that the model is given; a function that takes what the outermost watched module is given, by name, and
            returns ``(batch, length)``, true where a token is padding; `None` to count every token.

    Raises:
        MisconfigurationError: if an argument cannot work, or nothing can be watched and `strict` is set
            (`NothingToWatchError`).

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
        check_heads: bool = True,
        process_group: Any = "auto",
        padding: PaddingChoice = "auto",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise MisconfigurationError(f"`model` must be a torch.nn.Module, got {shown(model)}.")
        checked = check_arguments(
            metrics=metrics, include=include, exclude=exclude, max_tokens=max_tokens, rank_tol=rank_tol, method=method,
            strict=strict, check_heads=check_heads, process_group=process_group, padding=padding,
        )  # fmt: skip
        include, exclude, max_tokens, rank_tol = (
            checked[name] for name in ("include", "exclude", "max_tokens", "rank_tol")
        )
        self.metrics: tuple[str, ...] = checked["metrics"]
        sources = {METRICS[name].source for name in self.metrics}
        self._roles = tuple(role for role in ROLES if role == "key" or role in sources)
        # Standard errors cost as much again as all the rest, so they are computed when asked for.
        self._wants_errors = any(name.endswith("_error") for name in self.metrics)
        self._rank_tol, self._method = rank_tol, method
        self.found_late: frozenset[str] = frozenset()
        with as_if_whole(model) as uncounted:
            found = survey(inner_model(model), include=include, exclude=exclude)
            layers = [replace(layer, name=users_name(layer.name)) for layer in found.layers]
            self.layers = tuple(layer for layer in layers if layer.module not in uncounted)
            self.facts = tuple(layer.facts() for layer in self.layers)
        uncountable = [_uncountable(layer) for layer in layers if layer.module in uncounted]
        self.refused: tuple[Refusal, ...] = (*found.refused, *uncountable)
        self._model, self._sharding = model, Sharding(model)
        self._gone: set[str] = set()
        self._awaited: set[str] = set()
        self._layers_at_once = sys.maxsize
        self._undecided = found.undecided if check_heads else ()
        self._is_strict = strict
        self._say_what_is_left_out()
        self.faults = Faults()
        self._taps = None
        if COVARIANCE in sources:
            self._taps = Taps(self.layers, max_tokens=max_tokens, model=inner_model(model), padding=padding)
        self._tapped = [
            layer for layer in self.layers if self._taps is not None and layer.name not in self._taps.absent
        ]
        self._check = HeadCheck(self.layers) if check_heads else None
        self._search = HeadSearch(self._undecided) if self._undecided else None
        self._late: list[AttentionLayer] = []
        self._is_checked = self._training_only = False
        self._untrue: dict[str, str] = {}
        self._uncalled: set[str] = set()  # layers whose output projection is used without being called
        self._meeting = Meeting(process_group)
        self._subject = self._subject_of(self.layers)

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
        for recorder in (self._check, self._search):
            if recorder is not None:
                recorder.suspend()

    def arm(self, *, training_only: bool = False, padding_mask: Tensor | None = None) -> None:
        """Capture the head outputs of the forwards that follow, for the next `measure`.

        Read are the forwards that train, all that come before `measure`: those that autograd records, without those
        that no backward reaches while it reaches others. If autograd records none of them, they are all read.

        Args:
            training_only: pass over forwards that autograd does not record, even if there are no others.
            padding_mask: ``(batch, length)``, true where a token of these forwards is padding.
        """
        if self._check is not None and not self._is_checked:
            self._check.arm()
            if self._search is not None:
                self._search.arm()
        self._training_only = training_only
        if self._taps is not None:
            self._taps.arm(training_only=training_only, padding_mask=padding_mask)

    def disarm(self) -> None:
        """Stop capturing, and keep what was captured for the next `measure`."""
        if self._taps is not None:
            self._taps.disarm()

    def rest(self) -> None:
        """Make compiled graphs free of samples again, before a forward that is not to be captured."""
        if self._taps is not None:
            self._taps.rest()

    def release(self) -> None:
        """Capture nothing more, and let go of what was captured."""
        if self._taps is not None:
            self._taps.release()

    def suspend(self) -> None:
        """Take the hooks off for an evaluation, so that it runs exactly as without a monitor."""
        if self._taps is not None:
            self._taps.suspend()
        for recorder in (self._check, self._search):
            if recorder is not None:
                recorder.suspend()

    def resume(self) -> None:
        """Put the hooks back after `suspend`."""
        if self._taps is not None:
            self._taps.resume()
        for recorder in (self._check, self._search):
            if recorder is not None:
                recorder.resume()

    def measure(
        self, step: int, *, epoch: int | None = None, axis: int | None = None, is_last_forward: bool = True
    ) -> Reading:
        """Measure the weights as they are now, and the head outputs captured since `arm`.

        Does not wait for the device; `Reading.record` does. In a distributed run every rank calls it at the same
        steps, and every rank gets the whole reading.

        Args:
            step: optimizer steps taken so far.
            epoch: the epoch, if there are epochs.
            axis: position on the trainer's own logging axis, if it differs from `step`.
            is_last_forward: False if forwards of further layers may follow, as when several networks are trained in
                turn; `complete` adds their head outputs to the reading.

        Returns:
            The reading. What could not be measured is named in `Reading.absent`, with the reason.
        """
        absent: dict[str, str] = {}
        has_checked = self._has_checked()
        there = set(self._model.modules())
        self._gone = {layer.name for layer in self.layers if layer.module not in there}
        # Over several ranks all sums are made at once.
        self._awaited = set() if is_last_forward or number_of_processes() > 1 else self._missed()
        captures = self._collect(absent, {layer.name for layer in self.layers})
        with torch.no_grad():
            measurements = self._measure_together(captures, absent, has_checked) or self._measure_alone(
                captures, absent
            )
        names = tuple(layer.name for layer in self.layers)
        if self._late:
            self._tap_late_layers()
        if self._awaited:
            self.arm(training_only=self._training_only)
        return Reading(step, names, tuple(measurements), absent, epoch, axis)

    def _has_checked(self) -> bool:
        """Check the heads once a forward was armed, on every rank at the same reading; True at that reading."""
        if self._check is None or not self._check.is_armed:
            return False
        self._is_checked = True
        with self.faults.contained("checking heads"):
            # A module whose projections are spread over ranks may count the heads of its own rank alone.
            spread = [
                one.name for one in self.layers if any(self._sharding.is_sharded(one, role) for role in one.slices)
            ]
            shown_otherwise = self._check.contradictions(leave_out=spread)
            self._untrue = {
                name: f"a trial with the inputs of the first forward contradicts its heads: {shown}"
                for name, shown in shown_otherwise.items()
            }
        if self._search is not None:
            with self.faults.contained("looking for heads"):
                self._admit(self._search.found())
        if self._untrue:
            shown = "; ".join(f"`{name}`: {reason}" for name, reason in list(self._untrue.items())[:3])
            warnings.warn(
                f"{_listed(list(self._untrue))} left out from now on. {shown}. Describe it with `register_layout`.",
                UnsupportedAttentionWarning,
                stacklevel=4,
            )
        if self._taps is not None:
            self._uncalled = set(self._taps.missed) & self._check.ran
        if not self.layers:
            self._say_that_nothing_is_watched()
        return True

    def _admit(self, layers: Sequence[AttentionLayer]) -> None:
        """Watch further layers: their weights at once, their outputs from the next armed forward on."""
        self._late = [replace(layer, name=users_name(layer.name)) for layer in layers]
        if not self._late:
            return
        places = {module: place for place, module in enumerate(self._model.modules())}
        self.layers = tuple(sorted((*self.layers, *self._late), key=lambda layer: places[layer.module]))
        self.facts = tuple(layer.facts() for layer in self.layers)
        self.found_late = frozenset(layer.name for layer in self._late)
        names = {layer.name for layer in layers}
        self.refused = tuple(refusal for refusal in self.refused if refusal.name not in names)
        self._subject = self._subject_of(self.layers)

    def _tap_late_layers(self) -> None:
        if self._taps is not None:
            self._taps.add(self._late)
            self._tapped = [layer for layer in self.layers if layer.name not in self._taps.absent]
        self._late = []

    def _subject_of(self, layers: Sequence[AttentionLayer]) -> tuple[Any, ...]:
        """Describe what is measured, for ranks to compare."""
        sizes = [(one.name, one.num_heads, one.num_key_heads, one.head_dim, one.value_dim) for one in layers]
        return (self._roles, self.metrics, self._rank_tol, self._method, sizes)

    def _leave_out_alike(self, ranks: Ranks) -> None:
        """Leave out what any rank leaves out, so that all have the same numbers."""
        mine = torch.tensor([layer.name in self._untrue for layer in self.layers], dtype=torch.float64)
        (found,) = ranks.sum([mine], self._device())
        for layer, count in zip(self.layers, found.tolist()):
            if count:
                self._untrue.setdefault(layer.name, "a trial on another rank contradicts its heads")

    @property
    def awaits_forwards(self) -> bool:
        """Whether the last reading lacks head outputs that `complete` may add."""
        return bool(self._awaited)

    def complete(self, reading: Reading, *, is_last_forward: bool = True) -> Reading:
        """Add to the last reading the head outputs of forwards that came after it.

        Args:
            reading: what `measure` gave with ``is_last_forward=False``.
            is_last_forward: False if forwards of further layers may still follow.

        Returns:
            The same reading, with what was captured since.
        """
        awaited = self._awaited
        self._awaited = set() if is_last_forward else awaited & self._missed()
        absent = {key: reason for key, reason in reading.absent.items() if key not in map(_outputs_of, awaited)}
        captures = self._collect(absent, awaited)
        with torch.no_grad():
            found = self._measure_outputs(captures, absent)
        if self._awaited:
            self.arm(training_only=self._training_only)
        return replace(reading, measurements=(*reading.measurements, *found), absent=absent)

    def _missed(self) -> set[str]:
        if self._taps is None or not self._taps.was_armed:
            return set()
        return set(self._taps.missed) - self._gone

    def _collect(self, absent: dict[str, str], names: Collection[str]) -> dict[str, Capture] | None:
        """Take over what the taps of these layers hold; `None` if no forward was to be captured."""
        if self._taps is None:
            return None
        self._taps.disarm()
        captures = None
        if self._taps.was_armed:
            captures = {name: capture for name, capture in self._taps.captures.items() if name in names}
            tapped = {layer.name for layer in self._tapped}
            for name, reason in self._taps.absent.items():
                if name in tapped and name in names:
                    self._leave_out(absent, _outputs_of(name), reason, kind="capturing")
                elif name not in tapped:  # known from the start
                    absent[_outputs_of(name)] = reason
            missed = [name for name in self._taps.missed if name in names and name not in self._gone]
            if self._taps.is_limited:
                absent.update({_outputs_of(name): _NO_RECOMPILATION for name in missed})
                self.faults.say(
                    "no recompilation", f"Head outputs of {_listed(missed)} are absent: {_NO_RECOMPILATION}."
                )
                missed = []
            absent.update({_outputs_of(name): self._why_missed(name) for name in missed})
            if told := [name for name in missed if name not in self._awaited]:
                self._say_what_was_missed(told)
            self._say_what_is_padded(names)
        self._taps.release()
        return captures

    def _why_missed(self, name: str) -> str:
        layer = next(layer for layer in self.layers if layer.name == name)
        if layer.output_projection is not None and layer.output_projection not in set(self._model.modules()):
            return _REPLACED
        return _UNCALLED if name in self._uncalled else "its output projection was not seen to be called"

    def _say_what_is_padded(self, names: Collection[str]) -> None:
        doubts = {} if self._taps is None else {name: why for name, why in self._taps.doubts.items() if name in names}
        if doubts:
            self.faults.say(
                "padding",
                f"Which tokens of {_listed(list(doubts))} are padding is not known, so that all of them are counted: "
                f"{next(iter(doubts.values()))}. Write padding=... to say it, or padding=None if there is none.",
            )

    def _say_what_was_missed(self, names: Sequence[str]) -> None:
        for reason in (_REPLACED, _UNCALLED):
            if alike := [name for name in names if self._why_missed(name) == reason]:
                self.faults.say(
                    reason,
                    f"No head outputs of {_listed(alike)} were captured, so their covariance is absent; weights are "
                    f"read all the same: {reason}.",
                )
        names = [name for name in names if self._why_missed(name) not in (_REPLACED, _UNCALLED)]
        if not names:
            return
        if len(names) == len(self.layers):
            what = "No head outputs were captured"
        else:
            what = f"No head outputs of {_listed(names)} were captured"
        self.faults.say(
            "nothing captured",
            f"{what} in a forward that was to be captured, so their covariance is absent there; weights are read all "
            "the same. Either it was not called in that forward, or it was compiled and called before the monitor was "
            "there: then make the monitor before the first call, or write torch.compiler.reset() after making it.",
        )

    def _measure_alone(self, captures: dict[str, Capture] | None, absent: dict[str, str]) -> list[Measurement]:
        measurements: list[Measurement] = []
        for role in self._roles:
            measurements += self._measure_weights(role, absent, Ranks())
        return measurements + self._measure_outputs(captures, absent)

    def _measure_outputs(self, captures: dict[str, Capture] | None, absent: dict[str, str]) -> list[Measurement]:
        measured: dict[tuple[int, torch.device], list[tuple[str, HeadCovariance]]] = {}
        for layer in self.layers:
            capture = None if captures is None else captures.get(layer.name)
            if capture is None:
                continue
            sequences = (capture.sequences, capture.num_sequences) if self._wants_errors else None
            with self._left_out(absent, layer, COVARIANCE), _without_autocast(capture.outputs.device):
                if len(capture.outputs) < 2:
                    raise HDIError(f"the armed forward had {len(capture.outputs)} tokens, and two are needed")
                weight = self._weight(layer, "output", Ranks())
                outputs = whole(capture.outputs)
                values = head_covariance(outputs, weight, weights=capture.weights, sequences=sequences)
                measured.setdefault((layer.num_heads, values.trace.device), []).append((layer.name, values))
        return [_join(group) for group in measured.values()]

    def _measure_weights(self, role: Role, absent: dict[str, str], ranks: Ranks) -> list[Measurement]:
        """Measure the weights of one role; of several ranks, every one measures its share of the layers."""
        pending: dict[tuple[torch.Size, torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        measurements: list[Measurement] = []
        for place, layer in enumerate(self.layers):
            with self._left_out(absent, layer, role):
                weight = self._weight(layer, role, ranks)  # on every rank, as it may be a collective call
                kind = (weight.shape, weight.device, weight.dtype)
                limit = min(_layers_per_call(weight), self._layers_at_once)
                if place % ranks.size == ranks.rank:
                    pending.setdefault(kind, []).append((layer.name, weight))
                del weight  # else two layers would be whole while the next one is gathered
                if len(pending.get(kind, ())) >= limit:
                    measurements += self._measure_at_once(pending.pop(kind), role, absent)
        for members in pending.values():
            measurements += self._measure_at_once(members, role, absent)
        return measurements

    def _measure_at_once(
        self, members: Sequence[tuple[str, Tensor]], role: Role, absent: dict[str, str]
    ) -> list[Measurement]:
        names = tuple(name for name, _ in members)
        try:
            # Under the user's autocast the products would run in half precision.
            with _without_autocast(members[0][1].device):
                stacked = torch.stack([weight for _, weight in members])
                values = head_diversity(stacked, rank_tol=self._rank_tol, method=self._method)
        except torch.OutOfMemoryError as error:
            # Later readings start with what was left for this one.
            self._layers_at_once = max(1, len(members) // 2)
            reason = f"its {role} weight cannot be measured ({error})"
        except Exception as error:
            reason = f"its {role} weight cannot be measured ({error})"
            return self._leave_all_out(absent, names, reason, f"measuring {type(error).__name__}")
        else:
            return [Measurement(names, role, values)]
        if len(members) == 1:
            return self._leave_all_out(absent, names, reason, "out of memory")
        half = len(members) // 2
        return [
            *self._measure_at_once(members[:half], role, absent),
            *self._measure_at_once(members[half:], role, absent),
        ]

    def _leave_all_out(self, absent: dict[str, str], names: Sequence[str], reason: str, kind: str) -> list[Measurement]:
        for name in names:
            self._leave_out(absent, name, reason, kind)
        return []

    def _weight(self, layer: AttentionLayer, role: Role, ranks: Ranks) -> Tensor:
        if layer.name in self._untrue:
            raise _UntrueError(self._untrue[layer.name])
        if layer.name in self._gone:
            raise HDIError("it is no part of the model any more; a new monitor would see what came in its place")
        if ranks.size == 1 and number_of_processes() > 1 and self._sharding.is_sharded(layer, role):
            raise HDIError("other ranks hold parts of it, and they take no readings with this one")
        weight = self._sharding.weight(layer, role)
        if weight.is_meta and ranks.size > 1:
            raise HDIError("it is on the meta device and holds no numbers")
        return weight

    def _measure_together(
        self, captures: dict[str, Capture] | None, absent: dict[str, str], has_checked: bool
    ) -> list[Measurement] | None:
        """Measure as one of several ranks; `None` if this rank is alone."""
        try:
            ranks = self._meeting.attend(self._subject, self.faults.say)
            if has_checked and ranks.size > 1:
                self._leave_out_alike(ranks)
            return self._add_up(ranks, captures, absent) if ranks.size > 1 else None
        except Exception as error:  # such as a backend that does not know the device; it fails on every rank alike
            self._meeting.part()
            self.faults.tell("measuring head diversity over several ranks", error)
            return None

    # Whatever fails before a sum leaves zeros or NaN in it, so that every rank takes part with the same shapes.
    def _add_up(self, ranks: Ranks, captures: dict[str, Capture] | None, absent: dict[str, str]) -> list[Measurement]:
        """Measure a share of the weights and the tokens at hand, and add them up over the ranks."""
        held = captures or {}
        device = self._device()
        means = self._share_means(ranks, held, device)
        mine = {layer.name for layer in self.layers[ranks.rank :: ranks.size]}
        sheets = [_WeightSheet(role, self.layers, device) for role in self._roles]
        for sheet in sheets:
            sheet.fill(self._measure_weights(sheet.role, sheet.absent, ranks), mine)
            absent.update(sheet.absent)
        sums = self._sum_outputs(ranks, held, means, device, absent)
        flat = [tensor for sheet in sheets for tensor in sheet.tensors()]
        added = iter(ranks.sum(flat + [tensor for item in sums for tensor in _tensors(item)], device))
        measurements = [found for sheet in sheets for found in sheet.read(added)]
        if captures is None:  # this rank was not armed, and so neither were the others
            return measurements
        measured: dict[int, list[tuple[str, HeadCovariance]]] = {}
        for layer, item in zip(self._tapped, sums):
            total = HeadSums(*(next(added) for _ in _tensors(item)))
            if layer.name in self._untrue:
                continue
            measured.setdefault(layer.num_heads, []).append((layer.name, total.covariance()))
            absent.pop(_outputs_of(layer.name), None)  # other ranks may have captured it
        if self._wants_errors:
            self.faults.say(
                "errors over ranks", "Standard errors are not computed over several ranks; they are absent."
            )
        return measurements + [_join(group) for group in measured.values()]

    def _share_means(self, ranks: Ranks, held: Mapping[str, Capture], device: torch.device) -> list[Tensor]:
        """Compute the mean head outputs of each tapped layer over the tokens of all ranks."""
        parts: list[Tensor] = []
        for layer in self._tapped:
            count = torch.zeros((), device=device)
            total = torch.zeros(layer.num_heads, layer.value_dim, device=device)
            if layer.name in held:
                outputs = held[layer.name].outputs
                weights = held[layer.name].weights
                own = HeadMoments.of(whole(outputs), weights)
                if is_first_holder(outputs):
                    count, total = own.count.to(device), (own.count * own.mean).to(device)
            parts += [count, total]
        added = ranks.sum(parts, device)
        return [total / count.clamp_min(1) for count, total in zip(added[::2], added[1::2])]

    def _sum_outputs(
        self,
        ranks: Ranks,
        held: Mapping[str, Capture],
        means: Sequence[Tensor],
        device: torch.device,
        absent: dict[str, str],
    ) -> list[HeadSums]:
        """Add up the tokens at hand about the mean of all; zeros where there are none."""
        wants_overlap = "head_output_overlap" in self.metrics
        sums = []
        for layer, mean in zip(self._tapped, means):
            H = layer.num_heads
            found = HeadSums(
                torch.zeros((), device=device),
                torch.zeros(H, H, device=device),
                torch.zeros(*mean.shape, *mean.shape, device=device) if wants_overlap else None,
            )
            with self._left_out(absent, layer, COVARIANCE), _without_autocast(device):
                # Both may be collective calls, so that every rank makes them.
                weight = self._weight(layer, "output", ranks)
                outputs = whole(held[layer.name].outputs) if layer.name in held else None
                if outputs is not None and is_first_holder(held[layer.name].outputs):
                    found = HeadSums.of(
                        outputs,
                        weight,
                        mean.to(outputs.device),
                        with_scatter=wants_overlap,
                        weights=held[layer.name].weights,
                    )
                del weight, outputs
            sums.append(found)
        return sums

    @contextmanager
    def _left_out(self, absent: dict[str, str], layer: AttentionLayer, source: str) -> Iterator[None]:
        """Leave a layer out of the reading if the block fails."""
        try:
            yield
        except _UntrueError as error:  # which was said once
            absent[_outputs_of(layer.name) if source == COVARIANCE else layer.name] = str(error)
        except Exception as error:
            kind = f"reading {source} {type(error).__name__}"
            if source == COVARIANCE:
                self._leave_out(absent, _outputs_of(layer.name), f"they cannot be measured ({error})", kind)
            else:
                self._leave_out(absent, layer.name, f"its {source} weight cannot be read ({error})", kind)

    def _device(self) -> torch.device:
        for layer in self.layers:
            for parameter in layer.module.parameters():
                return parameter.device
        return torch.device("cpu")

    def _leave_out(self, absent: dict[str, str], what: str, reason: str, kind: str) -> None:
        absent[what] = reason
        self.faults.say(
            kind,
            f"{what}: {reason}. It is left out of such readings, and so is every layer of which this holds; training "
            "goes on.",
        )

    def _say_what_is_left_out(self) -> None:
        again = {place.name for place in self._undecided}
        for refusal in self.refused:
            later = " It is looked at again in the first forward that is read." if refusal.name in again else ""
            warnings.warn(refusal.message + later, UnsupportedAttentionWarning, stacklevel=4)
        if self.layers:
            return
        if not again:
            self._say_that_nothing_is_watched()
            return
        warnings.warn(
            f"The heads of no attention layer of {type(self._model).__name__} could be read yet. The first forward "
            f"that is read may show those of {_listed(sorted(again))}.",
            MonitoringWarning,
            stacklevel=4,
        )

    def _say_that_nothing_is_watched(self) -> None:
        kinds = sorted({type(module).__name__ for module in self._model.modules()})
        message = (
            f"No attention layer was found whose heads can be read in {type(self._model).__name__}, so there is "
            f"nothing to watch. Its modules are of these types: {', '.join(kinds)}. Describe the attention with "
            "`register_layout`."
        )
        if self._is_strict:
            raise NothingToWatchError(message)
        warnings.warn(message, MonitoringWarning, stacklevel=5)


_REPLACED = (
    "its output projection is no part of the model any more, as after an adapter was unloaded or merged; a new monitor "
    "sees what came in its place"
)
_UNCALLED = (
    "its attention ran without calling its output projection, whose weight it uses directly, as by "
    "torch.nn.functional.linear"
)


class _UntrueError(HDIError):
    """The heads of a layer are not what was claimed."""


def _outputs_of(name: str) -> str:
    """Give the key under which the head outputs of a layer are said to be absent."""
    return f"{COVARIANCE}/{name}"


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _join(results: Sequence[tuple[str, HeadCovariance]]) -> Measurement:
    """Join the results of several layers along a new first dimension."""
    stacked = {
        item.name: torch.stack([getattr(result, item.name) for _, result in results]) for item in fields(HeadCovariance)
    }
    return Measurement(tuple(name for name, _ in results), COVARIANCE, HeadCovariance(**stacked))


def _tensors(sums: HeadSums) -> list[Tensor]:
    return [tensor for tensor in (sums.count, sums.products, sums.scatter) if tensor is not None]


class _WeightSheet:
    """Room for the results of one role in all layers: every rank fills in its share, and the rest comes by adding up.

    Its shapes follow from the numbers of heads alone, so that they are the same on every rank whatever fails on one.
    """

    def __init__(self, role: Role, layers: Sequence[AttentionLayer], device: torch.device) -> None:
        self.role = role
        self.absent: dict[str, str] = {}
        self._groups: dict[int, list[str]] = {}
        for layer in layers:
            heads = layer.num_key_heads if role in ("key", "value") else layer.num_heads
            self._groups.setdefault(heads, []).append(layer.name)
        self._blanks: list[dict[str, Tensor]] = []
        self._kinds: dict[str, torch.dtype] = {}
        for heads, names in self._groups.items():
            model = head_diversity(torch.empty(len(names), heads, 1, 1, device="meta"))
            of_model = {item.name: getattr(model, item.name) for item in fields(HeadDiversity)}
            self._kinds = {name: value.dtype for name, value in of_model.items()}
            self._blanks.append(
                {name: torch.zeros(value.shape, dtype=torch.float64, device=device) for name, value in of_model.items()}
            )

    def fill(self, measurements: Sequence[Measurement], mine: Collection[str]) -> None:
        """Write down what this rank measured; NaN for what it should have measured and could not."""
        found = {
            name: (measurement.values, row)
            for measurement in measurements
            for row, name in enumerate(measurement.layers)
        }
        for names, blanks in zip(self._groups.values(), self._blanks):
            for place, name in enumerate(names):
                if name not in mine:
                    continue
                for field, blank in blanks.items():
                    if name in found:
                        values, row = found[name]
                        blank[place] = getattr(values, field)[row]
                    else:
                        blank[place] = torch.nan if self._kinds[field].is_floating_point else -1

    def tensors(self) -> list[Tensor]:
        """Everything on the sheet, in a fixed order."""
        return [blank for blanks in self._blanks for blank in blanks.values()]

    def read(self, added: Iterator[Tensor]) -> list[Measurement]:
        """Read the sheet again after it was added up; a layer that is absent here is left out."""
        measurements = []
        for names, blanks in zip(self._groups.values(), self._blanks):
            sums = {field: next(added) for field in blanks}
            rows = [row for row, name in enumerate(names) if name not in self.absent]
            if rows:
                values = {
                    field: torch.stack([total[row] for row in rows]).to(self._kept(field))
                    for field, total in sums.items()
                }
                measurements.append(Measurement(tuple(names[row] for row in rows), self.role, HeadDiversity(**values)))
        return measurements

    def _kept(self, field: str) -> torch.dtype:
        kind = self._kinds[field]
        return torch.float64 if kind.is_floating_point else kind


def _layers_per_call(weight: Tensor) -> int:
    """How many layers are measured at once, so that their stacked copies stay bounded."""
    # Bases and their product are kept in float32 or wider beside the copy of the weights.
    return max(1, _CHUNK_BYTES // max(1, weight.numel() * 16))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _uncountable(layer: AttentionLayer) -> Refusal:
    message = (
        f"The heads of `{layer.name}` ({type(layer.module).__name__}) cannot be told apart: its projections are split "
        "over ranks, and it does not say how wide a head is, so that its number of heads may be that of one rank. Give "
        f"it an attribute `head_dim`, or skip it with exclude=[{layer.name!r}]."
    )
    return Refusal(layer.name, type(layer.module).__name__, message)
