"""Runs modules traced, and reads each kind once: modules that compute the same have the same heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hdi_callback.attention.isolation import MOST_SECONDS, Deadline, isolated
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.attention.trace.draw import Draw
from hdi_callback.attention.trace.head_rows import SINGLE_KEYS
from hdi_callback.attention.trace.inputs import (
    Inputs,
    arguments_left_out,
    other_sizes,
    synthetic_inputs,
    with_optional,
    with_other_tokens,
)
from hdi_callback.attention.trace.layers import Found, layers_in
from hdi_callback.attention.trace.run import Traceable
from hdi_callback.attention.trace.states import Attribute, differing_attributes, watched
from hdi_callback.attention.trace.traced_run import TracedRun
from hdi_callback.attention.trace.unread import unread_function
from hdi_callback.attention.trace.verify import carried_over, compute_the_same, contradiction_of

_MOST_INPUTS = 32  # synthetic ones that are tried for one module
_MOST_WITHOUT_HEADS = 3  # runs of one module that show no heads


@dataclass(frozen=True)
class _Traced:
    """One traced run of a module, to be compared with others like it.

    Attributes:
        name: dotted path of the module.
        module: the module.
        inputs: what it was run with.
        run: the run.
        found: what was read in it.
        error: what ended the first run that showed no heads, as a clause; empty if none did.
        unread: plain attributes of parts that no such run reads, whatever their values.
    """

    name: str
    module: nn.Module
    inputs: Inputs | None = None
    run: TracedRun | None = None
    found: Sequence[Found] | None = None
    error: str = ""
    unread: set[Attribute] = field(default_factory=set)

    @property
    def worth(self) -> int:
        """Rank of a run: 3 if all cores were read to the end, 2 if some were, 1 if all were refused, 0 without any."""
        found = self.found or ()
        if any(result.layer is not None for result in found):
            is_whole = (
                self.run is not None and self.run.error is None and all(result.layer is not None for result in found)
            )
            return _BEST if is_whole else 2
        return 1 if found else 0


_BEST = 3
_OPTIONAL = "its heads change if the argument `{name}` is passed, and no forward has shown whether it is passed"
_DEPENDS = "its heads are other rows if queries, keys and values come from different tokens"


class KindTracer:
    """Reads the attention of modules, each kind of them once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[_Traced]] = {}
        self._slow: set[Any] = set()
        self._errors: dict[Any, str] = {}
        self._optional: dict[type[nn.Module], set[str]] = {}  # arguments that change heads, by the class they belong to

    def is_slow(self, module: nn.Module) -> bool:
        """Return whether modules of this kind ran into the time limit without showing heads.

        Args:
            module: the module.

        Returns:
            True if so; such a module is run no further.
        """
        return bool(self._slow) and _kind_of(module) in self._slow

    def error_of(self, module: nn.Module) -> str:
        """Return what ended the last runs of modules of this kind.

        Args:
            module: the module.

        Returns:
            The end of a reason: ``": it raises TypeError (...)"``; empty if nothing is known.
        """
        return self._errors.get(_kind_of(module), "")

    def function_in(self, module: nn.Module) -> str:
        """Return which function of modules of this kind hides what it computes.

        Args:
            module: the module.

        Returns:
            A clause; empty if there is none.
        """
        runs = [twins[0].run for kind, twins in self._known.items() if twins and kind[:2] == _kind_of(module)]
        return next(filter(None, (unread_function(run) for run in runs if run is not None)), "")

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
            recorded: arguments of a real forward; synthetic inputs by default.
            is_known: returns whether the attention at a path within the module is known.

        Returns:
            What was found; `None` if it could not be run.
        """
        if self.is_slow(module):
            return None
        kind = (*_kind_of(module), None if recorded is None else tuple(map(_form_of, recorded)))
        deadline = Deadline(MOST_SECONDS)
        twins = self._known.setdefault(kind, [])
        if twins and twins[0].found is None:
            return None
        differences = [(twin, differing_attributes(twin.module, module)) for twin in twins]
        for twin, differing in differences:
            if twin.found is not None and differing is not None and differing <= twin.unread:
                return carried_over(twin.found, twin.module, module, twin.name, name)
        try:
            with isolated(module, seconds=MOST_SECONDS):
                traceable: Traceable | None = None
                for twin, differing in differences:
                    if twin.found is None:
                        return None
                    traceable = traceable or Traceable(module)
                    if _computes_the_same(traceable, twin, differing or frozenset()):
                        return carried_over(twin.found, twin.module, module, twin.name, name)
                traced = _traced(name, module, recorded or synthetic_inputs(module), is_known)
                if recorded is None:
                    traced = self._checked(traced, is_known)
        except Exception:  # a module that raises costs only its own heads
            if deadline.has_passed:
                self._slow.add(_kind_of(module))
            return None
        if traced.found is None and deadline.has_passed:
            self._slow.add(_kind_of(module))
        self._errors[_kind_of(module)] = traced.error
        twins.append(traced)
        return traced.found

    def _checked(self, traced: _Traced, is_known: Callable[[str], bool]) -> _Traced:
        """Leave modules undecided whose heads change with an optional argument, or with other tokens for keys."""
        if traced.inputs is None or traced.found is None or not any(one.layer is not None for one in traced.found):
            return traced
        traceable = Traceable(traced.module)
        reasons: dict[str, str] = {}
        parts = {type(part) for part in traced.module.modules()}
        passed_on = sorted({name for part in parts for name in self._optional.get(part, ())})
        untried = dict.fromkeys(arguments_left_out(traced.module, traced.inputs, passed_on))
        for argument, inputs in _others(traced, untried):
            try:
                run, found = layers_in(
                    traceable,
                    inputs.args,
                    inputs.kwargs,
                    traced.name,
                    is_known=is_known,
                    is_synthetic=inputs.is_synthetic,
                )
            except Exception:  # which says nothing about the layer
                continue
            if run.error is not None:
                continue
            untried.pop(argument, None)
            for result in traced.found:
                if result.layer is not None and not _is_confirmed(
                    result, result.layer, traced.found, found, traced.name
                ):
                    reasons.setdefault(result.layer.name, _OPTIONAL.format(name=argument) if argument else _DEPENDS)
                    if argument.isidentifier():
                        self._optional.setdefault(type(traced.module), set()).add(argument)
        kept = tuple(
            Found(one.path, None, reasons[one.layer.name], one.cores, one.maps, True)
            if one.layer is not None and one.layer.name in reasons
            else replace(one, is_undecided=bool(untried) if one.layer is not None else one.is_undecided)
            for one in traced.found
        )
        return replace(traced, found=kept)


def _computes_the_same(traceable: Traceable, twin: _Traced, differing: frozenset[Attribute]) -> bool:
    """Run a module with the inputs of another of its kind; record whether the attributes that differ are read."""
    assert twin.inputs is not None
    assert twin.run is not None
    # Some code does something else while its attributes are watched; unwatched it may compute the same.
    for attributes in (differing, frozenset[Attribute]()) if differing else (differing,):
        with watched(traceable.trial, attributes) as used:
            run = traceable.run(twin.inputs.args, twin.inputs.kwargs, Draw(known=twin.run.drawn))
        if compute_the_same(twin.run, run):
            if not used:  # then neither does a run of the other, nor of a third that differs in these alone
                twin.unread.update(attributes)
            return True
    return False


def _kind_of(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple(
        (path, None if is_lazy(parameter) else tuple(parameter.shape)) for path, parameter in module.named_parameters()
    )


def _as_clause(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return f": it raises {type(error).__name__} ({lines[0].rstrip('.')[:100]})" if lines and error is not None else ""


def _form_of(inputs: Inputs) -> tuple[Any, ...]:
    """Names, types and ranks of the arguments: with others the same module may compute other heads."""
    arguments = [*enumerate(inputs.args), *sorted(inputs.kwargs.items())]
    return tuple((name, type(value), value.dim() if isinstance(value, Tensor) else 0) for name, value in arguments)


def _is_confirmed(
    one: Found, layer: AttentionLayer, before: Sequence[Found], found: Sequence[Found], name: str
) -> bool:
    """Return whether another run shows the same heads of a layer, and no further tokens that it attends to."""
    known, again = (
        [other.layer for other in of if other.layer is not None and other.layer.module is layer.module]
        for of in (before, found)
    )
    if not again:
        return not any(other.path == one.path for other in found)
    is_less = (not layer.left_out and all(other.left_out for other in again)) or len(again) > len(known)
    return not is_less and contradiction_of(layer, found, name) is None


def _others(traced: _Traced, untried: Collection[str]) -> Iterator[tuple[str, Inputs]]:
    """Yield other inputs to run a module with, and the name of the argument that each adds."""
    assert traced.inputs is not None
    module, inputs = traced.module, traced.inputs
    others = with_other_tokens(inputs)
    if others is not None:
        yield "", others
    layer = next((result.layer for result in traced.found or () if result.layer is not None), None)
    if layer is not None and inputs.args[0].dim() == 3:
        batch, length, _ = inputs.args[0].shape
        heads, width = layer.num_key_heads, layer.value_dim
        sizes = (inputs.args[0].shape, (batch, heads, length, width), (batch, length, heads, width))
        yield from with_optional(module, inputs, list(untried), sizes)
        # A module that did not run with tokens like the others may take those of another stream.
        yield from with_optional(module, inputs, list(untried), other_sizes(module, inputs))


def _traced(name: str, module: nn.Module, inputs: Iterable[Inputs], is_known: Callable[[str], bool]) -> _Traced:
    traceable = Traceable(module)
    best = _Traced(name, module)
    without_heads, refused = 0, set[frozenset[tuple[str, int]]]()
    for one in islice(inputs, _MOST_INPUTS):
        try:
            run, found = layers_in(
                traceable, one.args, one.kwargs, name, is_known=is_known, is_synthetic=one.is_synthetic
            )
        except Exception:  # inputs that do not fit
            continue
        if run.error is None:
            refused |= {item.maps for item in found if item.layer is None and not item.is_undecided}
        else:  # a run that stopped may show a part of heads that a complete run refuses
            found = [item for item in found if item.maps not in refused]
        has_layers = any(item.layer is not None for item in found)
        if not has_layers and (run.error is not None or one.is_guess):
            best = replace(best, error=best.error or _as_clause(run.error))
            continue
        traced = replace(best, inputs=one, run=run, found=found)
        if best.run is None or traced.worth > best.worth:
            best = traced
        # A module that treats the first tokens as sequences may run as meant with other inputs.
        without_heads += run.error is None and not any(item.reason == SINGLE_KEYS for item in found)
        if best.worth == _BEST or without_heads == _MOST_WITHOUT_HEADS:
            break
    return best
