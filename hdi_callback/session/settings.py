"""`Settings`: the arguments that the callbacks of all trainers share, checked once, before training."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from hdi_callback.arguments import did_you_mean, file_path, one_of, shown, strings, whole_number
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions import Intervention
from hdi_callback.monitor.metrics import DEFAULT_METRICS, METRICS, check_metrics
from hdi_callback.rules import Alerts, Rule

Padding = Literal["auto"] | int | None
History = bool | str | os.PathLike[str]
ChosenAlerts = Literal["default"] | Sequence[Rule] | None
Thresholds = Mapping[str, Mapping[str, float | None]] | None
T = TypeVar("T", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """`Settings` but the first, as callbacks take them whose signature no command line reads."""

    metrics: Sequence[str] | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    max_tokens: int
    padding: Padding
    history: History
    alerts: ChosenAlerts
    thresholds: Thresholds
    pretrained: bool | Literal["auto"]
    interventions: Sequence[Intervention] | None
    strict: bool


@dataclass
class Settings:
    """The arguments that all callbacks share.

    Attributes:
        every_n_steps: optimizer steps between readings, as the trainer counts them.
        metrics: names of further metrics to draw as curves per layer; `None` for the default curves alone. With rules
            everything that they need is measured and kept in the history anyway.
        include: patterns of layer names to watch (``"encoder.*"``); all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        padding: which tokens are padding, whose head outputs are left out: ``"auto"`` to read it from the masks that
            the attention receives; the id of the padding token; `None` to count every token.
        history: write the history, to ``hdi/history.jsonl`` in the folder of the run, or to a path.
        alerts: ``"default"``, a list of rules, or `None` for no alerts.
        thresholds: limits of the rules by pattern of layer names: ``{"decoder.*": {"pair": 0.95}}``; `None` in
            place of a number switches a limit off there.
        pretrained: whether the weights were trained before this run, so that their state at its start raises no alert;
            ``"auto"`` tells it from the weights of each layer.
        interventions: what to do about alerts; nothing by default.
        strict: raise an error if no attention is read in the first forward; otherwise warn.

    Raises:
        MisconfigurationError: if one of them cannot work; the message says what to write instead.

    Example:
        >>> Settings(every_n_steps=10, alerts=None).measured
        ('hdi', 'hdi_worst_alignment', 'head_covariance')
    """

    every_n_steps: int = 50
    metrics: Sequence[str] | None = None
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    max_tokens: int = 2048
    padding: Padding = "auto"
    history: History = True
    alerts: ChosenAlerts = "default"
    thresholds: Thresholds = None
    pretrained: bool | Literal["auto"] = "auto"
    interventions: Sequence[Intervention] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        whole_number("every_n_steps", self.every_n_steps, least=1, example=50)
        whole_number("max_tokens", self.max_tokens, least=2, example=2048)
        one_of("pretrained", self.pretrained, ["auto", True, False])
        one_of("strict", self.strict, [True, False])
        self.metrics = check_metrics(self.metrics)
        self.include = strings("include", self.include, "patterns of layer names")
        self.exclude = strings("exclude", self.exclude, "patterns of layer names")
        if self.padding not in ("auto", None):
            whole_number("padding", self.padding, least=0, example='"auto", or the id of the padding token')
        self.history = _history(self.history)
        if self.alerts is None and (self.thresholds is not None or self.interventions):
            raise MisconfigurationError(
                "`thresholds` and `interventions` are of alerts, and alerts=None switches them off: write "
                'alerts="default".'
            )
        rules = Alerts(self.alerts, self.thresholds).names  # checks both, and the metrics that rules need
        self.interventions = _interventions(self.interventions, rules)

    @property
    def measured(self) -> tuple[str, ...]:
        """The metrics to measure: those of the curves, and with rules what they need."""
        needed = () if self.alerts is None else METRICS
        return tuple(dict.fromkeys([*needed, *DEFAULT_METRICS, *(self.metrics or ())]))


def takes_settings(door: T) -> T:
    """Return a class or function that takes `**settings`, with each of them in its signature and docstring."""
    function: Any = door.__init__ if isinstance(door, type) else door  # type: ignore[misc]
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    every = inspect.signature(Settings, eval_str=True).parameters
    settings = [every[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in Options.__annotations__]
    function.__signature__ = signature.replace(parameters=[*own, *settings])
    described = (Settings.__doc__ or "").partition("        metrics:")[2].partition("\n\n    Raises:")[0]
    door.__doc__ = (door.__doc__ or "").replace("        settings: see `Settings`.", f"        metrics:{described}")
    return door


def _history(value: Any) -> bool | Path:
    if isinstance(value, bool):
        return value
    path = file_path("history", value, "runs/a/history.jsonl", "True, False or ").absolute()
    if path.is_dir():
        raise MisconfigurationError(
            f"`history` must be the path of a file, and {str(value)!r} is a folder: write "
            f"{str(Path(value) / 'history.jsonl')!r}."
        )
    return path


def _interventions(value: Any, rules: Sequence[str]) -> tuple[Intervention, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise MisconfigurationError(
            f"`interventions` must be a list, got {shown(value)}: write interventions=[StopTraining()]."
        )
    for item in value:
        if not isinstance(item, Intervention):
            hint = f": write {item.__name__}(...)" if isinstance(item, type) else ""
            raise MisconfigurationError(f"`interventions` holds {shown(item)}, which is no intervention{hint}.")
        for rule in item.rules or ():
            if rule not in rules:
                raise MisconfigurationError(
                    f"{item.name} answers the rule {rule!r}, which judges nothing in this run: its rules are "
                    f"{', '.join(rules)}. Write rules=[...] in {item.name}.{did_you_mean(rule, rules)}"
                )
    return tuple(value)
