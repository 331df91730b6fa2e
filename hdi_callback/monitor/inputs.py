"""What the model is given as a part of the contract: numbers of each batch, judged by how they have varied so far.

Looked at are tokens that are looked up in parameters, and features that enter the first maps. Longer sequences, more
kinds of tokens and less padding, as a curriculum brings them, are none of what is judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.find import name_without_wrappers
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.tape import DATA, Step, tensors_in
from hdi_callback.checks.facts import embedded_tokens
from hdi_callback.guard import Guard, guarded
from hdi_callback.monitor.reading import StepFacts

INPUTS = "inputs"

_FEWEST, _FEWEST_OF_MEAN, _FEW = 6, 3, 0.05  # earlier readings; those of a first mean; so few tokens are others
_KINDS, _PLACES, _FEATURES, _ENTRIES = 256, 4, 64, 2**20  # of tokens and places, by their remainder; that are read

# Name of a number -> by how much it may be more than ever before, the unit in which it is told, and a text.
Numbers = Mapping[str, tuple[float, Callable[[float], float], str]]

_NUMBERS: Numbers = {
    "share": (0.25, float, "one token is {1} of those that are looked up in {0}, and at most {3} before"),
    "mixture": (0.2, float, "known tokens in {0}, or their places, differ by {1} of all from the mean so far, and by "
                "at most {3} before"),
    "kinds": (1.0, lambda bits: 2**-bits, "{1} different tokens are looked up in {0}, and {3} to {2} before"),
    "side": (0.5, float, "rows of {0} that repeat a token at their start, less those that do at their end, are {1}, "
             "and {2} to {3} before"),
    "restarts": (2.0, lambda bits: 2**bits * (bits > -10), "{1} of the positions in {0} do not follow the one before, "
                 "and {2} to {3} before"),
    "deviation": (math.log(2), math.exp, "the standard deviation of what enters {0} is {1}, and {2} to {3} before"),
    "mean": (1.0, float, "the mean of what enters {0} is {1} of its standard deviations, and {2} to {3} before"),
    "means": (0.5, float, "the mean of a feature that enters {0} is {1} standard deviations off that of all, "
              "and {2} to {3} before"),
    "copies": (1.5, lambda bits: 2**-bits, "{1} of the rows that enter {0} differ, and {3} to {2} before"),
    "same": (0.5, float, "what enters {0} is the same to the bit at each reading, and never was before"),
}  # fmt: skip


class UsualRanges:
    """How large numbers have been; what is larger at two readings in a row, and does not move on, is told."""

    def __init__(self, numbers: Numbers, fewest: int) -> None:
        self._numbers, self._fewest = numbers, fewest
        self._ranges: dict[tuple[str, str], tuple[int, Tensor, Tensor]] = {}  # how many, the least and the most
        self._larger: dict[tuple[str, str], tuple[Tensor, str]] = {}  # at the last reading, and what is told of it
        self._told: set[tuple[str, str]] = set()
        self._mixtures: dict[str, tuple[int, Tensor]] = {}  # how many, and their mean

    def departures(self, place: str, values: Mapping[str, Tensor]) -> dict[str, str]:
        """Return what is told of each number of something, in words, that is finite; `""` for nothing."""
        texts: dict[str, str] = {}
        for name, value in values.items():
            key, number = f"{place} {name}", value
            if name == "mixture":
                count, mean = self._mixtures.get(place, (0, value))
                shares = value * (mean > 0)  # new kinds, as a curriculum brings them, leave the others as they are
                shares = value if count < _FEWEST_OF_MEAN else shares / shares.sum().clamp(min=_FEW)
                number = (mean - shares).clamp(min=0).sum()[None] / (count >= _FEWEST_OF_MEAN)  # total variation
            if bool(number.isfinite().all()):
                texts[key] = self._departure(place, name, number)
            if name == "mixture" and not texts.get(key):
                self._mixtures[place] = count + 1, mean + (shares - mean) / (count + 1)
        return texts

    def _departure(self, place: str, name: str, value: Tensor) -> str:
        key, (margin, unit, text) = (place, name), self._numbers[name]
        count, least, most = self._ranges.get(key, (0, value, value))
        first, told = self._larger.get(key, (value, ""))
        if key in self._told:
            return told
        beyond = value - most - (2 * (most - least)).clamp(min=margin)
        at = int(beyond.argmax()) % value.shape[-1]  # a second row is the first with the other sign
        stays = float((value - first).flatten()[at].abs()) <= margin / 2
        if count >= self._fewest and float(beyond.max()) > 0 and stays:
            self._told |= {key} if told else set()
            shown = (f"{unit(float(each.flatten()[at])):.3g}" for each in (value, least, most))
            self._larger[key] = first, told or text.format(place, *shown)
            return self._larger[key][1]
        self._larger.pop(key, None)
        self._ranges[key] = count + 1, least.minimum(value).minimum(first), most.maximum(value).maximum(first)
        return ""


class ModelInputs:
    """Looks at what enters modules in forwards that are written down."""

    def __init__(self) -> None:
        self._guard, self._usual = Guard(), UsualRanges(_NUMBERS, _FEWEST)
        self._tensors: dict[str, Tensor] = {}  # name of a module -> numbers of what entered it first
        self._checksums: dict[str, float] = {}

    def take(self) -> list[StepFacts]:
        """Return what has entered since this was called last."""
        tensors, self._tensors = self._tensors, {}
        return [StepFacts([*tensors.values()], partial(self._terms, [*tensors]))] if tensors else []

    @guarded("looking at what the model is given")
    def look(self, step: Step | None, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take numbers of what is looked up in a parameter, or enters its map, and no parameter was used on before."""
        tokens = [] if step is None else embedded_tokens(step)
        if step is None or not (tokens or step.op in ops.MAPS):
            return
        parameter = next((view.cell.parameter for view in step.inputs if view.cell.parameter), "")
        name = name_without_wrappers(parameter.rpartition(".")[0]) or parameter  # of its module
        if not name or name in self._tensors:
            return
        with _disable_current_modes(), torch.no_grad():
            for view, tensor in zip(step.inputs, tensors_in((args, (*kwargs.values(),)))):
                enters = (
                    tensor.is_floating_point() and view.cell.kind == DATA and not view.cell.is_mapped and view.numel > 1
                )
                if not is_sharded(tensor) and (enters or any(view.value is each for each in tokens)):
                    self._tensors[name] = _of_features(tensor) if enters else _of_tokens(tensor)

    def _terms(self, names: Sequence[str], *arrived: Tensor) -> dict[tuple[str, int, str], Any]:
        terms: dict[tuple[str, int, str], Any] = {}
        for name, tensor in zip(names, arrived):
            (checksum, different), numbers = tensor[:2], tensor[2:]
            values = {"copies": -different.log2()[None]}
            values["same"] = torch.tensor([float(self._checksums.get(name) == float(checksum))])
            if len(numbers) <= 2 + _FEATURES:
                mean, deviation = numbers[:2]
                pairs = {"deviation": deviation.log(), "mean": mean / deviation}
                pairs |= {"means": (numbers[2:] - mean) / deviation} if len(numbers) > 2 else {}
            else:
                (length, is_place, side), mixture = numbers[:3], numbers[3:]
                shares, pairs = mixture.view(_KINDS, -1).sum(1), {"side": side}
                values |= {"share": shares, "mixture": mixture, "kinds": -(shares > 0).sum()[None].log2()}
                if bool(is_place > 0.5):  # each length has other places
                    name, values = f"{name} of {int(length)} places", {}
                    pairs["restarts"] = (1 - is_place).clamp(min=2**-10).log2()
            values |= {key: torch.stack([value, -value]).view(2, -1) for key, value in pairs.items()}
            self._checksums[name] = float(checksum)
            terms |= {(key, 0, INPUTS): text for key, text in self._usual.departures(f"`{name}`", values).items()}
        return terms


def _of_tokens(tokens: Tensor) -> Tensor:
    """Return a checksum, and numbers of tokens ``(rows, places)``."""
    tokens = tokens.detach().long()
    flat, ends = tokens.flatten(), (tokens[:, :2], tokens[:, -2:])
    repeats = [(end[:, 0] == end[:, -1]).float().mean() for end in ends]
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).flatten() % _PLACES
    shares = torch.zeros(_KINDS * _PLACES, device=tokens.device)
    shares.index_add_(0, flat % _KINDS * _PLACES + places, torch.ones_like(flat) / len(flat))
    is_place = (tokens[:, 1:] - tokens[:, :-1] == 1).float().mean().nan_to_num()
    length = torch.full_like(is_place, tokens.shape[1])
    return torch.cat([_of_rows(tokens), torch.stack([length, is_place, repeats[0] - repeats[1]]), shares])


def _of_features(features: Tensor) -> Tensor:
    """Return a checksum, and numbers of features."""
    rows = features.detach().flatten(1) if features.dim() == 4 else features.detach().flatten(0, -2)
    rows = rows[:: max(1, rows.numel() // _ENTRIES)].float()
    numbers = torch.stack([rows.mean(), rows.std()]), rows[:, : _FEATURES * (features.dim() != 4)].mean(0)
    return torch.cat([_of_rows(rows.contiguous().view(torch.int32)), *numbers])


def _of_rows(rows: Tensor) -> Tensor:
    """Return a checksum of whole numbers, and the share of rows that differ."""
    prime, places = 2**31 - 1, torch.arange(1, rows.shape[1] + 1, device=rows.device)  # coarse numbers end with zeros
    weights = (places * 2654435761 ^ places << 13) * 2246822519 % prime  # in no even steps, as sums of few are few
    sums = ((rows.long() * weights % prime).sum(-1) % prime).sort().values
    return torch.stack([(sums * sums % prime).sum() % 16777213, ((sums.diff() != 0).sum() + 1) / len(rows)]).float()
