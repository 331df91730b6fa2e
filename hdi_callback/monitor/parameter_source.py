"""Tell which parameters train and which have changed, by sums of their bits, so that none is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.utils.rnn import pad_sequence

from hdi_callback.attention.calls import modules_within
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.monitor.metrics import PARAMETERS, TRAINING
from hdi_callback.monitor.reading import Result

_SMALL = 2**16  # numbers of a parameter that is summed in one call with others


class ParameterChanges(NamedTuple):
    """Changes of other parameters than the weights of heads since the last reading; NaN without a last one."""

    still: Tensor  # ``(layers, parameters)``, of `further_parameters`: 1 unchanged, 0 changed, NaN not to train
    number: Tensor  # ``(layers,)``, of those that are unchanged


class ParameterReader:
    """Look at the parameters of layers; found once, and again where those of the model are replaced or frozen."""

    def __init__(self) -> None:
        self.trained: set[tuple[str, str]] = set()  # layer and role of the weights that train
        self.of_model: list[nn.Parameter] = []
        self._looked_at: tuple[Any, ...] = ((),)  # the layers and parameters that the following is made of
        self._trains = torch.zeros(0, device="cpu")  # of each layer, 1 if any of its parameters trains
        self._groups: list[tuple[list[nn.Parameter], Tensor | None]] = []  # and where small ones end, side by side
        self._place_of: dict[int, int] = {}  # number of a parameter -> its place among the sums of all groups
        self._places = torch.zeros(0, 0, device="cpu")  # of the parameters of each layer, -1 where there is none
        self._step: int | None = None
        self._last: Tensor | None = None  # sums of the last reading
        self._is_known = torch.zeros(0, dtype=torch.bool, device="cpu")  # which of them there are

    def look(self, model: nn.Module, layers: Sequence[AttentionLayer]) -> bool:
        """Find the parameters of layers, if those of the model have changed; return whether they have."""
        tables = [module._parameters for module in modules_within(model) if module._parameters]
        parameters = [parameter for table in tables for parameter in table.values() if parameter is not None]
        now = (layers, [parameter.requires_grad for parameter in parameters], list(map(id, parameters)), parameters)
        if self._looked_at[:3] == now[:3]:
            return False
        trains = [any(parameter.requires_grad for parameter in layer.module.parameters()) for layer in layers]
        self._trains = torch.tensor(trains, dtype=torch.float64, device="cpu")
        self.trained = {
            (layer.name, role)
            for layer in layers
            for role, weight in layer.weights.items()
            if any(parameter.requires_grad for parameter in weight.parameters())
        }
        further = [list(layer.further_parameters().values()) for layer in layers]
        groups: dict[Any, dict[int, nn.Parameter]] = {}
        for parameter in (each for of_layer in further for each in of_layer):
            if parameter.requires_grad and not is_sharded(parameter) and parameter.numel() > 0:
                is_small = parameter.numel() <= _SMALL
                kind = (parameter.dtype, parameter.device) if is_small else id(parameter)
                groups.setdefault(kind, {})[id(parameter)] = parameter
        self._groups = [
            (list(group.values()), _ends(list(group.values())) if isinstance(kind, tuple) else None)
            for kind, group in groups.items()
        ]
        earlier = self._place_of
        self._place_of = {key: place for place, key in enumerate(key for group in groups.values() for key in group)}
        if self._last is not None:
            places = torch.tensor([earlier.get(key, -1) for key in self._place_of], device="cpu", dtype=torch.int64)
            self._is_known = places >= 0
            self._last = self._last[places.clamp(min=0).to(self._last.device)] if len(self._last) else None
        at = [[self._place_of.get(id(parameter), -1) for parameter in of_layer] for of_layer in further]
        of_layers = [torch.tensor(of_layer, device="cpu", dtype=torch.int64) for of_layer in at]
        self._places = pad_sequence(of_layers, batch_first=True, padding_value=-1)
        self._looked_at, self.of_model = now, parameters  # with the parameters, so that no number is used again
        return True

    def measure(self, step: int, *, with_changes: bool) -> list[Result]:
        """Return which layers train, and which of their parameters have changed."""
        trains, places, names = self._trains, self._places, tuple(layer.name for layer in self._looked_at[0])
        results = [Result(TRAINING, names, (), lambda: trains)]
        if not with_changes:
            return results
        before, is_known = None if step == self._step else self._last, self._is_known
        self._step, self._last = step, self._sums_of_bits()
        self._is_known = torch.ones(len(self._last), dtype=torch.bool, device="cpu")
        same = () if before is None else (self._last == before,)

        def finish(*arrived: Tensor) -> ParameterChanges:
            still = torch.full(places.shape, torch.nan)
            if not arrived:
                return ParameterChanges(still, torch.full((len(places),), torch.nan))
            is_there = (places >= 0) & torch.cat([is_known, is_known.new_zeros(1)])[places]
            still[is_there] = arrived[0].float()[places[is_there]]
            return ParameterChanges(still, still.nansum(-1))

        return [*results, Result(PARAMETERS, names, same, finish)]

    @torch.no_grad()
    def _sums_of_bits(self) -> Tensor:
        """Return for each parameter the sum of the bits of its numbers, which any change changes."""
        sums = []
        for parameters, ends in self._groups:
            first = parameters[0]
            if ends is None:
                sums.append(bits_of(first).sum(dtype=torch.int64).reshape(1))
            else:
                flat = _flatten_dense_tensors([first.new_zeros(1), *parameters])
                until = bits_of(flat).cumsum(0, dtype=torch.int64)[ends]
                sums.append(until[1:] - until[:-1])
        together = [each.to(sums[0].device) for each in sums]
        return torch.cat(together) if together else torch.zeros(0, dtype=torch.int64)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of each number of a tensor as a whole number, flat."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(kinds[tensor.element_size()])


def _ends(parameters: Sequence[nn.Parameter]) -> Tensor:
    sizes = torch.tensor([0, *(parameter.numel() for parameter in parameters)], device="cpu")
    return sizes.cumsum(0).to(parameters[0].device)
