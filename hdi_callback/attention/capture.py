"""`Capture`: head outputs, rows of attention and input tokens of the forwards of one armed step.

Only forwards that autograd records are captured; what activation checkpointing runs again within the backward is not
counted twice. All forwards of a step are captured, up to a bounded number of tokens in all.

Head outputs are taken by a forward-pre-hook at the output projection, where that is a module that is called, and where
attention runs elsewhere (see `Reader`). In a compiled graph a custom operator at the hook's place passes the outputs
on: no graph break, a flag is all that is guarded, and one recompilation when it is first armed. Rows are absent there.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hdi_callback.attention.compiled_calls import BeforeCompiledCalls
from hdi_callback.attention.extra_forward import inner_model
from hdi_callback.attention.hooks import Hook
from hdi_callback.attention.in_graph import Receiver, is_anything_compiled, is_compiled, may_recompile, take_in_graph
from hdi_callback.attention.layer import AttentionLayer, HeadWeight
from hdi_callback.attention.padding import PaddingChoice, TokenMask, find_padding
from hdi_callback.attention.reader import CoreSample, Reader
from hdi_callback.attention.registry import head_outputs_again, is_torch_attention
from hdi_callback.attention.sharding import gathered_heads, is_sharded
from hdi_callback.guard import describe, without_modes

__all__ = ["Capture", "Captured"]

Rows = Callable[..., Any]


@dataclass
class Captured:
    """What was captured of one layer in the forwards of one step; all tensors are detached.

    Attributes:
        outputs: ``(tokens, H, d_v)``.
        valid: ``(tokens,)``, false of padding among `outputs`; `None` if all count.
        rows: what the function `rows` returned, one item for each time that the attention ran.
        inputs: ``(tokens, d)``, what the keys are made of.
        inputs_valid: ``(tokens,)``, false of padding among `inputs`; `None` if all count.
        reasons: ``"outputs"``, ``"rows"``, ``"inputs"`` -> why it is absent; ``"padding"`` -> a mask that was seen and
            could not be used.
        failed: those of them that this rank has and could not read.
    """

    outputs: Tensor | None = None
    valid: Tensor | None = None
    rows: list[Any] = field(default_factory=list)
    inputs: Tensor | None = None
    inputs_valid: Tensor | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


class Capture:
    """Captures the forwards of armed steps.

    Args:
        model: the model.
        layers: its attention layers.
        max_tokens: largest number of tokens kept of a layer.
        padding: how padding is known, see `PaddingChoice`.
        rows: makes numbers of sampled rows of attention of some layers that are alike: ``rows(logits, weights,
            positions=, visible=, norms=)`` with logits and weights ``(layers, b, H, q, k)`` in float32, the positions
            ``(q,)`` of the queries, `visible` boolean of the shape of the weights, and the mean norms of queries and
            keys, ``(layers, H)`` each, or `None`; gives one item for each layer. `None` if rows are not wanted.
        inputs: capture the tokens that keys are made of.
        max_rows: largest number of queries of one attention, over all sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        *,
        max_tokens: int,
        padding: PaddingChoice,
        rows: Rows | None,
        inputs: bool,
        max_rows: int = 64,
    ) -> None:
        self._model, self._rows, self._padding = inner_model(model), rows, padding
        self._is_compiled = is_compiled(model)
        self._layers = {layer.name: layer for layer in layers}
        self._never: dict[str, dict[str, str]] = {layer.name: {} for layer in layers}
        self._outputs = {layer.name: _Tap(layer, self, "outputs", max_tokens) for layer in layers}
        self._inputs = {layer.name: _Tap(layer, self, "inputs", max_tokens) for layer in layers if inputs}
        self._taken_rows: dict[str, list[Any]] = {}
        self._samples: list[tuple[str, CoreSample]] = []  # of rows, that are not numbers yet
        self._failed: dict[str, dict[str, str]] = {}
        self._entered: set[int] = set()  # modules within which the reader was, outside of a backward
        self._handles: list[RemovableHandle] = []
        self._reader_handles: list[RemovableHandle] = []
        self._is_broken = self._is_limited = self.is_armed = False
        self._compiled_states: set[bool] = set()  # with and without the operator
        self.training_only = True
        self._by_name = dict(self._model.named_modules())
        self._names = {module: name for name, module in self._by_name.items()}
        self._taps = list(self._hooked())
        # Hooks are there while a step is captured, as modules without any are called faster; those of a compiled graph
        # stay, as it does not see hooks that come later.
        self._is_suspended = False
        self._stays = is_anything_compiled() or any(is_compiled(module) for module in (model, *self._by_name.values()))
        self._before_compiled = None if self._stays else BeforeCompiledCalls(self._stay)
        self.resume()
        read = [layer for layer in layers if self._may_read(layer)]
        self._reader = Reader(self._names, read, self, max_rows) if read else None
        self._entries = {id(one): one for layer in read for one in self._entries_of(layer)}
        self._inside = 0

    # --- steps

    def arm(self, *, training_only: bool = True) -> None:
        """Capture the forwards from now on; forgets what was captured before.

        Args:
            training_only: leave out forwards that autograd does not record, such as those of an evaluation.
        """
        self.is_armed, self.training_only = True, training_only
        if not self._is_suspended:
            self._install()
        self._forget()
        self._set_in_graph(True)
        if self._reader is not None and not self._is_broken:
            self._reader.begin()
            self._install_reader()

    def disarm(self) -> None:
        """Capture nothing more; to be called before each forward that is not to be captured.

        Nothing is recompiled before then, as recompiling may be forbidden meanwhile.
        """
        self._stop()
        self._set_in_graph(False)

    def take(self) -> dict[str, Captured]:
        """Return what was captured since `arm`, and capture nothing more.

        A collective call where the heads of a layer are spread over ranks.

        Returns:
            Layer name -> what was captured of it, and why something was not.
        """
        self._stop()
        self._make_rows()
        found = {name: self._captured(layer) for name, layer in self._layers.items()}
        gathered = gathered_heads({name: (self._layers[name], one.outputs) for name, one in found.items()})
        for name, outputs in gathered.items():
            found[name].outputs = outputs
            if outputs is None:
                found[name].reasons.setdefault("outputs", "another rank has not captured its heads")
        self._forget()
        return found

    def suspend(self) -> None:
        """Take the hooks off, as before an evaluation: torch's encoder takes its fast path only without any."""
        self._stop()
        self._is_suspended = True
        self._uninstall()

    def resume(self) -> None:
        """Put the hooks back: the same objects, so that compiled graphs go on as they are."""
        self._is_suspended = False
        if self._stays or self.is_armed:
            self._install()

    def remove(self) -> None:
        """Remove all hooks and forget what was captured; calling it again does nothing."""
        self.suspend()
        self._forget()
        if self._before_compiled is not None:
            self._before_compiled.remove()

    def _install(self) -> None:
        if not self._handles:
            self._handles = [module.register_forward_pre_hook(tap, with_kwargs=True) for module, tap in self._taps]

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _stay(self, function: Any, args: Any, kwargs: Any) -> None:
        """Let the hooks be there from now on, as something is about to be compiled."""
        self._stays = True
        if not self._is_suspended:
            self._install()
        if self._before_compiled is not None:
            self._before_compiled.remove()

    def _stop(self) -> None:
        self.is_armed = False
        if not self._stays:
            self._uninstall()
        for handle in self._reader_handles:
            handle.remove()
        self._reader_handles.clear()
        if self._reader is not None:
            self._reader.forget()

    def _forget(self) -> None:
        for tap in (*self._outputs.values(), *self._inputs.values()):
            tap.forget()
        self._taken_rows.clear()
        self._samples.clear()
        self._failed.clear()
        self._entered.clear()

    def _captured(self, layer: AttentionLayer) -> Captured:
        outputs = self._outputs[layer.name]
        found = Captured(rows=self._taken_rows.get(layer.name, []))
        found.outputs, found.valid = outputs.joined()
        reasons = {**self._never[layer.name], **self._failed.get(layer.name, {})}
        if outputs.doubt is not None:
            reasons["padding"] = outputs.doubt
        if layer.name in self._inputs:
            found.inputs, found.inputs_valid = self._inputs[layer.name].joined()
        if found.outputs is not None:
            found.outputs = found.outputs.view(len(found.outputs), -1, layer.value_dim)
            reasons.pop("outputs", None)
        for what, value in (("outputs", found.outputs), ("inputs", found.inputs)):
            if value is None and (what == "outputs" or self._inputs):
                reasons.setdefault(what, _LIMITED if self._is_limited else outputs.why_nothing())
        if not found.rows and self._rows is not None:
            reasons.setdefault("rows", _COMPILED if outputs.was_compiled else outputs.why_nothing())
        found.reasons = reasons
        taps = {"outputs": self._outputs, "inputs": self._inputs}
        broken = [what for what, of in taps.items() if layer.name in of and of[layer.name].failure is not None]
        found.failed = frozenset([*broken, *self._failed.get(layer.name, {})])
        return found

    # --- hooks

    def _hooked(self) -> Iterator[tuple[nn.Module, _Tap]]:
        """Choose the module at which each tap takes its tensors; notes why some have none."""
        used = Counter(id(layer.output_module) for layer in self._layers.values() if layer.output_module is not None)
        for name, layer in self._layers.items():
            if layer.output_module is not None and used[id(layer.output_module)] > 1:
                self._never[name]["outputs"] = "it shares its output projection with another layer"
            elif layer.output_module is not None:
                yield layer.output_module, self._outputs[name]
            elif is_torch_attention(layer.module):  # for compiled graphs alone
                yield layer.module, self._outputs[name]
            elif not layer.sites:
                self._never[name]["outputs"] = "there is no module that takes its head outputs side by side"
            if name in self._inputs:
                owner = _input_module(layer)
                if isinstance(owner, str):
                    self._never[name]["inputs"] = owner
                else:
                    yield owner, self._inputs[name]

    def _may_read(self, layer: AttentionLayer) -> bool:
        """Whether the attention of a layer is read where it runs; notes why its rows are not."""
        why = None
        if not layer.sites:
            why = "its attention was not recognised in a forward"
        elif any(site.heads != layer.num_heads for site in layer.sites):
            why = "its heads are computed one after the other, or spread over ranks"
        elif self._is_compiled or any(is_compiled(module) for module in self._around(layer)):
            why = _COMPILED
        if why is not None:
            self._never[layer.name]["rows"] = why
            if layer.output_module is None and not is_torch_attention(layer.module):
                self._never[layer.name].setdefault("outputs", why)
        return why is None and (self._rows is not None or layer.output_module is None)

    def _around(self, layer: AttentionLayer) -> Iterator[nn.Module]:
        """The modules that a layer is in, and those that are in it."""
        yield from layer.module.modules()
        path = self._names.get(layer.module, "")
        while path:
            path = path.rpartition(".")[0]
            yield self._by_name[path]

    def _entries_of(self, layer: AttentionLayer) -> list[nn.Module]:
        """The modules within which a layer's attention runs: its own, or those that its sites name."""
        own = self._names.get(layer.module)
        paths = [site.path for site in layer.sites]
        if own is not None and all(path == own or path.startswith(f"{own}.") or not own for path in paths):
            return [layer.module]
        return [self._by_name[path] for path in paths if path in self._by_name]

    def _install_reader(self) -> None:
        if is_anything_compiled():  # a mode around what is compiled would make further graphs
            for name in self._layers:
                self.fail(name, _COMPILED)
            return
        for module in self._entries.values():
            enter, leave = Hook(self, "_enter"), Hook(self, "_leave")
            self._reader_handles += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, always_call=True),
            ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._reader is None or self._is_broken or id(module) not in self._entries:  # a replica
            return
        if self._inside == 0:
            if not self._counts_now(module):
                return
            self._reader.__enter__()  # type: ignore[no-untyped-call]
        self._inside += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside == 0 or id(module) not in self._entries:
            return
        self._inside -= 1
        if output is None and sys.exc_info()[0] is not None:
            self._is_broken = True  # it raised under the mode: never again
        if self._inside == 0 and self._reader is not None:
            self._reader.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._reader.forget()

    def _counts_now(self, module: nn.Module) -> bool:
        """Whether the call of a module that begins now is captured."""
        if not self.is_armed or (self.training_only and not torch.is_grad_enabled()):
            return False
        if torch._C._current_graph_task_id() == -1:
            self._entered.add(id(module))
            return True
        # Within a backward checkpointing runs again what was captured, unless autograd did not record it then.
        return id(module) not in self._entered

    def _set_in_graph(self, is_armed: bool) -> None:
        """Switch the operator in compiled graphs on or off; each change may recompile them."""
        taps = [tap for tap in (*self._outputs.values(), *self._inputs.values()) if tap.in_graph != is_armed]
        if not taps:
            return
        if is_anything_compiled():
            self._compiled_states.add(not is_armed)
        self._is_limited = not may_recompile(self._model, has_both=is_armed in self._compiled_states)
        for tap in () if self._is_limited else taps:
            tap.in_graph = is_armed

    # --- what a `Reader` hands over

    @property
    def is_reading(self) -> bool:
        """Whether attention is read where it runs."""
        return bool(self._reader_handles)

    def wants_outputs(self, layer: str) -> bool:
        """Return whether head outputs are read where attention runs."""
        return self._layers[layer].output_module is None

    def padded_queries(self, layer: str, shape: tuple[int, int], hidden_keys: Tensor | None) -> Tensor | None:
        """Find the queries that are padding."""
        tap = self._outputs[layer]
        tap.hidden_keys = hidden_keys if hidden_keys is not None and tuple(hidden_keys.shape) == shape else None
        return tap.find(shape).padded

    def take_rows(self, layer: str, sample: CoreSample) -> None:
        """Keep sampled rows until there are many: layers that are alike become numbers in one call."""
        if self._rows is not None:
            self._samples.append((layer, sample))
            at_once = _ROWS_AT_ONCE_ON_CPU if sample.positions.is_cpu else _ROWS_AT_ONCE
            if sum(one.numel for _, one in self._samples) > at_once:
                self._make_rows()

    def _make_rows(self) -> None:
        groups: dict[Any, list[tuple[str, CoreSample]]] = {}
        for layer, sample in self._samples:
            groups.setdefault(sample.kind, []).append((layer, sample))
        self._samples = []
        with without_modes():
            for group in groups.values():
                try:
                    found = self._numbers_of([sample for _, sample in group])
                except Exception as error:
                    for layer, _ in group:
                        self.fail(layer, f"its rows of attention cannot be read ({describe(error)})")
                    continue
                for (layer, _), one in zip(group, found):
                    self._taken_rows.setdefault(layer, []).append(one)

    def _numbers_of(self, samples: Sequence[CoreSample]) -> Sequence[Any]:
        assert self._rows is not None
        sample = CoreSample.stacked(samples)
        visible = sample.visible()
        weights = sample.weights_of(visible)
        found: Sequence[Any] = self._rows(
            sample.logits, weights, positions=sample.positions, visible=visible, norms=sample.norms(visible)
        )
        return found

    def take_outputs(self, layer: str, outputs: Tensor) -> None:
        """Take head outputs, ``(batch, queries, H, d_v)``."""
        self._outputs[layer].keep(outputs.flatten(2))

    def fail(self, layer: str, reason: str) -> None:
        """Note why something of a layer cannot be read."""
        reasons = self._failed.setdefault(layer, {})
        reasons.setdefault("rows", reason)
        if self.wants_outputs(layer):
            reasons.setdefault("outputs", reason)


_ROWS_AT_ONCE = 2**22  # numbers in samples that are kept until their layers are measured together
_ROWS_AT_ONCE_ON_CPU = 2**18  # whose cache would not hold more

_LIMITED = "it would have to be compiled once more, which a setting or the limit of recompilations does not allow"
_COMPILED = "where torch.compile compiles a part of a model, only inputs of modules are captured"


class _Tap:
    """The hook at the input of a module, and the tokens that it took."""

    def __init__(self, layer: AttentionLayer, capture: Capture, what: str, max_tokens: int) -> None:
        self.layer, self.capture, self.what = layer, capture, what
        self.in_graph = self.was_compiled = False
        self._computes_again = what == "outputs" and layer.output_module is None
        self._max_tokens = max(2, max_tokens)
        # A graph that autograd records is known when it is traced, not when it runs.
        self._recorded = Receiver(lambda taken: self._keep_recorded(taken, is_recorded=True, is_compiled=True))
        self._unrecorded = Receiver(lambda taken: self._keep_recorded(taken, is_recorded=False, is_compiled=True))
        self._order = _order_of_features(layer) if what == "outputs" and layer.output_module is not None else None
        self._padding_seen: dict[tuple[int, ...], TokenMask] = {}
        self.forget()

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()  # a copy of the model is not watched

    def __reduce__(self) -> Any:
        return Hook, ()

    def forget(self) -> None:
        """Discard what was taken."""
        self._samples: list[_Sample] = []
        self.failure: str | None = None
        self.doubt: str | None = None
        self.has_outside = self.has_run = False
        self.hidden_keys: Tensor | None = None
        self._padding_seen.clear()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the input of the module."""
        # Tested first, as all that is read before it would be guarded in a compiled graph.
        if torch.compiler.is_compiling():
            if not self.in_graph:
                return None
            passed = args[0] if args else next(iter(kwargs.values()))
            if type(passed) is not Tensor:  # the operator knows no other kinds, and would end the forward
                return None
            taken = self._tokens_of(module, args, kwargs)
            passed_on = take_in_graph(passed, taken, self._recorded if torch.is_grad_enabled() else self._unrecorded)
            # An attention may test whether query, key and value are one tensor: they stay so.
            return (
                tuple(passed_on if value is passed else value for value in args),
                {name: passed_on if value is passed else value for name, value in kwargs.items()},
            )
        if self.capture.is_armed and not (self._computes_again and self.capture.is_reading):
            is_recorded = torch.is_grad_enabled()
            with without_modes():
                self._take(module, args, kwargs, is_recorded)
        return None

    def _tokens_of(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return head_outputs_again(module, *args, **kwargs) if self._computes_again else _given(module, args, kwargs)

    def _take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_recorded: bool) -> None:
        try:
            taken = self._tokens_of(module, args, kwargs)
            if isinstance(taken, Tensor):
                self._keep_recorded(taken, is_recorded=is_recorded, is_compiled=False)
        except Exception as error:
            self.failure = f"its {self.what} cannot be captured ({describe(error)})"

    @torch.no_grad()
    def _keep_recorded(self, taken: Tensor, *, is_recorded: bool, is_compiled: bool) -> None:
        """Keep tokens of a forward that counts; of one that autograd does not record what is known of its padding."""
        if not self.capture.is_armed or taken.device.type == "meta":
            return
        self.has_run = True
        self.was_compiled |= is_compiled
        is_outside = torch._C._current_graph_task_id() == -1
        try:
            if self.capture.training_only and not is_recorded:
                if not is_compiled and is_outside:
                    self._remember_padding(taken)
            elif is_outside or not self.has_outside:
                self.keep(self._features_last(taken))
        except Exception as error:
            self.failure = f"its {self.what} cannot be captured ({describe(error)})"

    def keep(self, tokens: Tensor) -> None:
        """Keep a sample of tokens, ``(..., length, features)``."""
        if tokens.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tokens):
            self.failure = "nested tensors, and what runs within torch.func, are not captured"
            return
        self.has_outside |= torch._C._current_graph_task_id() == -1
        self.has_run = True
        local: Any = tokens.detach()
        local = local.to_local() if is_sharded(local) else local
        known = self.find(tuple(local.shape[:-1]))
        self.hidden_keys = None
        self.doubt = self.doubt or known.doubt
        if not self._fits(local.shape[-1]):
            return
        if self._order is not None and local.shape[-1] == len(self._order):
            local = local[..., self._order.to(local.device)]
        self._samples.append(_Sample.of(local, self._max_tokens, known.padded))
        if sum(len(sample.tokens) for sample in self._samples) > 2 * self._max_tokens:
            self._thin()

    def find(self, shape: tuple[int, ...]) -> TokenMask:
        """Find the padding among tokens of a shape."""
        if torch._C._current_graph_task_id() != -1 and shape in self._padding_seen:
            return self._padding_seen[shape]  # of the modules around, only some run again
        choice = self.capture._padding
        return find_padding(shape, choice, layer=self.layer.name, hidden_keys=self.hidden_keys)

    def joined(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the tokens of all forwards, and which of them are no padding."""
        if self.failure is not None or not self._samples:
            return None, None
        self._thin()
        tokens = torch.cat([sample.tokens for sample in self._samples])
        if all(sample.valid is None for sample in self._samples):
            return tokens, None
        ones = (torch.ones(len(one.tokens), dtype=torch.bool, device=tokens.device) for one in self._samples)
        return tokens, torch.cat([own if one.valid is None else one.valid for one, own in zip(self._samples, ones)])

    def why_nothing(self) -> str:
        """Say why nothing was captured."""
        if self.failure is not None:
            return self.failure
        if self.has_run:
            return "it ran only without autograd, and only forwards that train are captured"
        return "it was not called in a forward that was captured"

    def _fits(self, width: int) -> bool:
        expected, may_be_part = self.layer.num_heads * self.layer.value_dim, False
        if self.what == "inputs":
            expected = self.layer.weights["key"].in_features
        elif (weight := self.layer.weights.get("output")) is not None:
            may_be_part = weight.is_sharded and expected % width == 0  # tensor parallelism: the heads of this rank
        if width == expected or may_be_part:
            return True
        self.failure = f"the tensor that holds its {self.what} has {width} features, expected {expected}"
        return False

    def _features_last(self, given: Tensor) -> Tensor:
        """Read the input of a convolution, ``(batch, features, ...)``, as ``(batch, positions, features)``."""
        module = self.layer.output_module if self.what == "outputs" else _input_module(self.layer)
        size = getattr(module, "kernel_size", None)
        return given.flatten(-len(size)).mT if isinstance(size, tuple) else given

    def _remember_padding(self, given: Tensor) -> None:
        """Keep what is known of padding now, for when the forward is repeated within the backward."""
        shape = tuple(self._features_last(given).shape[:-1])
        self._padding_seen[shape] = self.find(shape)

    def _thin(self) -> None:
        total = sum(sample.count for sample in self._samples)
        if sum(len(sample.tokens) for sample in self._samples) > self._max_tokens:
            self._samples = [one.thinned(self._max_tokens * one.count // max(total, 1)) for one in self._samples]


# --- samples of tokens


@dataclass(frozen=True)
class _Sample:
    """Tokens of one forward: ``(tokens, features)``, which of them are no padding, and of how many they were taken."""

    tokens: Tensor
    valid: Tensor | None
    count: int

    @classmethod
    def of(cls, tokens: Tensor, limit: int, padded: Tensor | None) -> _Sample:
        """Take tokens that are spread evenly over a forward, those of padding last; the device is not waited for."""
        flat = tokens.reshape(-1, tokens.shape[-1])
        count = len(flat)
        if count <= limit:
            return cls(flat.clone(), None if padded is None else ~padded.reshape(-1).to(flat.device), count)
        # A prime: a plain stride with a common factor would see the same few positions of every sequence.
        kept = next(n for n in range(limit, 1, -1) if all(n % f for f in range(2, math.isqrt(n) + 1)))
        places = torch.arange(kept, device=flat.device)
        if padded is None:
            return cls(flat[places * count // kept], None, count)
        padded = padded.reshape(-1).to(flat.device)
        order, number = padded.to(torch.int8).argsort(stable=True), (~padded).sum()
        spread = torch.where(number > kept, places * number // kept, places)
        return cls(flat[order[spread.clamp_max(count - 1)]], places < number, count)

    def thinned(self, size: int) -> _Sample:
        """Keep tokens that are spread evenly over the sample."""
        kept = min(len(self.tokens), max(1, size))
        places = torch.arange(kept, device=self.tokens.device) * len(self.tokens) // max(kept, 1)
        return _Sample(self.tokens[places], None if self.valid is None else self.valid[places], self.count)


def _order_of_features(layer: AttentionLayer) -> Tensor | None:
    """The features of all heads among those that the output projection takes; `None` if they are in order."""
    weight = layer.weights.get("output")
    rows = None if weight is None else weight.terms[0].factors[0]
    if rows is None or len(rows.names) > 1:
        return None
    features = (rows.starts // rows.columns if rows.stride == 1 else rows.starts % rows.stride).flatten()
    return None if torch.equal(features, torch.arange(len(features))) else features


def _input_module(layer: AttentionLayer) -> nn.Module | str:
    """Find the module whose input the keys are made of; a reason if there is none."""
    key: HeadWeight | None = layer.weights.get("key")
    if key is None:
        return "it has no key weight"
    rows = key.terms[0].factors[-1]
    owner, name = rows.owners()[0]
    if len(rows.names) > 1:
        return "its keys come from several maps"
    if name == "weight" or isinstance(owner, nn.MultiheadAttention):
        return owner
    return f"its key projection is a parameter of {type(owner).__name__} and not a module that is called"


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first argument; of torch's attention the keys, ``(batch, length, features)``."""
    if not isinstance(module, nn.MultiheadAttention):
        return args[0] if args else next(iter(kwargs.values()), None)
    key = args[1] if len(args) > 1 else kwargs.get("key")
    turn = isinstance(key, Tensor) and key.dim() == 3 and not module.batch_first
    return key.transpose(0, 1) if turn else key  # type: ignore[union-attr]
