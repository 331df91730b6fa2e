"""What stands still from reading to reading though it is to train: parameters outside attention, and all rates.

Versions of parameters count for nothing what is written. Of those that are written no more bits are compared once, and
it is looked at whether their module runs. Attention is left to *frozen weights*, and so is a model that moves nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, int64, nn, zeros
from torch.optim import Optimizer

from hdi_callback.attention.discovery.find import name_without_wrappers
from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.hooks import Hook
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.monitor.parameter_source import bits_of
from hdi_callback.monitor.reading import StepFacts, Terms

STILL = "step still"
UNUSED = "an output without a loss, or no part of the optimizer"
_STOPPED = "nothing has moved {{}} since step {}, though it requires a gradient and runs"
CUT_OFF = "no gradient has reached"
UNREAD = "no operation of the forwards that were compared takes {}, though the optimizer holds it"
_CUT_OFF = f"{CUT_OFF} {{{{}}}} from step {{}} on, though the optimizer holds it and it runs"
_UNUSED = f"nothing has moved {{{{}}}} from step {{}} on, though it requires a gradient and runs: {UNUSED}"
_NO_RATE = "each rate of the optimizer is below a 10,000th of its largest since step {}"
_MOVED, _STILL, _STEPS = 8, 3, 20  # readings at which it has moved; at which it then has not, for how many steps
_RATES = ""  # name of all rates
_TINY, _SHARE = 1e-4, 0.1  # of its largest, that a rate is below; of all steps, as a schedule ends in fewer


class Standstill:
    """Notes at each reading what has moved since the one before."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._step, self._readings = model, 0, 0
        self._trained: dict[str, nn.Parameter] = {}
        self._rates = nn.Parameter(zeros(1, device="cpu"))  # stands for all rates, and no one writes it
        self._versions: dict[str, int] = {}
        self._first: dict[str, int] = {}  # the reading from which on it moves, where that is not the first
        self._still: dict[str, tuple[int, int, int]] = {}  # readings at which it moved, and then not; since which step
        self._settled: set[str] = set()  # what stands still now and then, and what was looked at
        self._waiting: dict[str, tuple[nn.Module, Tensor]] = {}  # for one look more, with bits at the first
        self._ran: set[nn.Module] = set()
        self._most: dict[tuple[int, int], float] = {}  # optimizer, group -> its largest rate
        self._told: dict[str, str] = {}  # on the host

    def arm(self) -> list[Any]:
        """Return hooks that note whether the modules run whose parameters stand still."""
        self._ran = {self._model}
        modules = {module for module, _ in self._waiting.values()}
        return [Hook(self, "_note_run").on(module.register_forward_pre_hook) for module in modules]

    def _note_run(self, module: nn.Module, args: Any) -> None:
        self._ran.add(module)

    def look(
        self, step: int, parameters: Sequence[nn.Parameter], optimizers: Collection[Optimizer],
        layers: Iterable[AttentionLayer], *, is_new: bool,
    ) -> StepFacts:  # fmt: skip
        """Compare with the reading before; `is_new`: there are other parameters, or others are to train."""
        if is_new or not self._trained:
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
            self._trained = {
                names[id(each)]: each for each in parameters if id(each) in names and each.requires_grad
                and each.is_floating_point() and each.numel() and not is_sharded(each)
            }  # fmt: skip
        before, self._versions = self._versions, {name: each._version for name, each in self._trained.items()}
        still = {name for name, version in self._versions.items() if version == before.get(name)}
        looked_at, tensors = dict[str, tuple[str, nn.Module]](), list[Tensor]()
        if len(still) < len(self._trained):  # else all steps were skipped, or nothing moves at all
            self._first |= dict.fromkeys(self._versions.keys() - before.keys() if before else (), self._readings + 1)
            still |= set() if self._has_rate(optimizers) else {_RATES}
            places = [layer.name for layer in layers]
            attention, blocks = (tuple(f"{each}." for each in of if each) for of in (places, map(_parent, places)))
            for name, moved, since in self._lasting(step, still):
                parameter, place = self._trained.get(name, self._rates), name_without_wrappers(name)
                bits = bits_of(parameter).sum(dtype=int64)
                if name in self._waiting:
                    module, bits_before = self._waiting.pop(name)
                    is_held = any(parameter is each for held in optimizers for each in parameters_of(held))
                    begun = _CUT_OFF if is_held and place.startswith(blocks) else _UNUSED
                    phrase = _NO_RATE if name == _RATES else _STOPPED if moved else begun
                    looked_at[name] = phrase.format(since), module
                    tensors += [bits_before, bits]
                    self._settled.add(name)
                elif not place.startswith(attention):
                    self._waiting[name] = self._model.get_submodule(_parent(name)), bits
            self._step, self._readings = step, self._readings + 1
        return StepFacts(tensors, partial(self._terms, looked_at, self._ran))

    def _lasting(self, step: int, still: set[str]) -> Iterator[tuple[str, int, int]]:
        """Yield what stands still for long: its name, the readings at which it moved before, and since which step."""
        for name in self._still.keys() - still:
            self._settled |= {name} if self._still.pop(name)[0] else set()
            self._first[name] = self._readings
            self._waiting.pop(name, None)
        still -= self._settled
        for name in [name for name in (*self._trained, _RATES) if name in still]:
            moved, count, since = self._still.get(name, (self._readings - self._first.get(name, 1), 0, self._step))
            self._still[name] = moved, count + 1, since
            lasts = count + 1 >= _STILL and step - since >= max(_STEPS, _SHARE * step * (name == _RATES))
            if lasts and (moved >= _MOVED or (moved == 0 and name != _RATES)):
                yield name, moved, since

    def _has_rate(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether some group has more than next to nothing of its largest rate, or one that is not known."""
        rates = {
            (id(optimizer), number): group.get("lr")
            for optimizer in optimizers for number, group in enumerate(optimizer.param_groups)
        }  # fmt: skip
        floats = {group: rate for group, rate in rates.items() if isinstance(rate, float | int)}
        self._most |= {group: max(rate, self._most.get(group, rate)) for group, rate in floats.items()}
        return len(floats) < len(rates) or any(rate >= _TINY * self._most[group] for group, rate in floats.items())

    def _terms(self, looked_at: Mapping[str, tuple[str, nn.Module]], ran: set[nn.Module], *arrived: Tensor) -> Terms:
        for (name, (phrase, module)), was, now in zip(looked_at.items(), arrived[::2], arrived[1::2]):
            if module in ran and bool(was == now):  # else it is a dropped layer or an expert, or `.data` is written
                self._told[name_without_wrappers(name)] = phrase
        return {("", 0, STILL): dict(self._told)}


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer holds, of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
