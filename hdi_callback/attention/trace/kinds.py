"""Runs modules traced, and reads each kind once: what computes the same has the same heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.trace.inputs import Inputs, synthetic_inputs, with_other_tokens
from hdi_callback.attention.trace.layers import Found, layers_in
from hdi_callback.attention.trace.run import Draw, Traceable, TracedRun
from hdi_callback.attention.trace.verify import carried_over, compute_the_same, contradiction_of

_MOST_SECONDS = 60.0  # for one module
_MOST_INPUTS = 32  # that are made up for one module
_MOST_IN_VAIN = 3  # runs of one module that show no heads


@dataclass(frozen=True)
class _Traced:
    """What a run of a module showed, to be compared with others like it."""

    name: str
    module: nn.Module
    inputs: Inputs | None = None
    run: TracedRun | None = None
    found: Sequence[Found] | None = None

    @property
    def worth(self) -> int:
        """All cores read in a run to the end, some of them, refused ones, none."""
        found = self.found or ()
        if any(one.layer is not None for one in found):
            is_whole = self.run is not None and self.run.error is None and all(one.layer is not None for one in found)
            return _BEST if is_whole else 2
        return 1 if found else 0


_BEST = 3
_DEPENDS = "its heads are other rows where queries, keys and values are made of different tokens"


class KindTracer:
    """Reads the attention of modules, each kind of them once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[_Traced]] = {}
        self._slow: set[Any] = set()

    def is_slow(self, module: nn.Module) -> bool:
        """Tell whether modules of this kind took all the time that they are given, and showed nothing.

        Args:
            module: the module.

        Returns:
            True if so; such a module is run no further.
        """
        return bool(self._slow) and _kind_of(module) in self._slow

    def found_in(
        self,
        name: str,
        module: nn.Module,
        recorded: Sequence[Inputs] | None = None,
        *,
        is_known: Callable[[str], bool] = lambda path: False,
    ) -> Sequence[Found] | None:
        """Read the attention cores that a module computes.

        Args:
            name: dotted path of the module in the model.
            module: the module.
            recorded: arguments of a real forward; those that are made up by default.
            is_known: tells of a path within the module whether its attention needs no look.

        Returns:
            What was found; `None` if it could not be run.
        """
        if self.is_slow(module):
            return None
        kind = (*_kind_of(module), recorded is not None)
        end = time.monotonic() + _MOST_SECONDS
        try:
            with isolated(module, seconds=_MOST_SECONDS):
                traceable: Traceable | None = None
                for twin in self._known.get(kind, ()):
                    if twin.inputs is None or twin.run is None or twin.found is None:
                        return None
                    if not twin.found:
                        return ()
                    traceable = traceable or Traceable(module)
                    run = traceable.run(twin.inputs.args, twin.inputs.kwargs, Draw())
                    if compute_the_same(twin.run, run):
                        return carried_over(twin.found, twin.module, module, twin.name, name)
                traced = _traced(name, module, recorded or synthetic_inputs(module), is_known)
                if recorded is None:
                    traced = _checked(traced, is_known)
        except Exception:  # one odd module costs itself
            if time.monotonic() > end:
                self._slow.add(_kind_of(module))
            return None
        if traced.found is None and time.monotonic() > end:
            self._slow.add(_kind_of(module))
        self._known.setdefault(kind, []).append(traced)
        return traced.found


def _kind_of(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple(
        (path, None if is_lazy(one) else tuple(one.shape)) for path, one in module.named_parameters()
    )


def _checked(traced: _Traced, is_known: Callable[[str], bool]) -> _Traced:
    """Leave open what has other heads where the arguments of a module are different tokens."""
    others = None if traced.inputs is None else with_other_tokens(traced.inputs)
    if others is None or traced.found is None or not any(one.layer is not None for one in traced.found):
        return traced
    try:
        run, found = layers_in(Traceable(traced.module), others.args, others.kwargs, traced.name, is_known=is_known)
    except Exception:  # which is no word on the layer
        return traced
    if run.error is not None:
        return traced
    kept = tuple(
        Found(one.path, None, _DEPENDS, one.cores, one.maps, True)
        if one.layer is not None and contradiction_of(one.layer, found, traced.name) is not None
        else one
        for one in traced.found
    )
    return replace(traced, found=kept)


def _traced(name: str, module: nn.Module, inputs: Iterable[Inputs], is_known: Callable[[str], bool]) -> _Traced:
    traceable = Traceable(module)
    best = _Traced(name, module)
    vain = 0
    for one in islice(inputs, _MOST_INPUTS):
        try:
            run, found = layers_in(traceable, one.args, one.kwargs, name, is_known=is_known)
        except Exception:  # inputs that do not fit
            continue
        if run.error is not None and not any(item.layer is not None for item in found):
            continue
        traced = _Traced(name, module, one, run, found)
        if best.run is None or traced.worth > best.worth:
            best = traced
        vain += run.error is None
        if best.worth == _BEST or vain == _MOST_IN_VAIN:
            break
    return best
