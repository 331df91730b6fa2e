"""One extra forward before the first call of a model, of which nothing remains: it shows where heads are.

Heads have to be known before the first compiled call, as hooks that are installed later are silently not seen, and a
mode around a compiled call ends its compilation. So the model is run once more: with the same inputs, without autograd,
uncompiled in this thread, and with everything put back afterwards that a forward may change. One mechanism serves eager
and compiled training. The user's hooks on modules run in it once more, and what a forward changes outside of modules
(a file, a global counter) is not put back.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from hdi_callback.attention.compiled_calls import BeforeCompiledCalls, uncompiled_here
from hdi_callback.attention.hooks import Hook
from hdi_callback.attention.layer import Refusal, Survey
from hdi_callback.attention.sharding import over_all_ranks
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import describe, without_modes

if TYPE_CHECKING:
    from hdi_callback.attention.find import OnRead

__all__ = ["FirstCalls", "before_first_call", "inner_model", "nothing_remains"]

OnFound = Callable[[Survey], None]

_here = threading.local()  # `is_extra`: whether an extra forward runs in this thread


def before_first_call(model: nn.Module, on_found: OnFound, on_read: OnRead | None = None) -> FirstCalls:
    """Find the heads of a model by one extra forward, right before its first call.

    Args:
        model: the model. Where its own forward is not called, as that of many a LightningModule, its outermost modules
            that are called take its place, each before its own first call.
        on_found: takes what an extra forward has shown, before the real forward goes on: hooks that it installs are
            seen by it, and by what is compiled then. It is called once more where another part of the model is called
            first, and never with nothing, unless an extra forward failed: then `refused` says why.
        on_read: takes what `claims_of` gives of each extra forward, before `on_found`; warnings are off there.

    Returns:
        A handle, whose `remove()` ends the waiting.
    """
    return FirstCalls(model, on_found, on_read)


class FirstCalls:
    """Waits for the first call of a model, or of its parts; see `before_first_call`."""

    def __init__(self, model: nn.Module, on_found: OnFound, on_read: OnRead | None = None) -> None:
        self._model, self._on_found, self._on_read = model, on_found, on_read
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._looking: int | None = None  # the thread in which a compiled function runs up to its first module
        self._ran: set[nn.Module] = set()  # in an extra forward
        self._handles: dict[nn.Module, RemovableHandle] = {}
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                # First of all hooks, so that the extra call passes all others as the real one does, FSDP's among them.
                hook = Hook(self, "_before_call")
                self._handles[module] = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        # Hooks that are there when a graph is compiled would be traced, and see no batch.
        self._compiled = BeforeCompiledCalls(self._before_compiled_call)

    def remove(self) -> None:
        """Wait no longer; calling it again does nothing."""
        self._leave(list(self._handles))

    def _leave(self, modules: list[nn.Module]) -> None:
        self._compiled.remove()
        for module in modules:
            self._handles.pop(module).remove()

    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Lightning's strategies let a wrapper call `training_step` as the module's forward: it must not run twice.
        is_step = "forward" in vars(module) and hasattr(module, "training_step")
        if getattr(_here, "is_extra", False):  # or that of another monitor, which waits as well
            self._ran.add(module)
            return
        if is_step or torch._C._get_tracing_state() is not None:
            return
        with self._lock:
            if module not in self._handles:  # a replica of `nn.DataParallel`, or another thread was first
                return
            self._leave([module])
        self._ran = set()
        survey = survey_call(self._model, lambda inputs: module(*inputs[0], **inputs[1]), (args, kwargs), self._on_read)
        inner = [one for one in module.modules() if one in self._handles]
        self._leave(inner)
        survey = Survey(survey.layers, (*survey.refused, *self._of_later(inner, survey)))
        if self._looking == threading.get_ident():
            raise _FoundError(survey)
        self._report(survey)

    def _of_later(self, modules: list[nn.Module], survey: Survey) -> list[Refusal]:
        """Name what may attend and did not run: a dropped layer, a part that later steps reach."""
        if not survey.layers:
            return []
        names = {module: name for name, module in self._model.named_modules()}
        kinds = {type(layer.module) for layer in survey.layers}
        return [
            Refusal(names[one], "it did not run in the first forward, where heads are looked for", type(one).__name__)
            for one in modules
            if one not in self._ran and type(one) in kinds
        ]

    def _before_compiled_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a compiled function that reaches the model as it is written, up to its first call of a module."""
        if not self._reaches(function, args, kwargs) or self._looking is not None:
            return
        self._looking = threading.get_ident()
        survey = None
        try:
            with nothing_remains(inner_model(self._model)):
                copies = _copied((args, kwargs))
                function(*copies[0], **copies[1])
        except _FoundError as found:
            survey = found.survey
        except Exception:  # the real call will raise it
            pass
        finally:
            self._looking = None
        if survey is not None:
            self._report(survey)

    def _reaches(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function has a module of the model at hand: nothing else runs twice, such as an optimizer."""
        own = getattr(function, "__func__", function)
        cells = [cell.cell_contents for cell in getattr(own, "__closure__", None) or () if _is_filled(cell)]
        code, names = getattr(own, "__code__", None), getattr(own, "__globals__", {})
        named = [names[name] for name in (code.co_names if code is not None else ()) if name in names]
        near = [getattr(function, "__self__", None), *cells, *named, *args, *kwargs.values()]
        near += [value for one in near if hasattr(one, "__dict__") for value in vars(one).values()]
        inner = {inner_model(module) for module in self._handles}
        return any(isinstance(one, nn.Module) and inner_model(one) in inner for one in near)

    def _report(self, survey: Survey) -> None:
        with without_modes():
            try:
                survey = over_all_ranks(survey, self._model)
            except Exception as error:  # within the user's forward
                reason = f"the heads of all ranks could not be put together: {describe(error)}"
                survey = Survey(refused=(Refusal("", reason, type(self._model).__name__),))
        layers = tuple(one for one in survey.layers if one.name not in self._known)
        refused = tuple(one for one in survey.refused if one.name not in self._known)
        self._known |= {layer.name for layer in layers} | {one.name for one in refused}
        if layers or refused:
            self._on_found(Survey(layers, refused))


class _FoundError(BaseException):
    """Ends a compiled function that was run to see what it calls; no handler of the user's catches it."""

    def __init__(self, survey: Survey) -> None:
        super().__init__()
        self.survey = survey


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def survey_call(
    model: nn.Module, call: Callable[[Any], object], inputs: Any = None, on_read: OnRead | None = None
) -> Survey:
    """Run a forward of which nothing remains, and read the attention in it.

    Args:
        model: the model whose state is kept, and whose names count.
        call: runs the forward, given copies of the inputs.
        inputs: anything that holds tensors.
        on_read: takes what `claims_of` gives; warnings are off there.

    Returns:
        What was found; nothing, and the reason in `refused`, if the forward or the reading raises.

    Raises:
        MisconfigurationError: if a registered layout does not fit.
    """
    from hdi_callback.attention.find import put_together, read_tape
    from hdi_callback.attention.registry import known_layers
    from hdi_callback.attention.tape import Tape

    own = inner_model(model)
    versions = _versions(own)
    try:
        with nothing_remains(own):
            inputs = _copied(inputs)
            _here.is_extra = True
            with Tape(own) as tape:
                call(inputs)
            survey = put_together(own, known_layers(own), read_tape(tape, on_read))
    except MisconfigurationError:  # of a registered layout
        raise
    except Exception as error:
        reason = f"the forward that shows where heads are failed: {describe(error)}"
        return Survey(refused=(Refusal("", reason, type(own).__name__),))
    finally:
        _here.is_extra = False
    written = [name for name, version in _versions(own).items() if versions.get(name, version) != version]
    if written:
        reason = f"a forward without gradient writes into the parameter `{written[0]}`, which was not put back"
        survey = Survey(survey.layers, (*survey.refused, Refusal("", reason, type(own).__name__)))
    return survey


def _versions(model: nn.Module) -> dict[str, int]:
    with torch._C.DisableTorchFunction():
        return {name: one._version for name, one in model.named_parameters() if not one.is_inference()}


def inner_model(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wraps, or the module itself."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


# --- what a forward changes, and its surroundings


@contextmanager
def nothing_remains(model: nn.Module) -> Iterator[None]:
    """Run forwards uncompiled and without autograd, and put back what they change.

    Random states, buffers, plain attributes of modules, the cache of autocast and the shards of FSDP2 are kept. The
    user's dispatch and function modes are off.
    """
    with ExitStack() as stack:
        for one in (
            _without_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            uncompiled_here(),
            _random_states_kept(model),
            _attributes_kept(model),
            _buffers_swapped(model),
            _autocast_cache_off(),
            _fast_path_off(),
            _shards_kept(model),
        ):
            stack.enter_context(one)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the real forward gives them; where they are errors they would end this one
        yield


@contextmanager
def _without_modes() -> Iterator[None]:
    """Let no mode of the user's see what runs; that of a default device stays, as forwards rely on it."""
    taken: list[Any] = []
    while torch._C._len_torch_function_stack():
        taken.append(_pop_mode())
    kept = [mode for mode in reversed(taken) if isinstance(mode, DeviceContext)]
    with _disable_current_modes():
        for mode in kept:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in kept:
                _pop_mode()
            for mode in reversed(taken):
                _push_mode(mode)


@contextmanager
def _random_states_kept(model: nn.Module) -> Iterator[None]:
    """Put back the states of all generators in use; nothing is seeded."""
    generators = [torch.default_generator]
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            generators += backend.default_generators
    if torch.backends.mps.is_available():
        generators.append(torch.mps._get_default_mps_generator())
    held = (value for module in model.modules() for value in vars(module).values())
    generators += {id(one): one for one in held if isinstance(one, torch.Generator)}.values()
    numpy: Any = sys.modules.get("numpy.random")
    states = [(one, one.get_state()) for one in generators]
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        for one, state in states:
            one.set_state(state)
        random.setstate(of_python)
        if of_numpy is not None:
            numpy.set_state(of_numpy)


_OF_TORCH = frozenset(vars(nn.Module()))


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back plain attributes of modules: counters, lists, tensors that are no buffers, auxiliary losses."""
    kept = []
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        kept.append((module, own, [(one, copy.copy(one)) for one in own.values() if type(one) in (list, dict, set)]))
        # A forward may write into them.
        vars(module).update({name: one.detach().clone() for name, one in own.items() if type(one) is Tensor})
    try:
        yield
    finally:
        for module, own, inside in kept:
            for name in vars(module).keys() - _OF_TORCH - own.keys():
                del vars(module)[name]
            vars(module).update({name: one for name, one in own.items() if vars(module).get(name, kept) is not one})
            for one, items in inside:
                _put_back(one, items)


def _put_back(one: Any, items: Any) -> None:
    """Restore the items of a list, dict or set, if they have changed: dynamo guards on what is written."""
    is_same = [*map(id, one)] == [*map(id, items)]
    if type(one) is dict:
        is_same = is_same and all(one[name] is items[name] for name in items)
    if not is_same:
        one.clear()
        (one.extend if type(one) is list else one.update)(items)


@contextmanager
def _buffers_swapped(model: nn.Module) -> Iterator[None]:
    """Let a forward write into copies of the buffers: the buffers and their version counters stay as they are."""
    kept: list[tuple[nn.Module, str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append((module, name, buffer))
                copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        for module, name, buffer in kept:
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


@contextmanager
def _autocast_cache_off() -> Iterator[None]:
    """No weight that is cast without autograd may be found in the cache by the forward that trains."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _fast_path_off() -> Iterator[None]:
    """In evaluation mode, before training begins, torch's encoder would pack its tokens into nested tensors."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _shards_kept(model: nn.Module) -> Iterator[None]:
    """FSDP2 leaves some parameters whole after a forward, until a backward that here does not come."""
    try:
        yield
    finally:
        for module in model.modules():
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()  # type: ignore[operator]


def _copied(inputs: Any) -> Any:
    """Copy the inputs of a call: a forward may write into tensors, and into objects such as a cache of keys."""
    known: dict[int, Any] = {}
    shared = (nn.Module, types.FunctionType, type, torch.Generator)

    def one(value: Any) -> Any:
        if isinstance(value, shared):
            return value
        if id(value) not in known:
            known[id(value)] = value.detach().clone() if isinstance(value, Tensor) else _deep_copy(value)
        return known[id(value)]

    return tree_map(one, inputs)


def _deep_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a file, an iterator, a tensor with a history
        return value
