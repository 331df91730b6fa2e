"""Linear maps and norms that ran, with a few tokens of their inputs and outputs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.layer.changing_hooks import Effect
from hdi_callback.attention.observe.compare.samples import MAX_FEATURES, MapCall, arrangements, sample_of_map
from hdi_callback.attention.observe.module_stack import ModuleStack
from hdi_callback.attention.observe.quiet import holds_numbers

_BEFORE_A_CORE = 64  # calls before an attention among which its queries, keys and values are searched
_AFTER_A_CORE = 8  # and after it, among which its output projection is searched
_MOST_CALLS = 1024  # after which those that are near no attention are released, as those of many experts are


@dataclass(frozen=True, eq=False)
class _Result:
    """A tensor that a call of a map returned, as long as it lives, and how often it had been written to by then."""

    tensor: weakref.ref[Tensor]
    version: int
    call: MapCall
    features_dim: int


@dataclass(frozen=True, eq=False)
class _HookedOutput:
    """Output of a linear map after its forward hooks."""

    module: nn.Module
    call: MapCall
    sample: Tensor | None
    is_same: bool
    is_written: bool

    @property
    def effect(self) -> Effect:
        """Effect of the hooks on the output; the host waits for the device."""
        made = self.call.outputs
        if self.is_written or self.sample is None or self.sample.shape != made.shape:
            return "changed"
        if not torch.equal(torch.nan_to_num(self.sample), torch.nan_to_num(made)):
            return "changed"
        return "none" if self.is_same else "unknown"


class MapLog:
    """Record calls of maps and norms.

    Args:
        stack: the modules that run.
        names: id of a module or parameter -> its dotted path.
        keeps_samples: False: record nothing.
        claimed: ids of modules whose maps are kept wherever they ran.

    Attributes:
        calls: in the order in which they ran.
    """

    def __init__(
        self, stack: ModuleStack, names: Mapping[int, str], *, keeps_samples: bool, claimed: frozenset[int]
    ) -> None:
        self.calls: list[MapCall] = []
        self.keeps_samples = keeps_samples
        self._stack, self._names, self._claimed = stack, names, claimed
        self._order = 0
        self._cores: list[int] = []  # where in the order attention ran
        self._latest: _Result | None = None
        self._hooked_outputs: list[_HookedOutput] = []
        self._settled = 0  # how many calls were kept when some were last released

    def core_ran(self) -> int:
        """Number an attention in the order of the calls.

        Returns:
            The number, greater than those of the calls before it.
        """
        self._cores.append(self._next())
        return self._order

    def map_ran(
        self,
        parameter: Tensor,
        inputs: Tensor,
        made: Tensor,
        features_dim: int = -1,
        *,
        rows: int = 0,
        is_transposed: bool = False,
    ) -> None:
        """Record a product with a parameter; see `MapCall` for the arguments."""
        if not self._can_compare(inputs, made):
            return
        module, owner = self._stack.innermost, self._stack.owner
        keys = (id(parameter),) if module is None else (id(parameter), id(module))
        name = self._names.get(id(parameter), "")
        held = () if module is None else (*module._parameters.items(), *vars(module).items())
        own = next((key for key, value in held if value is parameter), "")  # sharded: not the parameter of before
        if not name and own:
            name = f"{owner}.{own}" if owner else own
        rest = {"rows": rows, "is_transposed": is_transposed, "parameter": own}
        self._add(keys, name or owner, "linear", inputs, made, features_dim, **rest)

    def norm_ran(self, weight: Tensor | None, inputs: Tensor, made: Tensor) -> None:
        """Record a norm, whose features are those that come in."""
        if not self._can_compare(inputs, made):
            return
        keys = (id(weight),) if weight is not None else ()
        self._add_norm(keys, self._names.get(id(weight), "") or self._stack.owner, inputs, made)

    def module_ran(self, module: nn.Module, kind: str, inputs: Any, made: Any, features_dim: int) -> None:
        """Record the input and output of a module as a whole."""
        if not self._can_compare(inputs, made):
            return
        keys, name = (id(module),), self._names.get(id(module), "")
        if kind == "norm":
            self._add_norm(keys, name, inputs, made)
        else:
            self._add(keys, name, kind, inputs, made, features_dim)

    def hooks_ran(self, module: nn.Module, result: Any) -> None:
        """Record the output of a linear map after its forward hooks; see `hook_effects`.

        Args:
            module: the map, whose own call is the latest that was recorded.
            result: what comes behind its hooks.
        """
        latest = self._latest
        if latest is None or id(module) not in latest.call.keys:
            return
        is_tensor = isinstance(result, Tensor) and result.dim() >= -latest.features_dim and holds_numbers(result)
        is_same = latest.tensor() is result
        is_written = is_same and not result.is_inference() and result._version != latest.version
        sample = sample_of_map(result, latest.features_dim) if is_tensor else None
        self._hooked_outputs.append(_HookedOutput(module, latest.call, sample, is_same, is_written))

    def hook_effects(self) -> Iterator[tuple[nn.Module, Effect]]:
        """Yield the effect of forward hooks on the outputs of maps; the host waits for the device.

        Yields:
            A map and what its hooks did in one call.
        """
        for hook in self._hooked_outputs:
            yield hook.module, hook.effect

    def recent(self) -> list[MapCall]:
        """Return the calls before an attention among which its queries, keys and values are searched.

        Returns:
            The latest last.
        """
        return self.calls[-_BEFORE_A_CORE:]

    def tokens(self) -> list[int]:
        """List the token counts of the inputs of earlier linear maps.

        Returns:
            Those of the running module first, the latest first, none twice.
        """
        recent = [call for call in self.recent()[::-1] if call.kind == "linear"]
        return list(dict.fromkeys(call.tokens for call in (*filter(self._is_inside, recent), *recent)))

    def have_one_source(self) -> bool:
        """Return whether the maps of the running module took the same tensor."""
        inside = [call for call in self.recent() if call.kind == "linear" and self._is_inside(call)]
        return len({call.source for call in inside}) == 1

    def _is_inside(self, call: MapCall) -> bool:
        return call.owner == self._stack.owner or call.owner.startswith(f"{self._stack.owner}.")

    def _can_compare(self, inputs: Any, made: Any) -> bool:
        tensors = isinstance(inputs, Tensor) and isinstance(made, Tensor)
        return self.keeps_samples and tensors and holds_numbers(inputs) and holds_numbers(made)

    def _add(
        self, keys: tuple[int, ...], name: str, kind: str, inputs: Tensor, made: Tensor, features_dim: int, **rest: Any
    ) -> None:
        if not made.is_floating_point() or not made.numel() or made.dim() < 1:
            return
        if made.shape[features_dim] > MAX_FEATURES:
            return
        self._let_go()
        tokens = made.numel() // made.shape[features_dim]
        is_token_wise = inputs.dim() == made.dim() and inputs.numel() // inputs.shape[features_dim] == tokens
        before = sample_of_map(inputs, features_dim) if is_token_wise else made.new_empty(0, 0)
        after = sample_of_map(made, features_dim)
        source, owner = inputs.data_ptr(), self._stack.owner
        call = MapCall(self._next(), keys, name, kind, tokens, before, after, source, owner=owner, **rest)
        self.calls.append(call)
        self._latest = _Result(weakref.ref(made), 0 if made.is_inference() else made._version, call, features_dim)

    def _add_norm(self, keys: tuple[int, ...], name: str, inputs: Tensor, made: Tensor) -> None:
        """Record a norm of tokens, or of the heads of tokens: of each order of its dimensions a sample."""
        if inputs.shape != made.shape or inputs.dim() < 2 or not inputs.numel() or inputs.shape[-1] > MAX_FEATURES:
            return
        views = [(inputs[..., None, :, :], made[..., None, :, :])]
        if inputs.dim() >= 4:
            views = [(inputs, made), (inputs.transpose(-3, -2), made.transpose(-3, -2))]
        elif inputs.dim() == 3:
            views += [(inputs[None], made[None]), (inputs.transpose(0, 1), made.transpose(0, 1))]
        ways, counts = [], self.tokens()[:3]
        for one, other in views:
            pairs = zip(arrangements(one, counts), arrangements(other, counts), strict=False)
            ways += [(before, after) for before, after in pairs if before.start == 0]
        empty, tokens = inputs.new_empty(0, 0), inputs.numel() // inputs.shape[-1]
        source, owner = inputs.data_ptr(), self._stack.owner
        call = MapCall(self._next(), keys, name, "norm", tokens, empty, empty, source, owner=owner, ways=tuple(ways))
        self.calls.append(call)

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _let_go(self) -> None:
        if len(self.calls) < _MOST_CALLS + self._settled:
            return
        newest = self._order - _BEFORE_A_CORE
        near = {order for core in self._cores for order in range(core - _BEFORE_A_CORE, core + _AFTER_A_CORE)}
        self.calls = [
            call
            for call in self.calls
            if call.order >= newest or call.order in near or not self._claimed.isdisjoint(call.keys)
        ]
        self._settled = len(self.calls)
