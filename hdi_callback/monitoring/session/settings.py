"""`Settings`: the arguments that the callbacks of all trainers share, checked once, before training.

`HDICallback`, `HDITrainerCallback`, `HDIHandler` and `watch_heads` take these arguments, with this documentation. The
monitor takes those about the measurement.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

from hdi_callback.arguments import flag, function, number, path, shown, whole_number
from hdi_callback.attention.capture.padding import PaddingChoice
from hdi_callback.core.whitening import Method
from hdi_callback.deprecation import renamed_argument, renamed_attribute
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Rule
from hdi_callback.monitoring.chosen_metrics import check_needs, has_default
from hdi_callback.monitoring.interventions import Intervention, check_interventions
from hdi_callback.monitoring.metrics import RULE_METRICS
from hdi_callback.monitoring.monitor.measuring import DEFAULT_MEMORY, MEASURING
from hdi_callback.monitoring.rules import check_thresholds, choose_rules

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


def _pretrained(value: Any) -> bool | Literal["auto"]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value == "auto":
        return "auto"
    raise MisconfigurationError(
        f'`pretrained` must be True, False or "auto", got {shown(value)}: write True for weights that have been '
        "trained before, False for those of an initialisation."
    )


# One line for each argument that can be checked alone; checks of combinations are in `Settings.__post_init__`.
CHECKS: Mapping[str, Callable[[Any], Any]] = {
    **MEASURING,
    "every_n_steps": lambda value: whole_number("every_n_steps", value, least=1, example=50, of=" of optimizer steps"),
    "history": _history,
    "matrices_every": lambda value: whole_number("matrices_every", value, least=0, example=10, of=" of readings"),
    "history_mb": lambda value: (
        None if value is None else number("history_mb", value, above=0, below=float("inf"), example=200)
    ),
    "figures_every": lambda value: whole_number("figures_every", value, least=0, example=20, of=" of readings"),
    "thresholds": check_thresholds,
    "pretrained": _pretrained,
    "on_alert": lambda value: function("on_alert", value, "an Alert"),
    "prog_bar": lambda value: flag("prog_bar", value),
    "name": _name,
    "verbose": lambda value: flag("verbose", value),
}
"""Argument -> its check: value -> value that is used; raises a `MisconfigurationError`."""


@dataclass(frozen=True)
class Settings:
    """The arguments that all callbacks share.

    Attributes:
        every_n_steps: optimizer steps between readings, as the trainer counts them.
        metrics: names of the curves to log; ``"default"`` or `None`, also as one of the names, for ``hdi``,
            ``hdi_alignment``, ``hdi_energy_alignment``, ``hdi_worst_pair``, ``hdi_effective_heads``,
            ``head_correlation``, ``head_output_overlap`` and ``head_covariance``. The history keeps everything that was
            measured. The default rules need further metrics: of a layer with more than 512 x 512 query weights,
            attention rows and input tokens are then measured at every fourth reading, and circuits at every eighth; a
            metric that is named here is measured on every layer at every reading.
        include: patterns of layer names to watch (``"encoder.*"``); all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        padding: which tokens are padding, whose head outputs are left out: ``"auto"`` to read it from the masks that
            the attention and the modules around it receive; the id of the padding token; a function that takes the
            arguments of the model by their names and returns ``(batch, length)``, true where a token is padding; `None`
            to count every token.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count; in (0, 1).
        method: how overlaps are computed, see `head_diversity`.
        memory_budget: bytes of memory for reading weights, beyond what the largest layer needs alone; a smaller budget
            is slower.
        history: write the history file, to ``hdi/history.jsonl`` in the folder of the run, or to a path.
        matrices_every: the history keeps the matrices over heads of every so many readings, and those of step 0, of
            alerts and of the last reading; 0 for none.
        history_mb: largest size of the history on disk in megabytes; beyond it, the matrices of older readings are
            thinned. `None` for no limit.
        figures_every: draw the worst alignment of all layers and the heads of the worst ones at every so many readings,
            for the loggers that take pictures and into ``figures`` beside the history; 0 for none. Drawing takes at
            most 2% of the run's time, and needs matplotlib.
        alerts: ``"default"``, rules of your own (see `Rule`), or `None` for no alerts.
        thresholds: limits of the default rules by pattern of layer names: ``{"decoder.*": {"mean": 0.7, "pair":
            None}}``; see `Thresholds`.
        pretrained: whether the weights had been trained before this run: their state at its start then raises no alert.
            ``"auto"`` infers it from the weights of each layer.
        on_alert: a function that is called with each `Alert`, on the first rank.
        interventions: what to do about alerts; nothing by default.
        strict: raise errors in place of two warnings: if the model has no readable attention layer, and if the
            checkpoint to resume from has layers that are missing here or have other heads. Without it, history, alerts
            and interventions start anew after such a checkpoint.
        check_heads: verify once, on a few tokens of the first captured forward, that every layer computes attention
            with the heads that were found; a layer that does not is left out, with a warning that says why.
        process_group: the ranks that measure together: ``"auto"`` for all of them, a `torch.distributed` process group;
            or `None` for each rank alone, which is needed if ranks leave training at different steps: then the first
            rank writes the measurements of its own tokens, and interventions are refused.
        verbose: print once at start which layers were found.
        loaded: deprecated, an earlier name of `pretrained`.
        rules: the rules that follow from `alerts` and `thresholds`; `None` for no alerts.
        rule_metrics: metrics that the default rules need, measured beside the default metrics and not logged.
        rotate_layers: measure the costly ones among them on a quarter or an eighth of the wide layers at each reading,
            see `LayerRotation`; False with interventions or rules of the user, which may need every reading.

    Raises:
        MisconfigurationError: if one of them cannot work; the message says what was expected, what was passed and what
            to write instead.

    Example:
        >>> Settings(every_n_steps=10).metrics[0], Settings(metrics=["hdi_query"]).metrics
        ('hdi', ('hdi_query',))
    """

    every_n_steps: int = 50
    _: KW_ONLY
    metrics: Sequence[str] | Literal["default"] | None = None
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
    pretrained: bool | Literal["auto"] = "auto"
    on_alert: Callable[[Alert], Any] | None = None
    interventions: Sequence[Intervention] | None = None
    strict: bool = False
    check_heads: bool = True
    process_group: Any = "auto"
    verbose: bool = True
    loaded: bool | Literal["auto"] | None = None
    rules: ChosenRules | None = field(init=False, repr=False, default=None)
    rule_metrics: tuple[str, ...] = field(init=False, repr=False, default=())
    rotate_layers: bool = field(init=False, repr=False, default=False)
    unasked = renamed_attribute("unasked", "rule_metrics")
    in_turn = renamed_attribute("in_turn", "rotate_layers")

    def __post_init__(self) -> None:
        names = self.metrics
        self._set("pretrained", renamed_argument("loaded", "pretrained", self.loaded, self.pretrained))
        self._set("loaded", None)
        for item in fields(self):
            if item.name in CHECKS:
                self._set(item.name, CHECKS[item.name](getattr(self, item.name)))
        if self.alerts is not None:
            rules = choose_rules(self.alerts, self.thresholds)
            if not callable(rules):
                for rule in rules:
                    if not rule.is_optional:
                        check_needs(rule.name, rule.needs, self.curves)
            self._set("rules", rules)
            if has_default(names) and (callable(rules) or any(rule.is_optional for rule in rules)):
                self._set("rule_metrics", RULE_METRICS)
        elif self.thresholds:
            raise MisconfigurationError(
                '`thresholds` are limits of rules, and alerts=None asks none: write alerts="default".'
            )
        self._set("interventions", check_interventions(self.interventions, self.alerts))
        # Rules of the user and interventions may need every reading.
        is_default = callable(self.rules) or (self.rules is not None and all(rule.is_optional for rule in self.rules))
        self._set("rotate_layers", is_default and not self.interventions)

    @property
    def curves(self) -> tuple[str, ...]:
        """The names of the curves to log."""
        return tuple(self.metrics or ())

    @property
    def acting(self) -> list[Intervention]:
        """The interventions that are not dry runs."""
        return [item for item in self.interventions or () if not item.dry_run]

    @property
    def measuring(self) -> dict[str, Any]:
        """The arguments of `HeadDiversityMonitor`."""
        return {name: getattr(self, name) for name in (*MEASURING, "rule_metrics", "rotate_layers")}

    @property
    def keeping(self) -> dict[str, Any]:
        """The arguments of `History` about matrices."""
        budget = None if self.history_mb is None else self.history_mb * 1e6
        return {"matrix_every": self.matrices_every, "budget": budget}

    @property
    def layer_patterns(self) -> dict[str, Sequence[str]]:
        """Argument -> patterns of layer names in it: rules, limits and interventions."""
        rules = () if self.rules is None or callable(self.rules) else self.rules
        return {
            "`thresholds`": list(self.thresholds or ()),
            **{f"`layers` of the rule {rule.name!r}": list(rule.layers or ()) for rule in rules},
            **{f"`layers` of {item.name}": list(item.layers or ()) for item in self.interventions or ()},
        }

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
