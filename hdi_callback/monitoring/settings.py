"""`Settings`: what every trainer's callback is asked for, in one place, and checked once, before training.

`HDICallback`, `HDITrainerCallback` and `watch_heads` spell the same arguments out, so that editors and YAML know them,
and hand them to a `Settings`. The monitor takes those that concern the measurement.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hdi_callback.arguments import flag, function, number, one_of, path, shown, whole_number, words
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Rule
from hdi_callback.monitoring.interventions import Intervention, check_interventions
from hdi_callback.monitoring.metrics import check_needs, choose_metrics
from hdi_callback.monitoring.ranks import check_process_group
from hdi_callback.monitoring.rules import check_thresholds, choose_rules

Method = Literal["whiten", "svd", "exact"]
METHODS: tuple[Method, ...] = ("whiten", "svd", "exact")

DEFAULT_MEMORY = 512 * 2**20
"""Bytes that reading weights may take at a time."""

LONGEST_NAME = 100

ChosenRules = Sequence[Rule] | Callable[[str], Sequence[Rule]]


def _history(value: Any) -> bool | str | os.PathLike[str]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str | os.PathLike):
        raise MisconfigurationError(
            f"`history` must be True, False or a path, got {shown(value)}: write False for none."
        )
    found = path("history", value, "runs/a/history.jsonl")
    if os.path.isdir(found):
        file = os.path.join(found, "history.jsonl")
        raise MisconfigurationError(f"`history` must be the path of a file, and {found!r} is a folder: write {file!r}.")
    return value


def _name(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > LONGEST_NAME:
        raise MisconfigurationError(
            f"`name` must be a string of 1 to {LONGEST_NAME} printable characters or None, got {shown(value)}: write "
            '"encoder".'
        )
    return value


def _loaded(value: Any) -> bool | Literal["auto"]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value == "auto":
        return "auto"
    raise MisconfigurationError(
        f'`loaded` must be True, False or "auto", got {shown(value)}: write True for weights that have been trained '
        "before, False for those of an initialisation."
    )


def _padding(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and value == "auto"):
        return value
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    raise MisconfigurationError(
        f'`padding` must be "auto", the number of the token that is padding, a function or None, got {shown(value)}: '
        'write "auto" to know it from masks.'
    )


# One line for each argument that stands for itself; what depends on others is in `Settings.__post_init__`.
CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "every_n_steps": lambda value: whole_number("every_n_steps", value, least=1, example=50, of=" of optimizer steps"),
    "metrics": choose_metrics,
    "include": lambda value: words("include", value, what="patterns of layer names", may_be_empty=False),
    "exclude": lambda value: words("exclude", value, what="patterns of layer names"),
    "max_tokens": lambda value: whole_number("max_tokens", value, least=2, example=2048),
    "padding": _padding,
    "rank_tol": lambda value: number("rank_tol", value, above=0, below=1, example="1e-6"),
    "method": lambda value: one_of("method", value, METHODS),
    "memory_budget": lambda value: whole_number(
        "memory_budget", value, least=1, example=DEFAULT_MEMORY, of=" of bytes"
    ),
    "history": _history,
    "matrices_every": lambda value: whole_number("matrices_every", value, least=0, example=10, of=" of readings"),
    "history_mb": lambda value: (
        None if value is None else number("history_mb", value, above=0, below=float("inf"), example=200)
    ),
    "figures_every": lambda value: whole_number("figures_every", value, least=0, example=20, of=" of readings"),
    "thresholds": check_thresholds,
    "loaded": _loaded,
    "on_alert": lambda value: function("on_alert", value, "an Alert"),
    "prog_bar": lambda value: flag("prog_bar", value),
    "name": _name,
    "strict": lambda value: flag("strict", value),
    "check_heads": lambda value: flag("check_heads", value),
    "process_group": check_process_group,
    "verbose": lambda value: flag("verbose", value),
}
"""Argument -> what checks it: takes what came, gives what is used, raises a `MisconfigurationError`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is watched with; the arguments that all callbacks share.

    Attributes:
        every_n_steps: optimizer steps between readings, at least 1.
        metrics: names of the curves to log, see `METRICS`; ``"default"`` or `None` for the default ones.
        include: patterns of layer names to watch; `None` for all.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs, at least 2.
        padding: which tokens are left out of head outputs: ``"auto"`` for those that masks tell of, the number of a
            token, a function of the model's arguments, or `None` for none.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count; in (0, 1).
        method: how overlaps are computed: ``"whiten"``, ``"svd"`` or ``"exact"``.
        memory_budget: bytes that reading weights may take at a time, beyond what the largest layer needs alone.
        history: write the history file, to its usual place or to the path given.
        matrices_every: readings between two whose matrices the history keeps; 0 for none at all.
        history_mb: megabytes that the history may have on the disk; `None` for no limit.
        figures_every: readings between two sets of pictures; 0 for none.
        alerts: ``"default"``, rules, or `None` for no alerts.
        thresholds: limits of the default rules by pattern of layer names.
        loaded: whether the weights had been trained before this run, so that what they are at its start is no alarm;
            ``"auto"`` tells it from the weights of each layer.
        on_alert: a function that is called with each `Alert`, on the first rank.
        interventions: what to do about alerts.
        strict: make warnings about the model and the checkpoint errors.
        check_heads: check the heads that were found against the first forward that is read.
        process_group: the ranks that measure together: ``"auto"`` for all, a process group, or `None` for each alone.
        verbose: print once at start which layers were found.
        rules: what `Alerts` takes; `None` for no alerts.

    Raises:
        MisconfigurationError: if one of them cannot work; says what was expected, what came and what to write instead.

    Example:
        >>> Settings(every_n_steps=10).metrics[0], Settings(metrics=["hdi_query"]).metrics
        ('hdi', ('hdi_query',))
    """

    every_n_steps: int = 50
    metrics: Sequence[str] | None = None
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    max_tokens: int = 2048
    padding: PaddingChoice = "auto"
    rank_tol: float = 1e-6
    method: Method = "whiten"
    memory_budget: int = DEFAULT_MEMORY
    history: bool | str | os.PathLike[str] = True
    matrices_every: int = 10
    history_mb: float | None = 200
    figures_every: int = 20
    alerts: Literal["default"] | Sequence[Rule] | None = "default"
    thresholds: Mapping[str, Mapping[str, float | None]] | None = None
    loaded: bool | Literal["auto"] = "auto"
    on_alert: Callable[[Alert], Any] | None = None
    interventions: Sequence[Intervention] | None = None
    strict: bool = False
    check_heads: bool = True
    process_group: Any = "auto"
    verbose: bool = True
    rules: ChosenRules | None = field(init=False, repr=False, default=None)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Take the shared arguments out of those of a callback.

        Args:
            arguments: all that it was called with, by name.

        Returns:
            The settings.
        """
        return cls(**{item.name: arguments[item.name] for item in fields(cls) if item.init})

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name in CHECKS:
                self._set(item.name, CHECKS[item.name](getattr(self, item.name)))
        if self.alerts is not None:
            rules = choose_rules(self.alerts, self.thresholds)
            if not callable(rules):
                assert self.metrics is not None
                for rule in rules:
                    if not rule.is_optional:
                        check_needs(rule.name, rule.needs, self.metrics)
            self._set("rules", rules)
        elif self.thresholds:
            raise MisconfigurationError(
                '`thresholds` are limits of rules, and alerts=None asks none: write alerts="default".'
            )
        self._set("interventions", check_interventions(self.interventions, self.alerts))

    @property
    def measuring(self) -> dict[str, Any]:
        """The arguments of `HeadDiversityMonitor`."""
        names = (
            "metrics",
            "include",
            "exclude",
            "max_tokens",
            "padding",
            "rank_tol",
            "method",
            "memory_budget",
            "strict",
            "check_heads",
        )
        return {name: getattr(self, name) for name in (*names, "process_group")}

    @property
    def keeping(self) -> dict[str, Any]:
        """What `History` is told of matrices."""
        budget = None if self.history_mb is None else self.history_mb * 1e6
        return {"matrix_every": self.matrices_every, "budget": budget}

    @property
    def layer_patterns(self) -> dict[str, Sequence[str]]:
        """The patterns of layer names in rules, limits and interventions, by where they were written."""
        rules = () if self.rules is None or callable(self.rules) else self.rules
        return {
            "`thresholds`": list(self.thresholds or ()),
            **{f"`layers` of the rule {rule.name!r}": list(rule.layers or ()) for rule in rules},
            **{f"`layers` of {item.name}": list(item.layers or ()) for item in self.interventions or ()},
        }

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def check_arguments(**given: Any) -> dict[str, Any]:
    """Check arguments that are not those of a whole `Settings`.

    Args:
        given: argument -> what came.

    Returns:
        The same, as they are used.

    Raises:
        MisconfigurationError: if one of them cannot work.
    """
    return {name: CHECKS[name](value) for name, value in given.items()}
