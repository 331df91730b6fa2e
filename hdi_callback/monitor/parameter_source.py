"""Tell parameters that have changed since the last reading, by sums of their bits, so that none is kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.monitor.metrics import PARAMETERS, TRAINING
from hdi_callback.monitor.reading import Result

_SMALL = 2**16  # numbers of a parameter that is summed in one call with others
_OTHERS = 8
"""Parameters outside all layers that are looked at."""


class ParameterChanges(NamedTuple):
    """Changes of other parameters than the weights of heads since the last reading; NaN without a last one."""

    still: Tensor  # ``(layers, parameters)``, of `further_parameters`: 1 unchanged, 0 changed, NaN not to train
    others_move: Tensor  # ``(layers,)``, 1 if parameters of the model outside these layers have changed


class ParameterReader:
    """Tell which parameters have changed, and which train.

    Attributes:
        trained: layer and role of the weights that train.
    """

    def __init__(self) -> None:
        self.trained: set[tuple[str, str]] = set()
        self._looked_at: tuple[Any, ...] = ((),)  # the layers and parameters that the following is made of
        self._trains = torch.zeros(0, device="cpu")  # of each layer, 1 if any of its parameters trains
        self._groups: list[_Group] = []
        self._others: list[int] = []  # places, among the sums of all groups, of parameters outside all layers
        self._alike: list[tuple[tuple[str, ...], Tensor]] = []  # layers, and the places of their parameters, or -1
        self._place_of: dict[int, int] = {}
        self._step: int | None = None
        self._last: Tensor | None = None
        self._is_known = torch.zeros(0, dtype=torch.bool, device="cpu")  # which parameters `_last` holds

    def look(self, model: nn.Module, layers: Sequence[AttentionLayer]) -> bool:
        """Look the parameters of layers up, if those of the model have changed; return whether they have."""
        parameters = list(model.parameters())
        now = (layers, [parameter.requires_grad for parameter in parameters], list(map(id, parameters)), parameters)
        if self._looked_at[:3] == now[:3]:
            return False
        of_layers = [list(layer.module.parameters()) for layer in layers]
        trains = [any(parameter.requires_grad for parameter in of_layer) for of_layer in of_layers]
        self._trains = torch.tensor(trains, dtype=torch.float64, device="cpu")
        self.trained = {
            (layer.name, role)
            for layer in layers
            for role, weight in layer.weights.items()
            if any(parameter.requires_grad for parameter in weight.parameters())
        }
        own = {id(parameter) for of_layer in of_layers for parameter in of_layer}
        outside = [each for each in parameters if id(each) not in own and each.requires_grad and each.numel() > 0]
        outside = outside[:: 1 + len(outside) // _OTHERS]
        further = [list(layer.further_parameters().values()) for layer in layers]
        summed = [
            each
            for of_layer in further
            for each in of_layer
            if each.requires_grad and not is_sharded(each) and each.numel() > 0
        ]
        earlier = self._place_of
        self._groups = _grouped([*outside, *summed])
        self._place_of = {
            id(each): place for place, each in enumerate(each for group in self._groups for each in group[0])
        }
        if self._last is not None:
            places = [earlier.get(key, -1) for key in self._place_of]
            self._last = self._last[torch.tensor(places, device=self._last.device, dtype=torch.int64)]
            self._is_known = torch.tensor(places, device="cpu") >= 0
        self._others = [self._place_of[id(each)] for each in outside]
        alike: dict[int, list[tuple[str, list[int]]]] = {}
        for layer, of_layer in zip(layers, further):
            alike.setdefault(len(of_layer), []).append(
                (layer.name, [self._place_of.get(id(each), -1) for each in of_layer])
            )
        self._alike = [
            (tuple(name for name, _ in group), torch.tensor([at for _, at in group], device="cpu", dtype=torch.int64))
            for group in alike.values()
        ]
        self._looked_at = now  # with the parameters, so that no number is used again
        return True

    def measure(self, step: int, *, with_changes: bool) -> list[Result]:
        """Return which layers train, which of their parameters have changed, and whether some outside have."""
        trains = self._trains
        results = [Result(TRAINING, tuple(layer.name for layer in self._looked_at[0]), (), lambda: trains)]
        if not with_changes:
            return results
        before, is_known, others = None if step == self._step else self._last, self._is_known, self._others
        self._step, self._last = step, _sums_of_bits(self._groups)
        self._is_known = torch.ones(len(self._last), dtype=torch.bool, device="cpu")
        same = () if before is None else (self._last == before,)

        def finish(places: Tensor, *arrived: Tensor) -> ParameterChanges:
            nan = torch.full((len(places),), torch.nan)
            if not arrived:
                return ParameterChanges(nan[:, None].expand(places.shape), nan)
            still = torch.where(is_known, arrived[0].float(), torch.nan)
            of_layers = torch.where(places < 0, torch.nan, torch.cat([still, nan[:1]])[places])
            return ParameterChanges(of_layers, (still[others] == 0).any().float().expand(len(places)))

        return results + [Result(PARAMETERS, names, same, partial(finish, places)) for names, places in self._alike]


_Group = tuple[list[nn.Parameter], Tensor | None]  # parameters, and of small ones, summed in one call, where each ends


def _grouped(parameters: Sequence[nn.Parameter]) -> list[_Group]:
    """Return each parameter once; small ones of one type and device side by side."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in {id(each): each for each in parameters}.values():
        is_small = parameter.numel() <= _SMALL and not is_sharded(parameter)
        groups.setdefault((parameter.dtype, parameter.device) if is_small else id(parameter), []).append(parameter)
    return [(group, _ends(group) if isinstance(kind, tuple) else None) for kind, group in groups.items()]


def _ends(parameters: Sequence[nn.Parameter]) -> Tensor:
    sizes = torch.tensor([0, *(parameter.numel() for parameter in parameters)], device="cpu")
    return sizes.cumsum(0).to(parameters[0].device)


@torch.no_grad()
def _sums_of_bits(groups: Sequence[_Group]) -> Tensor:
    """Return for each parameter the sum of the bits of its numbers, which any change changes."""
    sums = []
    for parameters, ends in groups:
        first: Any = parameters[0]
        # Of a parameter that is spread over ranks, the part of this rank moves with it.
        first = first.to_local() if is_sharded(first) else first
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
        if ends is None:
            sums.append(first.detach().contiguous().view(bits).sum(dtype=torch.int64).reshape(1))
        else:
            flat = torch.cat([first.new_zeros(1), *(parameter.detach().reshape(-1) for parameter in parameters)])
            until = flat.view(bits).cumsum(0, dtype=torch.int64)[ends]
            sums.append(until[1:] - until[:-1])
    together = [each.to(sums[0].device) for each in sums]
    return torch.cat(together) if together else torch.zeros(0, dtype=torch.int64)
