"""`Capture`: head outputs and rows of attention of the forwards of one armed step.

Only forwards that autograd records are captured; what activation checkpointing runs again within the backward is not
counted twice. Eager calls are captured while they run, of compiled ones the first of a step (see `FirstCalls`). Head
outputs are taken at the output projection, where that is a module that is called, and else where attention runs.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hdi_callback.attention.capture.padding import PaddingChoice, TokenMask, find_padding
from hdi_callback.attention.capture.reader import CoreSample, Reader
from hdi_callback.attention.compiled_calls import is_within_compiled_call
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.extra_forward import first_sequences, inner_model, is_extra, nothing_remains
from hdi_callback.attention.first_calls import SEQUENCES, FirstCalls
from hdi_callback.attention.hooks import Hook
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.attention.sharding import gathered_heads
from hdi_callback.guard import describe, take_off, without_modes

Rows = Callable[..., Any]
"""Makes numbers of sampled rows of attention of some layers that are alike, one item for each layer.

``rows(logits, weights, positions=, visible=)`` with logits and weights ``(layers, b, H, q, k)`` in float32, the
positions ``(q,)`` of the queries, and `visible` boolean of the shape of the weights.
"""


@dataclass
class Captured:
    """Tensors of one layer from the forwards of one step, detached, and why some are absent."""

    outputs: Tensor | None = None  # ``(tokens, H, d_v)``
    valid: Tensor | None = None  # ``(tokens,)``, false of padding among `outputs`; `None` if all count
    rows: list[Any] = field(default_factory=list)  # of each time that the attention ran, what the function made of it
    # "outputs", "rows" -> why it is absent; "padding" -> a mask that was seen and could not be used.
    reasons: dict[str, str] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()  # those of them that this rank has and could not read


class Capture:
    """Captures the forwards of armed steps.

    At most `max_tokens` tokens of a layer are kept, and `max_rows` queries of one attention, over all sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        *,
        calls: FirstCalls | None = None,
        max_tokens: int,
        padding: PaddingChoice,
        rows: Rows | None,
        max_rows: int = 64,
    ) -> None:
        self._model, self._rows, self._padding = inner_model(model), rows, padding
        self._calls = FirstCalls(model) if calls is None else calls
        self._max_tokens = max_tokens
        self.layers: dict[str, _CapturedLayer] = {}
        self._samples: list[tuple[str, CoreSample]] = []  # of rows, that are not numbers yet
        self._numel = 0  # of these samples
        self._entered: set[int] = set()  # modules within which the reader was, outside of a backward
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}  # of eager calls
        self._is_broken = self._is_paused = self.is_armed = False
        self.is_again = False  # whether first sequences run once more
        self._cut: int | None = None  # sequences that were taken of a batch; `None` if it turns out to be none
        self._never_cut: set[nn.Module] = set()  # calls whose tensors begin with another dimension than the batch
        self.training_only = True
        self._by_name = dict(self._model.named_modules())
        self._names = {module: name for name, module in self._by_name.items()}
        self._reader = Reader(self._names, self, max_rows)
        self._inside = self._readings = 0
        self._behind: set[str] = set()  # layers whose attention is read behind their outputs, without the mode
        self.padding_of_call: dict[tuple[str, tuple[int, ...]], TokenMask] = {}  # of the call that runs
        self.watch(layers)

    def watch(self, layers: Sequence[AttentionLayer]) -> None:
        """Capture some layers from now on; samples of those that were captured before stay."""
        self._uninstall()
        before = self.layers
        self.layers = {
            layer.name: before[layer.name]
            if layer.name in before and before[layer.name].layer is layer
            else _CapturedLayer(layer, _Tap(layer, self, self._max_tokens))
            for layer in layers
        }
        self._samples = [(name, sample) for name, sample in self._samples if self.layers.get(name) is before[name]]
        self.taps = list(self._hooked())
        self.read_layers = [layer for layer in layers if self._may_read(layer)]
        self._reader.watch(self.read_layers)
        entries_of = {layer.name: self._entries_of(layer) for layer in self.read_layers}
        self._entries = {module: set[str]() for modules in entries_of.values() for module in modules}
        for module, names in self._entries.items():
            within = set(module.modules())
            names |= {name for name, modules in entries_of.items() if not within.isdisjoint(modules)}
        if self.is_armed:
            self._install()

    # --- steps

    def arm(self, *, training_only: bool = True) -> None:
        """Capture forwards from now on, if `training_only` those that autograd records; forget earlier ones."""
        self.is_armed, self.training_only = True, training_only
        self._forget()
        self._reader.begin()
        if self._readings % _SHOWN_EVERY == 0:
            self._reader.shown.clear()  # the mode reads the next forward, and shows anew what autograd saves
        self._readings += 1
        self._install()
        self._calls.wait(self._run_again, self._give_up)

    def take(self) -> dict[str, Captured]:
        """Return what was captured of each layer since `arm`, and why something was not; and disarm.

        A collective call where the heads of a layer are spread over ranks.
        """
        self.disarm()
        self._make_rows()
        captured = {name: each.captured(self._rows is not None) for name, each in self.layers.items()}
        gathered = gathered_heads({name: (self.layers[name].layer, each.outputs) for name, each in captured.items()})
        for name, outputs in gathered.items():
            captured[name].outputs = outputs
            if outputs is None:
                captured[name].reasons.setdefault("outputs", "another rank has not captured its heads")
        self._forget()
        return captured

    def pause(self) -> None:
        """Remove the hooks for an evaluation: torch's encoder takes its fast path only without any."""
        self._uninstall()
        self._is_paused = True

    def go_on(self) -> None:
        """Install the hooks again."""
        self._is_paused = False
        if self.is_armed:
            self._install()

    def disarm(self) -> None:
        """Capture nothing more, and remove all hooks; to be called before each forward that is not to be captured."""
        self.is_armed = False
        self._uninstall()
        self._calls.wait(None)
        self._leave_all()

    def _install(self) -> None:
        """Install hooks on the modules that run in eager calls."""
        if self._handles or self._is_paused:
            return
        read_again = self._calls.read_again
        for module, tap in self.taps:
            if module not in read_again:
                handle = Hook(tap, "take").on(module.register_forward_pre_hook, with_kwargs=True)
                self._handles.setdefault(module, []).append(handle)
        saved_layers = self._reader.shown.keys() if self.training_only else set[str]()
        under_mode = {name for names in self._entries.values() if not names <= saved_layers for name in names}
        self._behind = saved_layers - under_mode
        for module, names in () if self._is_broken else self._entries.items():
            if module not in read_again and not names.isdisjoint(under_mode):
                handles = self._handles.setdefault(module, [])
                handles.append(Hook(self, "_enter").on(module.register_forward_pre_hook))
                handles.append(Hook(self, "_leave").on(module.register_forward_hook, always_call=True))

    def _uninstall(self, within: nn.Module | None = None) -> None:
        """Remove hooks from all modules, or from those within one that is about to run compiled code."""
        for module in list(self._handles) if within is None else list(within.modules()):
            for handle in self._handles.pop(module, ()):
                handle.remove()

    def _forget(self, within: nn.Module | None = None) -> None:
        modules = None if within is None else set(within.modules())
        names = {name for name, each in self.layers.items() if modules is None or each.layer.module in modules}
        for name in names:
            self.layers[name].forget()
        self._samples = [(name, sample) for name, sample in self._samples if name not in names]
        self._numel = sum(sample.numel for _, sample in self._samples)
        if modules is None:
            self._entered.clear()

    # --- calls in which something is compiled

    def _run_again(self, module: nn.Module, args: Any, kwargs: Any, is_recorded: bool) -> bool:
        """Run the first sequences of a call once more, and capture that; whether the call counts."""
        if not self.is_armed or (self.training_only and not is_recorded):
            return False
        self._uninstall(within=module)
        inputs, size = (args, kwargs), None
        if module not in self._never_cut:
            inputs, size = first_sequences(inputs, SEQUENCES)
        self._cut = None if size is None else SEQUENCES
        self._capture_again(module, inputs)
        if size is not None and self._cut is None:  # what its tensors begin with is no batch
            self._never_cut.add(module)
            self._forget(within=module)
            self._capture_again(module, (args, kwargs))
        return True

    def _capture_again(self, module: nn.Module, inputs: Any) -> None:
        within = set(module.modules())
        handles: list[RemovableHandle] = []
        self._reader.begin()
        self.is_again = True
        try:
            with nothing_remains(self._model, inputs, is_training=True):
                for inner, tap in (pair for pair in self.taps if pair[0] in within):
                    handles.append(Hook(tap, "take").on(inner.register_forward_pre_hook, with_kwargs=True))
                with self._calls.writing(module), self._reader:
                    module(*inputs[0], **inputs[1])
        except Exception as error:
            self._fail_within(module, f"the forward that shows what its heads do failed: {describe(error)}")
        finally:
            self.is_again = False
            for handle in handles:
                handle.remove()
            self._reader.forget()

    def _give_up(self, entry: nn.Module) -> None:
        """Remove mode and hooks from a call that was thought eager and is about to run compiled code."""
        self._leave_all()
        self._uninstall(within=entry)
        self._fail_within(entry, _TURNED_UP)

    def _leave_all(self) -> None:
        """Leave the calls that the reader is in, also those that an interruption has ended."""
        if self._inside:
            self._inside = 0
            take_off(self._reader)
        self._reader.forget()

    def _fail_within(self, entry: nn.Module, reason: str) -> None:
        within, sampled = set(entry.modules()), {name for name, _ in self._samples}
        for name, each in self.layers.items():
            if each.layer.module in within and name not in sampled and not each.rows:
                self.fail(name, reason)

    # --- hooks

    def _hooked(self) -> Iterator[tuple[nn.Module, _Tap]]:
        """Yield the module whose input each tap takes; note why some taps have none."""
        used = Counter(each.layer.output_module for each in self.layers.values())
        for each in self.layers.values():
            output_module = each.layer.output_module
            if output_module is None:
                if not each.layer.sites:
                    each.never["outputs"] = "there is no module that takes its head outputs side by side"
            elif used[output_module] > 1:
                each.never["outputs"] = "it shares its output projection with another layer"
            else:
                yield output_module, each.outputs

    def _may_read(self, layer: AttentionLayer) -> bool:
        """Whether the attention of a layer is read where it runs; notes why its rows are not."""
        why = None
        if not layer.sites:
            why = "no softmax and no fused attention of it was recognised in a forward"
        elif any(site.heads != layer.num_heads for site in layer.sites):
            is_spread = any(weight.is_sharded for weight in layer.weights.values())
            why = "its heads are spread over ranks" if is_spread else "its heads are computed one after the other"
        if why is not None:
            for kind in ("rows", "outputs") if layer.output_module is None else ("rows",):
                self.layers[layer.name].never.setdefault(kind, why)
        return why is None and (self._rows is not None or layer.output_module is None)

    def _entries_of(self, layer: AttentionLayer) -> list[nn.Module]:
        """Return the modules in which the attention of a layer runs; with its output, where one around holds both."""
        own = self._names.get(layer.module)
        paths = [site.path for site in layer.sites]
        if own is not None and all(path == own or path.startswith(f"{own}.") or not own for path in paths):
            around = self._by_name.get(own.rpartition(".")[0])
            parts = set() if around is None else set(around.modules())
            is_beside = layer.output_module in parts and layer.output_module not in set(layer.module.modules())
            is_called = around is not self._model and type(around).forward is not nn.Module.forward  # type: ignore[union-attr]
            return [around] if is_beside and is_called else [layer.module]  # type: ignore[list-item]
        return [self._by_name[path] for path in paths if path in self._by_name]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._is_broken or module not in self._entries or is_extra():  # a replica of `nn.DataParallel` is no entry
            return
        if self._inside == 0:
            if not self._counts_now(module) or is_within_compiled_call():
                return
            self._reader.__enter__()
        self._inside += 1
        self.padding_of_call.clear()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside == 0 or module not in self._entries:
            return
        self._inside -= 1
        if output is None and sys.exc_info()[0] is not None:
            self._is_broken = True  # it raised under the mode: never again
        if self._inside == 0:
            self._reader.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._reader.forget()

    def read_behind(self, layer: AttentionLayer, outputs: Tensor) -> None:
        """Read the fused attention before the output projection from saved tensors, where no mode reads it."""
        try:
            if self._inside:
                self._reader.show(layer, outputs)
            elif layer.name in self._behind and not self.is_again:
                self._reader.read_behind(layer, outputs)
        except Exception as error:
            self.fail(layer.name, f"its rows of attention cannot be read ({describe(error)})")

    def _counts_now(self, module: nn.Module) -> bool:
        """Whether the call of a module that begins now is captured."""
        if not self.is_armed or (self.training_only and not torch.is_grad_enabled()):
            return False
        if torch._C._current_graph_task_id() == -1:
            self._entered.add(id(module))
            return True
        # Within a backward checkpointing runs again what was captured, unless autograd did not record it then.
        return id(module) not in self._entered

    # --- what a `Reader` hands over

    def wants_outputs(self, layer: str) -> bool:
        """Return whether head outputs are read where attention runs."""
        return self.layers[layer].layer.output_module is None

    def padded_queries(self, layer: str, shape: tuple[int, int], hidden_keys: Tensor | None) -> Tensor | None:
        """Return which queries are padding, ``(batch, queries)``; `None` if none is known."""
        if self._cut is not None and shape[0] % self._cut:
            self._cut = None
        tap = self.layers[layer].outputs
        tap.hidden_keys = hidden_keys if hidden_keys is not None and tuple(hidden_keys.shape) == shape else None
        return tap.find(shape).padded

    def find_padding(self, shape: tuple[int, ...], layer: str, hidden_keys: Tensor | None) -> TokenMask:
        """Return the padding among tokens of a shape; masks are looked up once in a call of an attention."""
        mask = self.padding_of_call.get((layer, shape))
        if mask is None or self.is_again or (mask.padded is None and hidden_keys is not None):
            mask = find_padding(shape, self._padding, layer=layer, hidden_keys=hidden_keys)
            self.padding_of_call[layer, shape] = mask
        return mask

    def has_entered(self, layer: AttentionLayer) -> None:
        """Mark a layer as captured, so that its recomputation within the backward is not captured."""
        self._entered |= {id(module) for module in self._entries_of(layer)}

    def take_rows(self, layer: str, sample: CoreSample) -> None:
        """Collect sampled rows; layers that are alike are measured in one call."""
        if self._rows is not None:
            self._samples.append((layer, sample))
            self._numel += sample.numel
            if self._numel > (_ROWS_AT_ONCE_ON_CPU if sample.positions.is_cpu else _ROWS_AT_ONCE):
                self._make_rows()

    def _make_rows(self) -> None:
        groups: dict[Any, list[tuple[str, CoreSample]]] = {}
        for layer, sample in self._samples:
            groups.setdefault(sample.kind, []).append((layer, sample))
        self._samples, self._numel = [], 0
        with without_modes():
            for group in groups.values():
                try:
                    sample = CoreSample.stacked([sample for _, sample in group])
                    logits: Any = sample.logits
                    weights = torch.softmax(logits, -1) if sample.weights is None else sample.weights
                    visible, positions = sample.visible(), sample.positions
                    numbers = self._rows(logits, weights, positions=positions, visible=visible)  # type: ignore[misc]
                except Exception as error:
                    for layer, _ in group:
                        self.fail(layer, f"its rows of attention cannot be read ({describe(error)})")
                    continue
                for (layer, _), rows in zip(group, numbers):
                    self.layers[layer].rows.append(rows)

    def take_outputs(self, layer: str, outputs: Tensor) -> None:
        """Store head outputs, ``(batch, queries, H, d_v)``."""
        self.layers[layer].outputs.keep(outputs.flatten(2))

    def fail(self, layer: str, reason: str) -> None:
        """Note why something of a layer cannot be read."""
        failed = self.layers[layer].failed
        failed.setdefault("rows", reason)
        if self.wants_outputs(layer):
            failed.setdefault("outputs", reason)


_SHOWN_EVERY = 10  # readings
_ROWS_AT_ONCE = 2**26  # numbers in samples that are kept until their layers are measured together
_ROWS_AT_ONCE_ON_CPU = 2**18  # whose cache would not hold more

_TURNED_UP = "compiled code turned up within its call: from the next reading on its first sequences are read"


@dataclass(eq=False)
class _CapturedLayer:
    """What is captured of one layer, and why something is not."""

    layer: AttentionLayer
    outputs: _Tap
    never: dict[str, str] = field(default_factory=dict)  # what no forward can show, with the reason
    failed: dict[str, str] = field(default_factory=dict)  # what these forwards have not shown
    rows: list[Any] = field(default_factory=list)

    def forget(self) -> None:
        """Discard all samples."""
        self.failed, self.rows, self.outputs.taken = {}, [], _Taken()

    def captured(self, wants_rows: bool) -> Captured:
        """Return the samples of all forwards."""
        captured = Captured(rows=self.rows, reasons={**self.never, **self.failed})
        captured.outputs, captured.valid = self.outputs.joined()
        if captured.outputs is not None:
            captured.outputs = captured.outputs.view(len(captured.outputs), -1, self.layer.value_dim)
            captured.reasons.pop("outputs", None)
        if captured.outputs is None:
            captured.reasons.setdefault("outputs", self.outputs.why_nothing())
        if wants_rows and not captured.rows:
            captured.reasons.setdefault("rows", self.outputs.why_nothing())
        if self.outputs.taken.doubt is not None:
            captured.reasons["padding"] = self.outputs.taken.doubt
        captured.failed = frozenset([*(["outputs"] if self.outputs.taken.failure is not None else []), *self.failed])
        return captured


@dataclass
class _Taken:
    """What a tap took since it was armed."""

    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None
    doubt: str | None = None
    has_run: bool = False
    has_outside: bool = False  # whether a sample was taken outside of a backward
    padding: dict[tuple[int, ...], TokenMask] = field(default_factory=dict)  # of forwards without autograd, by shape


class _Tap:
    """Takes samples of the head outputs that go into an output projection."""

    def __init__(self, layer: AttentionLayer, capture: Capture, max_tokens: int) -> None:
        self.layer, self.capture = layer, capture
        self.taken = _Taken()
        self.hidden_keys: Tensor | None = None
        self._max_tokens = max(2, max_tokens)
        self._order = _order_of_features(layer) if layer.output_module is not None else None
        weight = layer.weights.get("output")
        size = getattr(layer.output_module, "kernel_size", None)
        self._size = size if isinstance(size, tuple) else None  # of a convolution
        self._width = layer.num_heads * layer.value_dim
        self._may_be_part = weight is not None and weight.is_sharded  # a rank has some of the heads

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the input of the module."""
        is_other = is_extra() and not self.capture.is_again  # of another monitor, or a check
        if self.capture.is_armed and not is_other:
            self.capture.padding_of_call.clear()
            is_recorded = torch.is_grad_enabled() or self.capture.is_again
            with without_modes():
                try:
                    tensor = first_of(args, kwargs)
                    if isinstance(tensor, Tensor) and not tensor.is_meta:
                        self._take(tensor, is_recorded=is_recorded)
                except Exception as error:
                    self.taken.failure = f"its outputs cannot be captured ({describe(error)})"

    def _take(self, tensor: Tensor, *, is_recorded: bool) -> None:
        """Store a sample if autograd records the forward; else remember its padding only, for recomputation."""
        self.taken.has_run = True
        is_outside = torch._C._current_graph_task_id() == -1
        if self.capture.training_only and not is_recorded:
            if is_outside:  # what is known of padding now, for when the forward is repeated within the backward
                shape = tuple(self._features_last(tensor).shape[:-1])
                self.taken.padding[shape] = self.find(shape)
        elif is_outside or not self.taken.has_outside:
            self.capture.read_behind(self.layer, tensor)
            self.keep(self._features_last(tensor))

    def keep(self, tokens: Tensor) -> None:
        """Keep a sample of tokens, ``(..., length, features)``."""
        if tokens.is_nested:
            self.taken.failure = "nested tensors are not captured"
            return
        self.taken.has_outside |= torch._C._current_graph_task_id() == -1
        local: Any = tokens.detach()
        local = local.to_local() if is_sharded(local) else local
        mask = self.find(tuple(local.shape[:-1]))
        self.hidden_keys = None
        self._keep(local, mask)

    @torch.no_grad()
    def hand_over(self, tokens: Tensor | Sample, mask: TokenMask) -> None:
        """Store a tensor or sample of the forward in which the heads were found."""
        self.taken.has_outside = True
        with without_modes():
            self._keep(self._features_last(tokens.detach()) if isinstance(tokens, Tensor) else tokens, mask)

    def _keep(self, tokens: Tensor | Sample, mask: TokenMask) -> None:
        self.taken.has_run = True
        self.taken.doubt = self.taken.doubt or mask.doubt
        flat = tokens if isinstance(tokens, Tensor) else tokens.tokens
        width = flat.shape[-1]
        if width != self._width and not (self._may_be_part and self._width % width == 0):
            self.taken.failure = f"the tensor that holds its outputs has {width} features, expected {self._width}"
            return
        if self._order is not None and width == len(self._order):
            flat = flat[..., self._order.to(flat.device)]
        if isinstance(tokens, Tensor):
            self.taken.samples.append(Sample.of(flat, self._max_tokens, mask.padded))
        else:
            self.taken.samples.append(replace(tokens, tokens=flat))
        self._thin(2 * self._max_tokens)

    def find(self, shape: tuple[int, ...]) -> TokenMask:
        """Return the padding among tokens of a shape."""
        if torch._C._current_graph_task_id() != -1 and shape in self.taken.padding:
            return self.taken.padding[shape]  # of the modules around, only some run again
        return self.capture.find_padding(shape, self.layer.name, self.hidden_keys)

    def joined(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the tokens of all forwards, and which of them are no padding."""
        if self.taken.failure is not None or not self.taken.samples:
            return None, None
        self._thin(self._max_tokens)
        samples = self.taken.samples
        if len(samples) == 1:  # no copy of it
            return samples[0].tokens, samples[0].valid
        tokens = torch.cat([sample.tokens for sample in samples])
        if all(sample.valid is None for sample in samples):
            return tokens, None
        full = [tokens.new_ones(len(sample.tokens), dtype=torch.bool) for sample in samples]
        return tokens, torch.cat([own if each.valid is None else each.valid for each, own in zip(samples, full)])

    def why_nothing(self) -> str:
        """Return why there is no sample."""
        if self.taken.failure is not None:
            return self.taken.failure
        if self.taken.has_run:
            return "it ran only without autograd, and only forwards that train are captured"
        return "it was not called in a forward that was captured"

    def _features_last(self, tensor: Tensor) -> Tensor:
        """Return the input of a convolution, ``(batch, features, ...)``, as ``(batch, positions, features)``."""
        return tensor if self._size is None else tensor.flatten(-len(self._size)).mT

    def _thin(self, limit: int) -> None:
        """Thin all samples alike, if together they are more than a limit."""
        samples = self.taken.samples
        if sum(sample.tokens.shape[0] for sample in samples) > limit:
            total = sum(sample.count for sample in samples)
            self.taken.samples = [each.thinned(self._max_tokens * each.count // max(total, 1)) for each in samples]


# --- samples of tokens


@dataclass(frozen=True)
class Sample:
    """Tokens of one forward: ``(tokens, features)``, which of them are no padding, and of how many they were taken."""

    tokens: Tensor
    valid: Tensor | None
    count: int

    @classmethod
    def of(cls, tokens: Tensor, limit: int, padded: Tensor | None) -> Sample:
        """Return tokens spread evenly over a forward, padding last; the host does not wait for the device."""
        flat = tokens.reshape(-1, tokens.shape[-1])
        count = flat.shape[0]
        padded = None if padded is None else padded.reshape(-1).to(flat.device)
        if count <= limit:
            return cls(flat.clone(), None if padded is None else ~padded, count)
        size = _prime_below(limit)
        places = torch.arange(size, device=flat.device)
        if padded is None:
            return cls(flat[places * count // size], None, count)
        order, number = padded.to(torch.int8).argsort(stable=True), (~padded).sum()
        spread = torch.where(number > size, places * number // size, places)
        return cls(flat[order[spread.clamp_max(count - 1)]], places < number, count)

    def thinned(self, size: int) -> Sample:
        """Return a smaller sample, spread evenly over this one."""
        size = min(len(self.tokens), max(1, size))
        places = torch.arange(size, device=self.tokens.device) * len(self.tokens) // max(size, 1)
        return Sample(self.tokens[places], None if self.valid is None else self.valid[places], self.count)


@lru_cache
def _prime_below(limit: int) -> int:
    """Return a prime: a plain stride with a common factor would see the same few positions of every sequence."""
    return next(n for n in range(limit, 1, -1) if all(n % factor for factor in range(2, math.isqrt(n) + 1)))


def _order_of_features(layer: AttentionLayer) -> Tensor | None:
    """The features of all heads among those that the output projection takes; `None` if they are in order."""
    weight = layer.weights.get("output")
    rows = None if weight is None else weight.terms[0].factors[0]
    if rows is None or len(rows.names) > 1:
        return None
    features = (rows.starts // rows.columns if rows.stride == 1 else rows.starts % rows.stride).flatten()
    return None if torch.equal(features, torch.arange(len(features))) else features


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call."""
    return args[0] if args else next(iter(kwargs.values()), None)
