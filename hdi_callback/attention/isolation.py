"""Run code of the user's without a trace: the one way in which this package calls what is not its own.

Trials of a module, copies of it, and reading a weight that a parametrization computes all run code that the user wrote
for training. It may draw random numbers, count its calls, add to a list, print, or end the process. `isolated` puts
back everything that such code can reach, and keeps settings of the user's away from it; `isolated_copy` gives a copy
that calls no hook.

    with isolated(module, seed=0):
        trial = isolated_copy(module)
        trial.forward(torch.randn(1, 8, 64))

What is not put back: files and other processes, what C extensions keep, and tensors of more than 65,536 elements that
are reached other than as parameters and buffers of the copy.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from hdi_callback.attention.user_data import UserData, attributes_of, has_memory
from hdi_callback.errors import HDIError

_MOST_BYTES = 2 * 2**30  # of parameters and buffers in one copy


class IsolationError(HDIError):
    """User code cannot be run apart: it would end the process, or its module cannot be copied."""


@contextmanager
def isolated(
    *modules: nn.Module, seed: int | None = None, seconds: float | None = None, keeps_defaults: bool = False
) -> Iterator[None]:
    """Run the block so that nothing of the user's is left changed, and nothing of the user's acts on it.

    Put back are the states of all generators of random numbers (Python's, numpy's, torch's on every device that is in
    use; no device is initialised for it), data that the code of `modules` reaches (see `UserData`), the environment,
    and torch's settings: default type, gradients, deterministic algorithms, cuDNN, precision. Switched off are
    autocast, modes and saved-tensor hooks of the user's, torch's global module hooks, compilation, warnings, and what
    this thread prints. New tensors lie on the CPU, in float32, unless `keeps_defaults` is set.

    Blocks may be nested: random states are put back at the end of each, everything else at the end of the outermost.

    Args:
        modules: whose code will run.
        seed: of the CPU's generator within; where it is missing, the generator goes on from where it stands.
        seconds: how long the block may take: after that, whatever it asks of torch raises an error.
        keeps_defaults: make new tensors where and as the user's code does, for code that works on the user's own.

    Raises:
        IsolationError: if the block takes too long, or code within raises `SystemExit` or another exception that is
            meant to end the process, other than `KeyboardInterrupt` and what a signal handler raises.
        KeyboardInterrupt: if the user interrupts.

    Example:
        >>> before = torch.get_rng_state()
        >>> with isolated(seed=0):
        ...     first = torch.randn(3)
        >>> with isolated(seed=0):
        ...     second = torch.randn(3)
        >>> torch.equal(first, second), torch.equal(torch.get_rng_state(), before)
        (True, True)
    """
    is_outermost = _active.data is None
    try:
        with ExitStack() as stack:
            stack.enter_context(_random_states_kept())
            if is_outermost:
                _active.data = UserData()
                stack.callback(_forget)
                _isolate(stack)
            data = _active.data
            assert data is not None
            data.note(modules)
            if seed is not None:
                # That of the CPU alone: `torch.manual_seed` would seed every device.
                torch.default_generator.manual_seed(seed)
            if keeps_defaults:
                stack.enter_context(_defaults(*_active.defaults))
            if seconds is not None:
                stack.enter_context(_Clock(seconds))
            yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if _comes_from_signal(error):
            raise
        raise IsolationError(f"its code raises {type(error).__name__}, which would end the run") from error


class _Clock(TorchFunctionMode):
    """Ends what takes too long, at the next of its operations."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._end:
            raise IsolationError(f"it takes more than {self._seconds:g} s")
        return func(*args, **(kwargs or {}))


class _Active(threading.local):
    data: UserData | None = None
    defaults: tuple[torch.device, torch.dtype] = (torch.device("cpu"), torch.float32)  # the user's


_active = _Active()


def _forget() -> None:
    data, _active.data = _active.data, None
    if data is not None:
        data.restore()


def _isolate(stack: ExitStack) -> None:
    """Keep the user's settings away, and put them back when the stack ends."""
    _active.defaults = _default_device(), torch.get_default_dtype()
    stack.enter_context(_flags_kept())
    stack.enter_context(_environment_kept())
    stack.enter_context(_without_global_hooks())
    stack.enter_context(_without_saved_tensor_hooks())
    stack.enter_context(_without_modes())
    has_gradients = torch.is_grad_enabled()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(has_gradients))
    for device in {"cpu", *(device for device in _devices_in_use() if torch.is_autocast_enabled(device))}:
        stack.enter_context(torch.autocast(device, enabled=False))
    stack.enter_context(_defaults(torch.device("cpu"), torch.float32))
    stack.enter_context(_without_compilation())
    stack.enter_context(_muted())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")


# --- random numbers


@contextmanager
def _random_states_kept() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy.random")
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()
    of_torch = [(generator, generator.get_state()) for generator in _generators()]
    queued = [(lazy, dict(vars(lazy))) for lazy in _seed_queues()]
    for _, state in queued:
        state["call_order"] = list(state.get("call_order", ()))
    try:
        yield
    finally:
        random.setstate(of_python)
        if of_numpy is not None:
            numpy.set_state(of_numpy)
        for generator, before in of_torch:
            generator.set_state(before)
        for lazy, attributes in queued:
            vars(lazy).update(attributes)


def _generators() -> Iterator[torch.Generator]:
    """Every global generator of torch; asking for that of a device that is not in use would initialise it."""
    yield torch.default_generator
    for device in _devices_in_use():
        backend = getattr(torch, device)
        yield from getattr(backend, "default_generators", ())
        if device == "mps":
            yield backend._get_default_mps_generator()


def _devices_in_use() -> Iterator[str]:
    for device in ("cuda", "xpu"):
        backend = getattr(torch, device, None)
        if backend is not None and backend.is_initialized():
            yield device
    if torch.backends.mps.is_available():
        yield "mps"


def _seed_queues() -> Iterator[Any]:
    """Seeds that wait for a device to be initialised, which `torch.manual_seed` in user code would replace."""
    for device in ("cuda", "xpu"):
        lazy = getattr(getattr(torch, device, None), "_lazy_seed_tracker", None)
        if lazy is not None:
            yield lazy


# --- settings


def _flags() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Settings of torch as pairs of what reads and what writes them."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _deterministic, lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    for backend, names in (
        (cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (cuda.matmul, ("allow_tf32", "allow_fp16_reduced_precision_reduction")),
    ):
        for name in names:
            yield _read(backend, name), _write(backend, name)
    yield cuda.flash_sdp_enabled, cuda.enable_flash_sdp
    yield cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
    yield cuda.math_sdp_enabled, cuda.enable_math_sdp
    yield cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _read(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(owner, name)


def _write(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


@contextmanager
def _flags_kept() -> Iterator[None]:
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read, write in _flags():
            with suppress(Exception):  # torch refuses to read some once others were written
                kept.append((read, write, read()))
    with suppress(Exception):
        if torch.are_deterministic_algorithms_enabled():  # which refuses some of what only a copy's run computes
            torch.use_deterministic_algorithms(False)
        if torch.is_anomaly_enabled():  # it would warn of what such a run is meant to find
            torch.autograd.set_detect_anomaly(False)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read, write, before in kept:
                with suppress(Exception):
                    if read() != before:
                        write(before)


def _default_device() -> torch.device:
    """The device of new tensors; asking torch for it may initialise that device."""
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return mode.device
    return torch.device("cpu")


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        if os.environ != before:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Empty torch's registries of hooks that fire for every module, and fill them again."""
    kept = {name: value for name, value in vars(module_hooks).items() if name.startswith("_global_")}
    items = {name: list(value.items()) for name, value in kept.items() if isinstance(value, dict)}
    for name in items:
        kept[name].clear()
    try:
        yield
    finally:
        for name, value in kept.items():
            if name in items:
                value.clear()
                value.update(items[name])
            setattr(module_hooks, name, value)


@contextmanager
def _without_saved_tensor_hooks() -> Iterator[None]:
    """Lay hooks that do nothing over those of the user's, as for offloading or checkpointing."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or top(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


@contextmanager
def _without_modes() -> Iterator[None]:
    """Set aside modes of the user's that see every operation, as counters of operations do."""
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]  # type: ignore[no-untyped-call]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def _without_compilation() -> Iterator[None]:
    """Run compiled parts as they were written: graphs of such a run would count against the user's limit."""
    if "torch._dynamo" not in sys.modules or torch.compiler.is_compiling():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class _Muted:
    """A stream that leaves out what one thread writes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write, unless it is the thread that is to be silent.

        Args:
            text: what to write.

        Returns:
            The number of characters.
        """
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _muted() -> Iterator[None]:
    before: Any = sys.stdout
    if before is None:
        yield
        return
    muted: Any = _Muted(before)
    sys.stdout = muted
    try:
        yield
    finally:
        if sys.stdout is muted:  # else user code has put another one there, which another thread may use by now
            sys.stdout = before


def _comes_from_signal(error: BaseException) -> bool:
    """Tell whether a signal handler raised it, as on SIGTERM: then the run is to end."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        if callable(handler):
            handler = getattr(handler, "func", handler)  # of a partial
            function = getattr(handler, "__func__", handler)
            codes.add(getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None))
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


# --- copies

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_OF_COMPOSABLE = "__composable_api_state_key"  # where torch keeps the state of `fully_shard` in a module
_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()))


def isolated_copy(
    module: nn.Module, replaced: Mapping[Any, Any] | None = None, *, shares_parameters: bool = False
) -> nn.Module:
    """Copy a module without any hook, and with the matrices of parametrizations in place of what computes them.

    The matrices are those that the last forward has used: computed in evaluation mode, from buffers as they stand. The
    copy shares no tensor with the module, so that it may be run and written to.

    Args:
        module: the module; nothing of it is changed.
        replaced: modules or tensors within -> what takes their place in the copy, uncopied.
        shares_parameters: keep the module's own parameters in the copy, and its parametrizations, so that gradients
            reach them. Buffers are copied all the same.

    Returns:
        The copy, in the mode that the module is in.

    Raises:
        IsolationError: if the module cannot be copied: the copying fails, or gives parts of the module itself, or
            would take more than 2 GiB.
        KeyboardInterrupt: if the user interrupts.
    """
    with isolated(module):
        memo = _memo(module, replaced or {}, shares_parameters)
        try:
            _copy_sharded(module, memo)
            trial: nn.Module = copy.deepcopy(module, memo)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and _comes_from_signal(error):
                raise
            raise IsolationError(f"copying it raises {type(error).__name__} ({error})") from error
        _refuse_shared(module, trial, replaced or {}, shares_parameters)
        parts = list(trial.modules())
        for part in parts:
            for name in _HOOKS:
                hooks = part.__dict__.get(name)
                if hooks:
                    hooks.clear()
        for part in parts:
            for name, value in list(part.__dict__.items()):
                if isinstance(value, types.FunctionType):
                    part.__dict__[name] = _moved(value, memo)
            if not shares_parameters:
                _settle(part)
        return trial


def _copy_sharded(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy what `fully_shard` has taken over as the class that it was: FSDP refuses copies of its own."""
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    blanks: list[tuple[nn.Module, Any]] = []
    for part in module.modules():
        if isinstance(part, sharded) and id(part) not in memo:
            plain = next(kind for kind in type(part).__mro__ if not issubclass(kind, sharded))
            blanks.append((part, object.__new__(plain)))
            memo[id(part)] = blanks[-1][1]
    for part, blank in blanks:
        own = {name: one for name, one in part.__dict__.items() if not name.startswith(_OF_COMPOSABLE)}
        blank.__dict__.update(copy.deepcopy(own, memo))


def _memo(module: nn.Module, replaced: Mapping[Any, Any], shares_parameters: bool) -> dict[int, Any]:
    """Say what `copy.deepcopy` is to take for copied already."""
    memo: dict[int, Any] = {id(one): other for one, other in replaced.items()}
    size, todo = 0, [module]
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        if id(part) in memo or id(part) in seen:
            continue
        seen.add(id(part))
        for name in _HOOKS:  # copying a hook would copy all that it belongs to
            hooks = part.__dict__.get(name)
            if hooks is not None:
                memo[id(hooks)] = type(hooks)()
        for parameter in part._parameters.values():
            if parameter is not None and shares_parameters:
                memo[id(parameter)] = parameter
        for one in _values_within(part.__dict__, seen):
            if isinstance(one, nn.Module):
                todo.append(one)
            elif isinstance(one, Tensor):
                if id(one) not in memo and not is_lazy(one) and not has_memory(one):
                    raise IsolationError("the memory of its weights was let go, as FSDP does between forwards")
                size += 0 if id(one) in memo or is_lazy(one) else one.nbytes
                if one.grad_fn is not None:  # as the loss of the last forward, which cannot be copied with its graph
                    memo[id(one)] = one.detach().clone()
            elif isinstance(one, _LOCKS):
                memo[id(one)] = threading.Lock() if isinstance(one, _LOCKS[0]) else threading.RLock()
        if size > _MOST_BYTES:
            raise IsolationError(f"a copy of it would take more than {_MOST_BYTES / 2**30:.0f} GiB")
    return memo


def _values_within(container: Any, seen: set[int], depth: int = 4) -> Iterator[Any]:
    """Modules, tensors and locks among the attributes of a module, in containers and objects too."""
    if id(container) in seen:
        return
    seen.add(id(container))
    for one in list(container.values() if isinstance(container, dict) else container):
        if isinstance(one, (nn.Module, Tensor, *_LOCKS)):
            yield one
        elif not depth or isinstance(one, (type, types.FunctionType, types.ModuleType)):
            continue
        elif isinstance(one, (dict, list, tuple, set)):
            yield from _values_within(one, seen, depth - 1)
        else:
            yield from _values_within(attributes_of(one) or {}, seen, depth - 1)


def _moved(function: types.FunctionType, memo: Mapping[int, Any]) -> types.FunctionType:
    """Let a function that was put on an instance, as in place of its forward, act on the copy, not on the module."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            kept = cell.cell_contents
        except ValueError:  # empty yet
            return function
        owner = getattr(kept, "__self__", None) if isinstance(kept, types.MethodType) else None
        if id(owner) in memo and owner is not None:
            kept = types.MethodType(kept.__func__, memo[id(owner)])
        elif id(kept) in memo:
            kept = memo[id(kept)]
        elif isinstance(kept, types.FunctionType) and kept is not function:
            kept = _moved(kept, memo)
        cells.append(types.CellType(kept))
    if not cells:
        return function
    moved = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    moved.__kwdefaults__ = function.__kwdefaults__
    vars(moved).update(vars(function))
    return moved


def _refuse_shared(module: nn.Module, trial: nn.Module, replaced: Mapping[Any, Any], shares_parameters: bool) -> None:
    """Refuse a copy that is no copy, as a class may say of itself: writing to it would change the user's module."""
    own = {id(part) for part in module.modules()}
    given = {id(other) for other in replaced.values()}
    if any(id(part) in own and id(part) not in given for part in trial.modules()):
        raise IsolationError("copying it gives parts of the module itself")
    theirs = {_place(tensor) for tensor in _tensors_of(module, not shares_parameters)} - {None}
    kept = {id(tensor) for part in _given_modules(replaced) for tensor in _tensors_of(part, True)} | given
    if any(_place(one) in theirs for one in _tensors_of(trial, not shares_parameters) if id(one) not in kept):
        raise IsolationError("copying it gives tensors of the module itself")


def _given_modules(replaced: Mapping[Any, Any]) -> list[nn.Module]:
    return [other for other in replaced.values() if isinstance(other, nn.Module)]


def _tensors_of(module: nn.Module, with_parameters: bool) -> Iterator[Tensor]:
    if with_parameters:
        yield from module.parameters()
    yield from module.buffers()


def _place(tensor: Tensor) -> int | None:
    with suppress(Exception):  # no memory yet, or none of its own
        return tensor.untyped_storage().data_ptr() or None
    return None


def _settle(part: nn.Module) -> None:
    """Put matrices in the place of what computes them, in a copy."""
    parametrizations = part._modules.get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict) and parametrize.is_parametrized(part):
        values = {name: evaluated(plist) for name, plist in parametrizations.items()}
        del part._modules["parametrizations"]
        # Its class is that of the original too, so that torch's own way of removing them would break the original.
        object.__setattr__(part, "__class__", type(part).__bases__[0])
        for name, value in values.items():
            part._parameters[name] = nn.Parameter(value, requires_grad=value.is_floating_point())
    for name, value in list(part.__dict__.items()):
        # The older way of torch: a hook that is gone has computed it from these.
        if type(value) is Tensor and {f"{name}_v", f"{name}_orig"} & part._parameters.keys():
            del part.__dict__[name]
            part._buffers[name] = value


def evaluated(parametrization: nn.Module) -> Tensor:
    """Compute what the parametrizations of one tensor give in evaluation mode; for copies of them only.

    Args:
        parametrization: torch's `ParametrizationList`, a copy.

    Returns:
        The tensor, detached if gradients are off.
    """
    for one in parametrization.modules():
        object.__setattr__(one, "training", False)
    value: Tensor = parametrization.forward()
    return value
