"""`HeadDiversityMonitor`: arm, measure, read out. It knows models and steps, and no trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate, chain
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from hdi_callback.arguments import strings, torch_module, whole_number
from hdi_callback.attention.capture.capture import Capture, Captured
from hdi_callback.attention.capture.padding import PaddingChoice
from hdi_callback.attention.discovery.find import TapeReader, in_model_order, layer_name, survey_tape
from hdi_callback.attention.dtensors import IN_PIECES, is_in_first_fsdp
from hdi_callback.attention.extra_forward import inner_model
from hdi_callback.attention.first_calls import FirstCalls
from hdi_callback.attention.first_forward import FirstForward
from hdi_callback.attention.layer import ROOT, AttentionLayer, Refusal, Survey
from hdi_callback.attention.tape import Tape
from hdi_callback.checks import Facts, examine, facts_of
from hdi_callback.errors import HDIWarning, MisconfigurationError, NothingToWatchError
from hdi_callback.guard import Guard, guarded, warn, without_modes
from hdi_callback.monitor.contract import Contract, without_gradient
from hdi_callback.monitor.forward_source import FORWARD, measure_forwards, take_rows
from hdi_callback.monitor.inputs import ModelInputs
from hdi_callback.monitor.labels import LossLabels
from hdi_callback.monitor.metrics import (
    FORWARD_SOURCES,
    KEYS,
    METRICS,
    PARAMETERS,
    ROWS,
    check_metrics,
)
from hdi_callback.monitor.parameter_source import ParameterReader
from hdi_callback.monitor.ranks import Ranks, number_of_ranks
from hdi_callback.monitor.reading import Absent, Reading, StepFacts, complete_all
from hdi_callback.monitor.training_step import TrainingStep
from hdi_callback.monitor.weight_source import WeightReader
from hdi_callback.record import Alert


class HeadDiversityMonitor:
    """Measure the head diversity of a model, reading by reading, without touching its training.

    A reading is what was measured at one step: the weights of all heads, and their outputs, rows of attention and input
    tokens if a forward was armed. Nothing waits for the device before `Reading.record`. In a distributed run every rank
    measures at the same steps, and every rank gets the numbers of all. Use it as a context manager, so that the hooks
    leave with it, and make it before the first call of the model.

    Args:
        model: any module that contains attention layers.
        metrics: names of metrics, see `METRICS`; `None` for all of them. They decide what is measured.
        include: patterns of names of layers to watch (``"encoder.*"``); all by default.
        exclude: patterns of names of layers to leave out.
        max_tokens: largest number of tokens of a layer in one reading.
        padding: how it is known which tokens are padding, which do not count: ``"auto"`` from masks that attention and
            the modules around it receive, the number of the token that is padding, or `None` to count every token.

    Example:
        >>> import torch
        >>> attention = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> model = torch.nn.ModuleDict({"attn": attention})
        >>> x = torch.randn(2, 10, 32)
        >>> with HeadDiversityMonitor(model) as monitor:
        ...     monitor.arm()
        ...     _ = attention(x, x, x, need_weights=False)
        ...     record = monitor.measure(step=0).record()
        >>> {"hdi", "head_covariance", "attention_entropy"} <= record.layers["attn"].values.keys()
        True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        metrics: Sequence[str] | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        max_tokens: int = 2048,
        padding: PaddingChoice = "auto",
    ) -> None:
        torch_module("model", model)
        names = check_metrics(metrics)
        self.metrics = tuple(METRICS) if names is None else names
        self.layers: tuple[AttentionLayer, ...] = ()
        self.refused: tuple[Refusal, ...] = ()
        self._model, self._wrapped, self._padding = _unwrapped(model), model, padding
        self._include = strings("include", include, "patterns of layer names")
        self._exclude = strings("exclude", exclude, "patterns of layer names") or ()
        self._max_tokens = whole_number("max_tokens", max_tokens, least=2, example=2048)
        self._sources = sources = {METRICS[name].source for name in self.metrics}
        self._weights, self._parameters = WeightReader({KEYS, *sources}), ParameterReader()
        self._forwards = tuple(source for source in FORWARD if source.name in sources)
        self._capture: Capture | None = None
        self._ranks: Ranks | None = None
        self._guard = Guard()
        self._first_forwards: list[FirstForward] = []  # of this armed step
        self._read: list[TapeReader] = []  # of forwards, and not yet checked: warnings are off while a forward is read
        self._said: set[str] = set()  # of findings
        self.contract = Contract(self._is_chosen)
        self.training_step, self._labels, self._inputs = TrainingStep(self._model), LossLabels(), ModelInputs()
        self._facts: list[Facts] = []  # of first forwards, which the contract has not taken yet
        self._is_compared = False  # whether the reading that begins is compared with the contract
        self._step: int | None = None  # of the last reading
        self._left_out: set[str] = set()  # by `include` and `exclude`
        # The layers that were looked for last, and on the way to each a module, the name of a part of it, and the part.
        self._placed: tuple[Sequence[AttentionLayer], list[tuple[nn.Module, str, nn.Module]]] = (), []
        self._is_armed, self._training_only, self._has_warned_of_padding = False, True, False
        self._first_calls = FirstCalls(
            self._model,
            self._on_found,
            partial(survey_tape, on_read=self._read.append),
            self._record,
            may_agree=lambda: self._ranks is None,
        )
        self._first_calls.on_written, self._first_calls.on_step = self._labels.note, self._inputs.look

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<HeadDiversityMonitor of {len(self.layers)} layers; {len(self.refused)} not watched>"

    def close(self) -> None:
        """Remove all hooks and forget what was captured; calling it again does nothing."""
        self.disarm()
        self._first_calls.remove()
        self._capture = None
        self._weights.forget_views()
        self.training_step.close()

    # --- steps

    def arm(self, *, training_only: bool = True) -> None:
        """Capture the forwards that follow, for the next `measure`; all of them, if gradients are accumulated.

        Args:
            training_only: leave out forwards that autograd does not record, as those of an evaluation.
        """
        if not self.layers and is_in_first_fsdp(self._model):
            self.refused = (Refusal(ROOT, IN_PIECES, type(self._model).__name__),)
            self.close()
            return
        self._is_armed, self._training_only = True, training_only
        self._forget_first()
        self._labels.take()
        self._inputs.take()
        self._first_calls.called, self._first_calls.on_called = 0, None
        if self._capture is not None:
            self._capture.arm(training_only=training_only)
            self._is_compared = self.contract.is_due()
            if self._is_compared:
                self._first_calls.write_down()

    def disarm(self) -> None:
        """Capture nothing, and forget what was captured; to be called before forwards that are not to be captured."""
        self._is_armed = False
        self._forget_first()
        self._labels.take()
        self._inputs.take()
        self._first_calls.forget_calls()
        if self._capture is not None:
            self._capture.disarm()

    def pause(self) -> None:
        """Remove the hooks for an evaluation, which runs as without a monitor; samples stay."""
        self._first_calls.forget_calls()
        if self.layers:
            self._first_calls.pause()
        if self._capture is not None:
            self._capture.pause()

    def go_on(self) -> None:
        """Install the hooks again after `pause`."""
        if self.layers:
            self._first_calls.go_on()
        if self._capture is not None:
            self._capture.go_on()

    def join_ranks(self) -> Ranks:
        """Compare the layers of all ranks: a collective call, once, for all ranks, also those without a layer."""
        if self._ranks is None:
            with without_modes():
                self._ranks = Ranks([_sizes(layer) for layer in self.layers], self._why_alone())
        return self._ranks

    def _why_alone(self) -> str:
        """Return why ranks must not wait for each other; the same on every rank, also where one has no data left."""
        join = getattr(self._wrapped, "_join_config", None)
        return "torch's `Join` lets ranks end at different steps" if join is not None and join.enable else ""

    def measure(self, step: int) -> Reading:
        """Measure the weights as they are now, and what was captured since `arm`.

        Does not wait for the device. In a distributed run every rank calls it, at the same steps; otherwise each
        measures alone from then on.

        Args:
            step: optimizer steps taken so far.

        Returns:
            The reading; what could not be measured is named in its record, with the reason.

        Raises:
            NothingToWatchError: if no attention was found so far.
            RuntimeError: if ranks measure alone, and hold parts of weights.
        """
        whole_number("step", step, least=0, example=100)
        self._leave_moved()
        if not self.layers:
            raise NothingToWatchError(f"{self.why_nothing()}\nRun a forward of the model before the first reading.")
        absent = Absent()
        ranks = self.join_ranks()
        with without_modes():
            ranks.begin(step, self._why_alone())
            if ranks.is_sharded and ranks.size < number_of_ranks():
                raise RuntimeError(f"weights are spread over ranks, and {ranks.difference}")
            names = [layer.name for layer in self.layers]
            with absent.unless([PARAMETERS], names):
                is_new = self._parameters.look(self._model, self.layers)
                if is_new:
                    self._weights.forget_views()
                self.training_step.look(step, self._parameters.of_model, is_new=is_new)
            trained = self._parameters.trained
            complete_all()  # the memory of copies is used again
            results, later = self._weights.measure(step, self.layers, absent, trained, with_checksums=ranks.size > 1)
            ranks.compare(self._weights.checksums)
            captured = self._take(absent)
            output_weights = partial(self._weights.output_weights, is_sharded=ranks.is_sharded)
            of_forwards = measure_forwards(self._forwards, self.layers, captured, output_weights, ranks, absent)
            results, later = results + of_forwards[0], later + of_forwards[1]
            with absent.unless([PARAMETERS], names):
                results += self._parameters.measure(step, with_changes=PARAMETERS in self._sources)
            of_steps = [*self.training_step.take(), *self._labels.take(), *self._inputs.take()]
            further = [tensor for facts in of_steps for tensor in facts.tensors]
            alerts = self._compared(step, of_steps)
            return Reading(step, names, results, absent, alerts=alerts, further=further, later=later)

    def _compared(self, step: int, of_steps: Sequence[StepFacts]) -> Callable[..., tuple[Alert, ...]]:
        """Return what compares this reading with the contract of the run, on the host."""
        before, self._step = self._step, step
        read: list[Facts | Tape] = [*self._facts]
        if self._is_compared:
            read, self._first_calls.tapes = [*read, *self._first_calls.tapes], []
        self._facts, self._is_compared = [], False
        if not read and not of_steps:
            return tuple
        gradients = without_gradient(self.layers) if read else {}
        return partial(
            self.contract.compare, step, read, gradients, of_steps, before=before, reading=self.contract.readings
        )

    def _take(self, absent: Absent) -> Mapping[str, Captured]:
        """Return the captured tensors of each layer; nothing if no forward was armed."""
        names = [layer.name for layer in self.layers]
        captured: Mapping[str, Captured] = {}
        if self._capture is not None and self._forwards:
            captured = {name: Captured(failed=frozenset({"outputs", "rows"})) for name in names}
            with absent.unless(FORWARD_SOURCES, names):
                captured = self._capture.take()  # on every rank: it may gather
        captured = captured if self._is_armed else {}
        self._is_armed = False
        self._forget_first()
        doubts = {
            name: of_layer.reasons["padding"] for name, of_layer in captured.items() if "padding" in of_layer.reasons
        }
        if doubts and not self._has_warned_of_padding:
            self._has_warned_of_padding = True
            name, why = next(iter(doubts.items()))
            warn(
                f"The padding tokens of `{name}` are not known, so that all its tokens are counted: {why}. "
                "Pass padding=..., or padding=None if there is no padding."
            )
        return captured

    # --- layers

    @guarded("watching heads", passes=(MisconfigurationError,))
    def _on_found(self, survey: Survey, forward: FirstForward | None = None) -> None:
        """Watch the layers that a first call of the model, or a part, shows; called within the user's forward."""
        self._check()
        if forward is not None:
            self._first_forwards.append(forward)
            if not self._is_armed:
                self._forget_first()
        if self._ranks is not None and number_of_ranks() > 1:
            late = ", ".join(f"`{layer.name}`" for layer in survey.layers if self._is_chosen(layer.name))
            if late:
                warn(f"{late} is not watched: it was first called after ranks had agreed on what they watch.")
            return
        self._watch(survey)

    def _forget_first(self) -> None:
        for forward in self._first_forwards:
            forward.forget()
        self._first_forwards.clear()

    @property
    def is_looking(self) -> bool:
        """Whether parts of the model have not run yet, of which heads may be found."""
        return number_of_ranks() == 1 and self._first_calls.is_looking  # ranks take their readings at the same steps

    def when_called(self, function: Callable[[], None]) -> None:
        """Call a function once, as soon as a call that autograd records has been captured since `arm`."""
        if self._first_calls.called:
            function()
        else:
            self._first_calls.on_called = function

    def _record(self) -> FirstForward:
        model = inner_model(self._model)
        keeps = lambda: torch.is_grad_enabled() or not self._training_only  # noqa: E731
        return FirstForward(model, self._padding, self._max_tokens, keeps, self._read.append)

    @guarded("checking attention")
    def _check(self) -> None:
        """Warn of wrong or odd attention in the forwards that were read; it ends no training."""
        read = [*self._read]
        self._read.clear()
        facts = [facts_of(reader) for reader in read]
        self._facts += [each for listed in facts for each in listed]
        checks = [examine(listed, self._is_chosen, has_cards=False) for listed in facts]
        texts = [str(finding) for each in checks for finding in each.findings]
        new = [text for text in texts if text not in self._said]
        self._said.update(new)
        if new and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
            warn("\n  ".join(["The first forward shows, of attention (`hdi check` says more):", *new]), HDIWarning)

    def _watch(self, survey: Survey) -> None:
        """Watch the layers of a survey, beside those known before."""
        self._left_out |= {layer.name for layer in survey.layers if not self._is_chosen(layer.name)}
        chosen = {layer.name: layer for layer in (*self.layers, *survey.layers) if self._is_chosen(layer.name)}
        layers = in_model_order(self._model, chosen.values())
        before = self.refused
        refused = {refusal.name: refusal for refusal in (*before, *survey.refused)}
        self.refused = tuple(
            each for name, each in refused.items() if name not in chosen and (not name or self._is_chosen(name))
        )
        if layers == self.layers and self._capture is not None:
            for refusal in (each for each in self.refused if each not in before):
                warn(f"Not watched: {refusal}.")  # with new layers it stands below their table
            return  # hooks stay as they are: those of the module that is being called are on their way
        self.layers = layers
        if self._forwards:  # before the first call nothing waits for it but they
            if self._capture is None:
                names = {source.name for source in self._forwards}
                self._capture = Capture(
                    self._model,
                    self.layers,
                    calls=self._first_calls,
                    max_tokens=self._max_tokens,
                    padding=self._padding,
                    rows=take_rows if ROWS in names else None,
                )
            else:
                self._capture.watch(self.layers)
            if self._is_armed:
                if not self._capture.is_armed:
                    self._capture.arm(training_only=self._training_only)
                for forward in self._first_forwards:
                    forward.hand_over(self._capture)
                self._forget_first()

    def _leave_moved(self) -> None:
        """Watch no layer any more whose module is not where it was found: names of its weights lead to others."""
        layers, ways = self._placed
        if layers is self.layers and all(whole._modules.get(name) is part for whole, name, part in ways):
            return
        parts = dict(self._model.named_modules())
        paths = {module: path for path, module in parts.items()}
        moved = [each for each in self.layers if layer_name(paths.get(each.module, "")) != each.name.partition("#")[0]]
        if moved:
            self.refused += tuple(Refusal(layer.name, "its module is not where it was found") for layer in moved)
            self.layers = tuple(layer for layer in self.layers if layer not in moved)
            warn(f"Not watched any more: {'; '.join(map(str, self.refused[-len(moved) :]))}.")
            if self._capture is not None:
                self._capture.watch(self.layers)
        steps = (accumulate(paths[layer.module].split("."), "{}.{}".format) for layer in self.layers)
        of_parts = [(*path.rpartition(".")[::2], parts[path]) for path in {*chain(*steps)} - {""}]
        self._placed = self.layers, [(parts[whole], name, part) for whole, name, part in of_parts]

    def _is_chosen(self, name: str) -> bool:
        is_included = self._include is None or any(fnmatchcase(name, pattern) for pattern in self._include)
        return is_included and not any(fnmatchcase(name, pattern) for pattern in self._exclude)

    def why_nothing(self) -> str:
        """Return why no layer is watched, as a sentence."""
        reasons = "".join(f"\n  {refusal}" for refusal in self.refused[:10])
        reasons += f"\n  and {len(self.refused) - 10} more" if len(self.refused) > 10 else ""
        if not reasons and self._left_out:
            reasons = f" `include` and `exclude` leave none of {len(self._left_out)}, such as `{min(self._left_out)}`."
        elif not reasons and self._first_calls.calls:
            reasons = " its first calls ran no softmax and no fused attention of queries and keys."
        reasons = reasons or " none of its modules has been called outside of `torch.func` and `forward_ad`."
        return f"No attention layer of `{type(self._model).__name__}` was read:{reasons}"


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without data parallelism around it or around its compiled form."""
    inner = inner_model(model)
    return inner.module if isinstance(inner, (nn.DataParallel, DistributedDataParallel)) else model


def _sizes(layer: AttentionLayer) -> dict[str, Any]:
    """Return the names and sizes that ranks must share to add up their sums."""
    facts = layer.description()
    return {name: facts[name] for name in ("name", "num_heads", "head_dim", "value_dim", "width")} | {
        "roles": sorted(layer.weights),
        "is_sharded": any(weight.is_sharded for weight in layer.weights.values()),
    }
