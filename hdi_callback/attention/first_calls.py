"""`FirstCalls`: watch the calls of a model from outside, to find its heads and to read them later.

One rule for finding and for reading, decided anew for each call. Where nothing is compiled the call itself is watched
while it runs, and nothing runs twice. Where something is compiled, the first sequences of the call run once more right
before it, uncompiled, and that is watched: neither a hook nor a mode is there when the call itself begins.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hdi_callback.attention.calls import modules_within, running_modules
from hdi_callback.attention.compiled_calls import BeforeCompiledCalls, is_compiled
from hdi_callback.attention.extra_forward import (
    CannotRunAgainError,
    first_sequences,
    inner_model,
    is_extra,
    nothing_remains,
)
from hdi_callback.attention.hooks import Hook
from hdi_callback.attention.kept_state import content
from hdi_callback.attention.layer import ROOT, Refusal, Survey
from hdi_callback.attention.sharding import over_all_ranks
from hdi_callback.attention.tape import Tape
from hdi_callback.errors import HDIError
from hdi_callback.guard import describe, take_off, warn, without_modes

SEQUENCES = 8  # of a compiled call at most so many sequences of its batch run once more
_PATIENCE = 8  # calls in which what has not run yet may still come
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear  # of `nn.MultiheadAttention`, which takes its weight

OnFound = Callable[[Survey, Any], None]
"""Takes what was found in a call, and the recording of it, if the call itself was recorded."""

OnAgain = Callable[[nn.Module, Any, Any, bool], bool]
"""Runs a call once more: module, arguments, keyword arguments, whether autograd records the call; true if it did."""


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a hook on the user's calls: a failure is one warning, and ends the watching of calls."""

    @wraps(method)
    def called(self: FirstCalls, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._stop_writing()
            self.remove()
            if isinstance(error, HDIError):  # of misuse
                raise
            warn(f"Watching the calls of the model failed ({describe(error)}). Training goes on.")

    return called


@dataclass(eq=False)
class _Call:
    """A call that is looked at while it runs; its hook ends no other call, as of another thread or within it."""

    module: nn.Module
    ended: Callable[..., None]
    tape: Tape | None
    recording: Any  # of a first call
    trains: bool = True
    is_given_up: bool = False  # as something compiled turned up
    ran: set[nn.Module] = field(default_factory=set)
    handle: RemovableHandle = field(init=False)  # of the hook after it

    def end(self, module: nn.Module, *returned: Any) -> None:
        """Tell of its arguments and its output, as a hook on the module."""
        self.ended(self, *returned)


class _Here(threading.local):
    """What runs in a thread: calls that are looked at, innermost last; a compiled function up to its first module."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.is_looking = False


class FirstCalls:
    """Waits for the first call of a model, or of its parts, and in armed steps for calls that are compiled.

    Where the model's own forward is not called, as that of many a LightningModule, its outermost modules that are
    called take its place, each in its own first call; parts that run only later likewise.

    `on_found` takes what a first call has shown, never nothing; it is `None` if heads are known. `record` makes what
    records a call while it runs, `read_tape` returns the layers of one that ran once more. `may_agree` says whether all
    ranks see the same part for the first time now, so that they may put heads together.
    """

    def __init__(
        self,
        model: nn.Module,
        on_found: OnFound | None = None,
        read_tape: Callable[[Tape], Survey] | None = None,
        record: Callable[[], Any] | None = None,
        may_agree: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model, self._on_found, self._read_tape, self._record = model, on_found, read_tape, record
        self._may_agree, self._here = may_agree, _Here()
        self._known: set[str] = set()  # names of layers and of refusals
        self._awaited = dict.fromkeys(filter(_may_be_called, model.modules()))  # modules that have not run yet
        self._entries: dict[nn.Module, None] = {}  # modules that are called from outside
        self._handles: dict[nn.Module, RemovableHandle] = {}  # of both
        self._with_compiled: set[nn.Module] = set()  # entries that run compiled code
        self._within_compiled: set[nn.Module] = set()  # entries that are called within compiled code
        self._due: set[nn.Module] = set()  # entries that may run once more in this armed step
        self._unwritten: set[nn.Module] = set()  # entries whose call is to be written down
        self._seen_untrained: set[nn.Module] = set()
        self._called: set[nn.Module] = set()
        self._unseen: dict[nn.Module, set[nn.Module]] = {}  # of compiled entries: what has not run in their calls
        self._kinds: set[type[nn.Module]] = set()  # of modules whose attention was found
        self.calls = self._failures = 0  # that trained and were looked at; that failed
        self._has_failed = False  # the last forward that ran once more
        self.called = 0  # calls that autograd has recorded in this armed step
        self._is_paused = self._is_reporting = False
        self.on_called: Callable[[], None] | None = None  # once after an eager call, right before a compiled one
        self.tapes: list[Tape] = []  # calls of this armed step that were written down
        self.on_written: Callable[[Tape, Any], None] | None = None  # takes each of them, and what it has returned
        self.on_step: Callable[..., None] | None = None  # takes each of their steps, while it runs
        self._on_again: OnAgain | None = None
        self._on_compiled: Callable[[nn.Module], None] | None = None
        self._install()
        self._before_compiled = BeforeCompiledCalls(self._before_compiled_call)

    def remove(self) -> None:
        """Wait no longer; calling it again does nothing."""
        self._is_paused = True
        self.wait(None)
        self._leave(self._awaited)
        self._before_compiled.remove()

    @property
    def is_looking(self) -> bool:
        """Whether something has not run yet, in the first calls."""
        # A module of which parts are called apart, as a LightningModule, is perhaps never called itself.
        return self.calls < _PATIENCE and any(self._called.isdisjoint(module.modules()) for module in self._awaited)

    @property
    def read_again(self) -> set[nn.Module]:
        """The modules that are read in first sequences, as something within their call is compiled."""
        return {module for entry in self._with_compiled | self._within_compiled for module in entry.modules()}

    # --- armed steps

    def write_down(self) -> None:
        """Write down the next call of each module that is called from outside, into `tapes`; after `wait`."""
        self.tapes, self._unwritten = [], set(self._entries)

    @contextmanager
    def writing(self, module: nn.Module) -> Iterator[None]:
        """Write down what runs once more of a call, if that is to be."""
        if module not in self._unwritten:
            yield
            return
        with Tape(inner_model(self._model)) as tape:
            yield
        self._unwritten.discard(module)
        self.tapes.append(tape)

    def wait(self, on_again: OnAgain | None, on_compiled: Callable[[nn.Module], None] | None = None) -> None:
        """Set the function that runs compiled calls of an armed step once more, `None` to end it.

        `on_compiled` is told of compiled code that turned up within a call that was taken for eager, before it runs.
        """
        self._on_again, self._on_compiled, self._due = on_again, on_compiled, set(self._entries)
        if not self._is_reporting:
            self.called, self.on_called = 0, None
        if on_again is not None:
            self._install()
            self._listen()
            return
        # Where the heads are known, first calls matter in armed steps alone.
        self._uninstall(list(self._handles) if self._on_found is None else self._entries)
        if self._on_found is None or not self._awaited:
            self._before_compiled.remove()

    def pause(self) -> None:
        """Remove the hooks for an evaluation: torch's encoder takes its fast path only without any."""
        self._is_paused = True
        self._uninstall(list(self._handles))

    def go_on(self) -> None:
        """Install them again."""
        self._is_paused = False
        self._install()

    def _install(self) -> None:
        """Install hooks on modules that have not run yet and, in armed steps, on those that are called from outside."""
        is_armed = self._on_again is not None
        awaited = self._awaited if is_armed or self._on_found is not None else ()
        entries = self._entries if is_armed else ()
        for module in () if self._is_paused else (*awaited, *entries):
            if module not in self._handles and module not in self._within_compiled:
                # First of all hooks, so that what is recorded includes all others, FSDP's among them.
                register = module.register_forward_pre_hook
                self._handles[module] = Hook(self, "_before").on(register, with_kwargs=True, prepend=True)

    def _uninstall(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if module in self._handles:
                self._handles.pop(module).remove()

    def _leave(self, modules: Iterable[nn.Module]) -> None:
        """Wait no longer for the first call of some modules."""
        for module in [module for module in modules if module in self._awaited]:
            del self._awaited[module]
            self._uninstall([module])
        if not self._awaited and self._on_again is None:
            self._before_compiled.remove()

    def _enter(self, module: nn.Module, ran: Iterable[nn.Module] | None = None) -> None:
        """Make a module an entry: it is called from outside, and the modules in it, or those that `ran`, are not.

        After what its call shows has been taken: until then an interruption leaves it a first call to come.
        """
        self._leave(module.modules() if ran is None else ran)
        self._entries[module] = None
        self._due.add(module)
        self._install()

    def _listen(self) -> None:
        """Listen for compiled calls, also for the first in this process."""
        with suppress(ImportError):
            import torch._dynamo.eval_frame  # noqa: F401
        self._before_compiled.remove()
        self._before_compiled = BeforeCompiledCalls(self._before_compiled_call)

    def _note_call(self) -> None:
        self.called += 1
        on_called, self.on_called = self.on_called, None
        if on_called is not None:
            on_called()

    # --- calls of modules

    @_harmless
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_extra() or torch._C._get_tracing_state() is not None:  # that of another monitor, which waits as well
            return
        calls = self._here.calls
        if calls and calls[-1].recording is not None:
            calls[-1].ran.add(module)
            calls[-1].recording.take_input(module, args, kwargs)
        elif module not in self._handles or torch._C._current_graph_task_id() != -1:
            return  # a replica of `nn.DataParallel`, or checkpointing runs it again
        elif module in self._awaited:
            self._before_first(module, args, kwargs)
        else:
            self._before_armed(module, args, kwargs)

    @_harmless
    def _after(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._here.calls[-1:] != [call]:
            return
        self._here.calls.pop().handle.remove()
        if call.tape is not None:
            take_off(call.tape)
        has_raised = sys.exc_info()[0] is not None and output is None
        if call.tape is not None and call.trains and not has_raised and self.on_written is not None:
            self.on_written(call.tape, output)
        if call.recording is not None:
            self._install()
            if not has_raised:  # else the next call may be a first one
                self._after_first(call, args, kwargs)
        elif not has_raised:
            self.tapes += [] if call.tape is None else [call.tape]
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and not is_extra():
                self._note_call()

    def _begin(self, module: nn.Module, tape: Tape | None, recording: Any = None, *, trains: bool = True) -> _Call:
        """Look at a call until it has returned."""
        call = _Call(module, self._after, tape, recording, trains)
        call.handle = Hook(call, "end").on(module.register_forward_hook, with_kwargs=True, always_call=True)
        self._here.calls.append(call)
        if tape is not None:
            tape.__enter__()
        return call

    def _stop_writing(self) -> None:
        """Take off all tapes: compilation would not bear them."""
        for call in self._here.calls:
            if call.tape is not None:
                take_off(call.tape)
                call.tape, call.is_given_up = None, True

    def forget_calls(self) -> None:
        """Stop looking at calls that an interruption has ended: torch calls no hook after it."""
        self._stop_writing()
        while self._here.calls:
            self._here.calls.pop().handle.remove()

    def _before_armed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape = None
        if module in self._with_compiled or any(map(is_compiled, modules_within(module))):
            self._with_compiled.add(module)
            if module in self._due:
                self._again(module, args, kwargs, is_recorded=torch.is_grad_enabled())
        elif module in self._unwritten and torch.is_grad_enabled() and not any(call.tape for call in self._here.calls):
            self._unwritten.discard(module)
            tape = Tape(inner_model(self._model), self.on_step)
        self._begin(module, tape)

    def _again(self, module: nn.Module, args: Any, kwargs: Any, *, is_recorded: bool) -> None:
        if self._on_again is None:
            return
        if is_recorded and module in self._called:
            self._look_for_late(module, args, kwargs)
        if self._on_again(module, args, kwargs, is_recorded):
            self._due.discard(module)
            self._note_call()

    # eager: the first call itself is recorded

    def _before_first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_compiled = any(map(is_compiled, modules_within(module)))
        if _shows_nothing(module, (args, kwargs)):
            if has_compiled:  # whose graphs would be guarded by these hooks
                self._uninstall(module.modules())
        elif has_compiled:
            self._with_compiled.add(module)
            self._look_again(module, args, kwargs, is_recorded=torch.is_grad_enabled())
        elif self._on_found is None or self._record is None:
            if self._on_found is not None:
                self._report(self._run_once_more(module, args, kwargs), None)
            self._enter(module)
        else:
            self._listen()
            recording = self._record()
            trains = recording.keeps()
            is_new = trains or module not in self._seen_untrained
            call = self._begin(module, recording.tape if is_new else None, recording, trains=trains)
            if trains:
                call.ran.add(module)
                recording.take_input(module, args, kwargs)
            else:  # torch's encoder takes its fast path only without hooks
                self._seen_untrained.add(module)
                self._uninstall(module.modules())

    def _after_first(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.is_given_up and call.trains:
            self._with_compiled.add(call.module)
            self._look_again(call.module, args, kwargs, is_recorded=True)
        if call.tape is not None:
            try:
                with without_modes():
                    survey = call.recording.read()
            except Exception as error:
                survey = self._refused(f"reading the heads failed: {describe(error)}")
            self._report(survey, call.recording)
        if call.trains:
            self.calls += 1
            self._called.add(call.module)
        if call.trains and call.tape is not None:
            never = [module for module in self._awaited if isinstance(module, _NEVER_CALLED)]
            self._enter(call.module, [*call.ran, *never])
            self._note_call()

    # compiled: its first sequences run once more

    def _look_again(self, module: nn.Module, args: Any, kwargs: Any, *, is_recorded: bool) -> None:
        """Find the heads in the first sequences of a call, then capture them, if its step is armed."""
        # Lightning's strategies let a wrapper call `training_step` as the module's forward: it must not run twice.
        if "forward" in vars(module) and hasattr(module, "training_step"):
            self._with_compiled.discard(module)
            return
        survey = Survey() if self._on_found is None else self._run_once_more(module, args, kwargs)
        if self._has_failed and self._failures < _PATIENCE:  # as the call itself will, perhaps: the next may not
            self._failures += 1
            return
        self._report(survey, None)
        self._enter(module)
        self.calls += 1
        self._again(module, args, kwargs, is_recorded=is_recorded)
        self._called.add(module)

    def _run_once_more(self, module: nn.Module, args: Any, kwargs: Any) -> Survey:
        """Return the attention of the first sequences of a call; note which modules have not run in it."""
        own = inner_model(self._model)
        inputs, _ = first_sequences((args, kwargs), SEQUENCES)
        self._ran: set[nn.Module] = set()
        unseen = self._unseen.setdefault(module, set(filter(_may_be_called, module.modules())))
        self._has_failed = True
        try:
            with self._hooked(unseen, "_note_run"), nothing_remains(own, inputs, is_training=True):
                with Tape(own) as tape:
                    module(*inputs[0], **inputs[1])
                self._has_failed = False
                return Survey() if self._read_tape is None else self._read_tape(tape)
        except CannotRunAgainError as reason:
            self._has_failed = False
            return self._refused(reason)
        except Exception as error:
            return self._refused(f"the forward that shows where heads are failed: {describe(error)}")
        finally:
            unseen -= self._ran

    def _refused(self, reason: object) -> Survey:
        return Survey(refused=(Refusal(ROOT, str(reason), type(inner_model(self._model)).__name__),))

    @contextmanager
    def _hooked(self, modules: Iterable[nn.Module], method: str) -> Iterator[None]:
        """Call a method before each call of some modules, within the block."""
        # Not a closure, whose variables would be put back with everything that the forward can reach.
        hook = Hook(self, method)
        handles = [hook.on(module.register_forward_pre_hook, with_kwargs=True, prepend=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._ran.add(module)

    def _look_for_late(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look again while modules of an attention's class have not run yet: dropped layers, parts that come later."""
        if any(type(inner) in self._kinds for inner in self._unseen.get(module, ())):
            self._report(self._run_once_more(module, args, kwargs), None)

    @_harmless
    def _before_compiled_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remove hooks and modes before a compiled call, which dynamo has not looked at yet."""
        if is_extra() or self._is_paused:
            return
        self._stop_writing()
        if self._here.calls and self._here.calls[-1].recording is not None:
            return
        running = running_modules() if self._on_again is not None else set()
        entry = next((entry for entry in self._entries if entry in running), None)
        if entry is not None:
            if entry not in self._with_compiled:
                self._with_compiled.add(entry)
                if self._on_compiled is not None:
                    self._on_compiled(entry)
        elif not self._here.is_looking and self._reaches(function, args, kwargs):
            self._look_within(function, args, kwargs)

    def _look_within(self, function: Any, args: Any, kwargs: Any) -> None:
        """Run a compiled function that reaches the model as it is written, up to its first call of a module."""
        is_recorded, reached = torch.is_grad_enabled(), None
        own, hooked = inner_model(self._model), self._hooked({*self._awaited, *self._due}, "_reached")
        self._here.is_looking = True
        try:
            with hooked, nothing_remains(own, function, args, kwargs, is_training=True):
                function(*args, **kwargs)
        except _ReachedError as error:
            reached = error
        except CannotRunAgainError as reason:
            self._leave(self._awaited)
            self._report(self._refused(reason), None)
        except Exception:  # the real call will raise it
            pass
        finally:
            self._here.is_looking = False
        if reached is None:
            return
        entry, inputs, options = reached.args
        if _shows_nothing(entry, (inputs, options)):
            self._uninstall(entry.modules())
            return
        self._within_compiled.add(entry)
        self._uninstall([entry])
        look = self._look_again if entry in self._awaited else self._again
        look(entry, inputs, options, is_recorded=is_recorded)

    def _reached(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._here.is_looking:
            raise _ReachedError(module, args, kwargs)

    def _reaches(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function has a module of the model at hand: nothing else runs twice, such as an optimizer."""
        own = getattr(function, "__func__", function)
        cells = [item for cell in getattr(own, "__closure__", None) or () for item in content(cell, "cell_contents")]
        code, names = getattr(own, "__code__", None), getattr(own, "__globals__", {})
        globals_used = [names[name] for name in (code.co_names if code is not None else ()) if name in names]
        near = [getattr(function, "__self__", None), *cells, *globals_used, *args, *kwargs.values()]
        near += [value for holder in near if hasattr(holder, "__dict__") for value in vars(holder).values()]
        awaited = {inner_model(module) for module in (*self._awaited, *self._due)}
        modules = (holder for holder in near if isinstance(holder, nn.Module))
        return any(not awaited.isdisjoint(map(inner_model, module.modules())) for module in modules)

    def _report(self, survey: Survey, recording: Any) -> None:
        if self._may_agree():
            with without_modes():
                try:
                    survey = over_all_ranks(survey, self._model)
                except Exception as error:  # within the user's forward
                    survey = self._refused(f"the heads of all ranks could not be put together: {describe(error)}")
        layers = tuple(layer for layer in survey.layers if layer.name not in self._known)
        refused = tuple(refusal for refusal in survey.refused if refusal.name not in self._known)
        self._kinds |= {type(layer.module) for layer in survey.layers}
        if (layers or refused) and self._on_found is not None:
            self._is_reporting = True
            try:
                self._on_found(Survey(layers, refused), recording)
            finally:
                self._is_reporting = False
        self._known |= {layer.name for layer in layers} | {refusal.name for refusal in refused}


class _ReachedError(BaseException):
    """Ends the dry run of a compiled function at a module of the model, with its arguments."""


def _may_be_called(module: nn.Module) -> bool:
    """Whether a module is more than a container, or code of TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _shows_nothing(module: nn.Module, inputs: Any) -> bool:
    """Whether a call shows no heads: an empty batch, parameters that it makes."""
    with torch._C.DisableTorchFunction():  # modes of the user's see nothing of it
        is_empty = any(leaf.numel() == 0 for leaf in tree_leaves(inputs) if type(leaf) is Tensor)
        return is_empty or any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())
