"""The first forward that trains, written down while it runs: nothing runs twice, and nothing has to be put back.

The heads are known when it has returned. What a reading of its step needs is kept until then: a few rows of each
attention, which is read as soon as the next begins, and the tensors that modules with weights take. Autograd keeps
those in any case; where it does not (checkpointing, frozen weights), some tokens are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.calls import ModuleCall, running_calls
from hdi_callback.attention.capture.capture import Capture, Sample, first_of
from hdi_callback.attention.capture.padding import PaddingChoice, TokenMask, find_padding
from hdi_callback.attention.capture.reader import KINDS, PRODUCTS, CoreSample, Reader, aside
from hdi_callback.attention.discovery.find import OnRead, TapeReader, survey_tape
from hdi_callback.attention.discovery.sites import site_of
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.layer import Survey
from hdi_callback.attention.releases import arguments_of, has_saving_hooks
from hdi_callback.attention.tape import Step, Tape, tensors_in
from hdi_callback.guard import describe, warnings_off


@dataclass
class _Held:
    """An attention that has run, until the next begins."""

    step: Step
    func: Any
    args: Any
    kwargs: Any
    out: Any
    calls: list[ModuleCall]
    versions: list[int]  # of inputs and outputs: whether they were written into since
    products: dict[int, Tensor] = field(default_factory=dict)


class FirstForward:
    """Records a forward on a tape, with the samples that a reading needs of it.

    At most `max_tokens` tokens of a module are copied; `keeps` says whether the forward that runs now is captured.
    """

    def __init__(
        self,
        model: nn.Module,
        padding: PaddingChoice,
        max_tokens: int,
        keeps: Callable[[], bool],
        on_read: OnRead | None = None,
    ) -> None:
        self.tape, self.keeps = Tape(model, self._on_step), keeps
        self._padding, self._max_tokens, self._on_read = padding, max_tokens, on_read
        self._paths = {module: name for name, module in model.named_modules()}
        self._reading = TapeReader(self.tape)
        self._reader = Reader({}, self, 64)
        self._held: _Held | None = None
        self._at: dict[tuple[tuple[str, bool], int], int] = {}  # `Site.place` and ordinal -> the number of its step
        self._inputs: dict[nn.Module, list[tuple[Tensor | Sample, int, TokenMask]]] = {}
        self._rows: dict[int, CoreSample] = {}
        self._outputs: dict[int, Sample] = {}
        self._masks: dict[int, TokenMask] = {}

    # --- while it runs

    def take_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Store the input of a module that may hold head outputs."""
        try:
            with torch._C.DisableTorchFunction():  # modes of the user's see nothing of it
                self._take_input(module, args, kwargs)
        except Exception as error:
            self.tape.errors.append(f"{type(module).__name__}: {describe(error)}")

    def _take_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        weights = [
            parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() > 1
        ]
        if not (weights and self.keeps() and torch._C._current_graph_task_id() == -1):
            return
        tensor = first_of(args, kwargs)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta or tensor.is_nested:
            return
        if is_sharded(tensor):
            return
        with aside():
            mask = find_padding(tuple(tensor.shape[:-1]), self._padding, layer=self._paths.get(module, ""))
        is_kept = (
            all(parameter.requires_grad for parameter in weights) and torch.is_grad_enabled() and not has_saving_hooks()
        )
        tokens: Tensor | Sample = tensor
        if not is_kept and tensor.shape[-1] in weights[0].shape:
            with aside():
                tokens = Sample.of(tensor, self._max_tokens, mask.padded)
        self._inputs.setdefault(module, []).append((tokens, tensor._version if is_kept else 0, mask))

    def _on_step(self, step: Step | None, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kind = KINDS.get(func)
        if self._held is not None and func in PRODUCTS and step is not None and self.keeps():
            self._held.products[step.number] = out
        normaliser = step.normaliser if step is not None else None
        if step is None or not (normaliser or step.is_recognised):
            return
        self._read_held()
        if normaliser is not None:  # a function of autograd's computes without it: the product with values decides
            args, kwargs = (self.tape.normalisers.scores_of(normaliser),), {}
        elif kind is None or not self.keeps():
            return
        if step.path is not None and torch._C._current_graph_task_id() == -1:
            versions = _versions((args, *kwargs.values(), out))
            self._held = _Held(step, func, args, kwargs, out, running_calls(), versions)
            ordinal = step.ordinal if normaliser is None else normaliser.start.ordinal
            self._at[(step.path, normaliser is not None), ordinal] = step.number

    def _read_held(self) -> None:
        """Read the attention before this one, whose matmul with the values has run."""
        held = self._held
        is_superseded = held is not None and held.func not in KINDS and held.step.normaliser is None
        if held is None or is_superseded or held.versions != _versions((held.args, *held.kwargs.values(), held.out)):
            self._held = None
            return
        with aside(), torch.device("cpu"), warnings_off():
            self._reading.go_on(held.step.number)
            attn = next((attn for attn in self._reading.attentions if attn.core.step is held.step), None)
            try:
                product = None if attn is None else held.products.get(attn.core.parts[0].step.number)
                if attn is None or (attn.core.normaliser is not None and product is None):
                    return
                site = site_of(attn, self.tape.steps)
                stub: Any = SimpleNamespace(name=held.step.number, value_dim=attn.width)
                if site.kind == "fused":
                    received = arguments_of(held.func, held.args, held.kwargs)
                    self._reader._read_fused(stub, site, received, held.out)
                    return
                self._reader._read_weights(stub, site, self._reader._rows_of_scores(site, held.args[0]), held.out)
                if product is not None:
                    self._reader._hand_outputs(stub, site, product.mT if site.flipped else product)
            except Exception:  # its rows are named as absent
                pass
            finally:
                self._held = None

    # what a `Reader` hands over

    def wants_outputs(self, number: Any) -> bool:
        """Head outputs of a softmax are read at its product."""
        return self._held is not None and KINDS.get(self._held.func) == "fused"

    def padded_queries(self, number: Any, shape: tuple[int, int], hidden: Tensor | None) -> Tensor | None:
        """Return which queries are padding; `None` if none is known."""
        assert self._held is not None
        of_shape = hidden if hidden is not None and tuple(hidden.shape) == shape else None
        mask = find_padding(shape, self._padding, layer=self._held.step.path or "", hidden_keys=of_shape,
                            calls=self._held.calls)  # fmt: skip
        self._masks[number] = mask
        return mask.padded

    def take_rows(self, number: Any, sample: CoreSample) -> None:
        """Store sampled rows."""
        self._rows[number] = sample

    def take_outputs(self, number: Any, outputs: Tensor) -> None:
        """Store a sample of head outputs."""
        flat = outputs.flatten(2)
        self._outputs[number] = Sample.of(flat, self._max_tokens, self._masks.get(number, TokenMask()).padded)

    def fail(self, number: Any, reason: str) -> None:
        """Its rows are named as absent."""

    # --- when it has returned

    def read(self) -> Survey:
        """Return the layers that the recorded forward shows."""
        self._read_held()
        with aside(), torch.device("cpu"), warnings_off():
            return survey_tape(self.tape, self._on_read, self._reading)

    def hand_over(self, capture: Capture) -> None:
        """Pass this forward's samples on to a capture, as if it had been armed."""
        for module, tap in capture.taps:
            for tokens, version, mask in self._inputs.get(module, ()):
                if isinstance(tokens, Sample) or tokens._version == version:
                    tap.hand_over(tokens, mask if mask.padded is not None else self._mask_of(tap, mask))
        for layer in capture.read_layers:
            numbers = [
                number for (place, at), number in self._at.items() for site in layer.sites
                if site.place == place and at % site.period == site.ordinal and number in self._rows
            ]  # fmt: skip
            for number in sorted(set(numbers)):
                capture.take_rows(layer.name, self._rows[number])
                capture.has_entered(layer)
                if layer.output_module is None and number in self._outputs:
                    capture.layers[layer.name].outputs.hand_over(self._outputs[number], self._masks[number])

    def forget(self) -> None:
        """Release all tensors now, and not when Python collects cycles."""
        for tensors in (self._inputs, self._rows, self._outputs, self._masks, self._at, self.tape._cells):
            tensors.clear()
        self.tape.steps = []
        self.tape.normalisers.forget()
        self.tape._on_step = self._held = None
        self._reading, self._reader = TapeReader(self.tape), Reader({}, self, 64)

    def _mask_of(self, tap: Any, mask: TokenMask) -> TokenMask:
        for site in tap.layer.sites:
            number = self._at.get((site.place, site.ordinal))
            if number in self._masks and self._masks[number].padded is not None:
                return self._masks[number]
        return mask


def _versions(value: Any) -> list[int]:
    """Return how often the tensors in lists and tuples were written into."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors_in(value)]
