"""`Traceable`: a copy of a module that can be run traced.

Linear maps return random features, whatever their input, so that no weight is needed and every output is a
leaf of the graph (`maps`, `draw`); what torch's functions do meanwhile is in `graph_cut`, what a run showed in
`traced_run`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.isolation import isolated, isolated_copy
from hdi_callback.attention.trace.arguments import with_tensors
from hdi_callback.attention.trace.draw import Draw, drawn_parameter
from hdi_callback.attention.trace.exchange import Exchange, Exchanging, of_all_ranks
from hdi_callback.attention.trace.graph_cut import GraphCut
from hdi_callback.attention.trace.maps import MapStub, linear_maps
from hdi_callback.attention.trace.plainly import plainly
from hdi_callback.attention.trace.traced_run import TracedRun


class Traceable:
    """A copy of a module that can be run traced any number of times.

    Args:
        module: the module; it is not changed, and no matrix of a linear map is copied.

    Raises:
        IsolationError: if it cannot be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        maps = linear_maps(module)
        within = {part for linear in maps.values() for part in linear.modules()}
        held = {id(one) for linear in maps.values() for one in linear.parameters()}
        replaced: dict[Any, Any] = {linear: MapStub(linear, path) for path, linear in maps.items()}
        for path, part in module.named_modules():
            if part in within:
                continue
            for name, one in part.named_parameters(recurse=False, remove_duplicate=False):
                if one not in replaced and id(one) not in held:
                    replaced[one] = drawn_parameter(f"{path}.{name}".removeprefix("."), one)
            for name, buffer in part.named_buffers(recurse=False):
                if buffer is not None and buffer.is_meta:
                    replaced[buffer] = drawn_parameter(f"{path}.{name}".removeprefix("."), buffer).detach()
        with isolated(module):
            self.trial = isolated_copy(module, replaced)
            _to_float(self.trial)
            _choose_attention(self.trial, "eager")
        self.keeps_top = False  # it does not run where all are chosen in place of the top k
        self.mixing: dict[str, bool] = {}  # maps that took weights of attention -> whether those of all heads
        self.stubs = [part for part in self.trial.modules() if isinstance(part, MapStub)]
        self.parameters = dict(self.trial.named_parameters())
        for parameter in self.parameters.values():
            parameter.requires_grad_(parameter.is_floating_point())

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], draw: Draw) -> TracedRun:
        """Run it once.

        Args:
            args: by position.
            kwargs: by name.
            draw: the outputs of linear maps.

        Returns:
            What the run showed.
        """
        exchange = Exchange()
        run = self._run(args, kwargs, draw, exchange)
        if exchange.size == 1 or run.error is not None:
            return run
        sent = [Exchange(rank) for rank in range(exchange.size)]
        ranks = [self._run(args, kwargs, draw, one) for one in sent]
        return of_all_ranks(self._run(args, kwargs, draw, Exchange(ranks=sent)), ranks) or run

    def _run(self, args: Any, kwargs: Mapping[str, Any], draw: Draw, exchange: Exchange) -> TracedRun:
        """Run it once, as a single rank."""
        run = TracedRun(self.module, parameters=self.parameters)
        leaves, mode = _Leaves(run), GraphCut(run, draw, self, exchange)
        with isolated(self.module, seed=draw.seed), torch.enable_grad():
            own = with_tensors(args, leaves), with_tensors(dict(kwargs), leaves)
            handles = list(_mark_spans(self.trial, run))
            try:
                # Products in functions that torch.jit.script compiled are in the graph only if it runs them plainly.
                with plainly(mode), torch.jit.optimized_execution(False), Exchanging(exchange), mode:  # type: ignore[attr-defined]
                    output = self._called(*own)
            except Exception as error:
                run.error = error
            else:
                run.outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            finally:
                for handle in handles:
                    handle.remove()
            if run.error is not None and mode.has_all:  # as where tokens are sent to k experts
                self.keeps_top = True
                again = self._run(args, kwargs, draw, exchange)
                self.keeps_top = again.error is None
                return again if self.keeps_top else run
        return run

    def _called(self, args: Any, kwargs: Any) -> Any:
        try:
            return self.trial(*args, **kwargs)
        except KeyError as error:
            if error.args != ("eager",):
                raise
        _choose_attention(self.trial, "sdpa")  # some know no attention but torch's own
        return self.trial(*args, **kwargs)


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Find the tensors in the arguments or the outputs of a forward.

    Args:
        value: tensors, containers and objects of them, or anything.
        depth: how deep containers are searched.

    Yields:
        The tensors.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth:
        items: Any = ()
        if isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, (tuple, list)):
            items = value
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, types.ModuleType)):
            items = vars(value).values()
        for one in list(items):
            yield from tensors_in(one, depth - 1)


# --- parts of a copy


def _to_float(trial: nn.Module) -> None:
    for part in trial.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not isinstance(part, MapStub):
                part._buffers[name] = buffer.to(device="cpu", dtype=torch.float32)


def _choose_attention(trial: nn.Module, name: str) -> None:
    for part in trial.modules():
        config: Any = part.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name  # the config is a copy as well


def _mark_spans(trial: nn.Module, run: TracedRun) -> Iterator[Any]:
    """Note which nodes are made in a call of which module."""
    clock = torch.zeros((), requires_grad=True)
    open_calls: list[tuple[str, int]] = []

    def now() -> int:
        with torch._C.DisableTorchFunction(), torch.enable_grad():  # a part of the forward may forbid gradients
            return int(clock.clone().grad_fn._sequence_nr())  # type: ignore[union-attr]

    for path, part in trial.named_modules():
        if isinstance(part, MapStub):
            continue

        def enter(part: nn.Module, args: Any, path: str = path) -> None:
            open_calls.append((path, now()))

        def leave(part: nn.Module, args: Any, output: Any, path: str = path) -> None:
            while open_calls:
                name, start = open_calls.pop()
                run.spans.append((name, start, now()))
                if name == path:
                    break

        yield part.register_forward_pre_hook(enter)
        yield part.register_forward_hook(leave, always_call=True)


class _Leaves:
    """Puts leaves in the place of tensor arguments; those of numbers are recorded as sources of values."""

    def __init__(self, run: TracedRun) -> None:
        self.run = run
        self.known: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.known:
            dtype = torch.float32 if tensor.is_floating_point() else None
            one = tensor.detach().to(device="cpu", dtype=dtype).clone()
            if one.dtype in (torch.int32, torch.int64) and one.dim():
                self.run.ids.append(one)
            if one.is_floating_point():
                self.run.inputs.append(one.requires_grad_())
                one = one * 1.0  # some code works in place
            self.known[id(tensor)] = one
        return self.known[id(tensor)]
