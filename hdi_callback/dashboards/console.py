"""Console output of a run: the layers that were found, then alerts and actions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, metadata
from typing import TYPE_CHECKING, TypeVar

from hdi_callback.errors import HeadCollapseWarning
from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.plain_table import heads_in_words, layer_lines, widths_in_words
from hdi_callback.monitoring.rules.explanations import rule_explanations

if TYPE_CHECKING:
    from hdi_callback.attention import AttentionLayer, Refusal
    from hdi_callback.monitoring.alerts import Alert
    from hdi_callback.monitoring.interventions import Action, Intervention
    from hdi_callback.monitoring.session.sink import Result

_Item = TypeVar("_Item")
_MOST_LINES = 60
_MOST_NAMES = 3


def print_layers(
    layers: Sequence[AttentionLayer],
    refused: Sequence[Refusal],
    *,
    every_n_steps: int,
    interventions: Iterable[Intervention] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Print the layers that are watched and those that are not: a table on a terminal, plain lines elsewhere.

    Args:
        layers: the layers that are watched.
        refused: modules that resemble attention and cannot be read.
        every_n_steps: optimizer steps between readings.
        interventions: the interventions.
        say: prints the plain lines if no table can be drawn.
    """
    title = f"hdi_callback watches {len(layers)} attention layers, every {every_n_steps} optimizer steps"
    if not _print_table(title, layers, refused):
        _say_in_its_letters(say, "\n".join([title, *layer_lines(layers, refused)]))
    for intervention in interventions:
        _say_in_its_letters(say, f"hdi_callback intervenes: {intervention.describe()}")


def _say_in_its_letters(say: Callable[[str], None], text: str) -> None:
    """Print a text, in ASCII if the stream supports nothing else, as in many containers."""
    try:
        say(text)
    except UnicodeEncodeError:
        say(text.encode("ascii", "backslashreplace").decode("ascii"))


def _print_table(title: str, layers: Sequence[AttentionLayer], refused: Sequence[Refusal]) -> bool:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return False
    console = Console()
    if not console.is_terminal:
        return False
    console.print(title)
    table = Table()
    for heading, justify in (("layer", "left"), ("heads", "right"), ("width", "right"), ("layout", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for layer in layers:
        table.add_row(
            escape(layer.name),
            heads_in_words(layer.num_heads, layer.num_key_heads),
            widths_in_words(layer),
            escape(layer.kind),
        )
    for refusal in refused:
        reason = escape(f"not watched: {refusal.reason}")
        table.add_row(f"[dim]{escape(refusal.name)}[/dim]", "", "", f"[yellow]{reason}[/yellow]")
    console.print(table)
    return True


class AlertLines:
    """Print alerts and actions, one line for each kind at a reading.

    The first alert of each rule says where to read more. A critical one is also raised as a `HeadCollapseWarning` if
    warnings are recorded, logged or turned into errors; otherwise it would be printed twice. Notices are not printed.
    After 60 lines of alerts it prints where the others are, and stops; actions of interventions are always printed.

    Args:
        say: prints a line.
        elsewhere: where all alerts can be read; converted to text when needed.
    """

    name = "printing alerts"

    def __init__(self, say: Callable[[str], None] = print, elsewhere: object = "the history file") -> None:
        self._say, self._elsewhere = say, elsewhere
        self._lines = 0
        self._explained: set[str] = set()

    def write(self, result: Result) -> None:
        """Print new alerts and actions of one reading.

        Args:
            result: the result of a reading.
        """
        alerts = [alert for alert in result.alerts if alert.level != "notice"]
        groups = _groups(alerts, lambda alert: (alert.rule, alert.level, alert.status))
        done = _groups(result.actions, lambda action: (action.intervention, action.is_dry_run))
        attempt_each(
            [
                *(partial(self._print_alerts, group) for group in groups),
                *(partial(self._print_actions, actions) for actions in done),
                partial(_warn, [alert for alert in alerts if alert.level == "critical" and not alert.is_resolved]),
            ]
        )

    def _print_alerts(self, alerts: Sequence[Alert]) -> None:
        self._lines += 1
        if self._lines > _MOST_LINES:
            return
        text = _gather([alert.message for alert in alerts], [alert.layer for alert in alerts])
        _say_in_its_letters(self._say, f"hdi_callback {alerts[0].status}: {text}{self._more_on(alerts[0])}")
        if self._lines == _MOST_LINES:
            self._say(f"hdi_callback prints no further alerts; all of them are in {self._elsewhere}.")

    def _more_on(self, alert: Alert) -> str:
        """Reference to the explanation of a rule, once for each rule."""
        if alert.is_resolved or alert.rule in self._explained:
            return ""
        self._explained.add(alert.rule)
        place = place_to_read(alert.rule)
        return f". More: {place}" if place else ""

    def _print_actions(self, actions: Sequence[Action]) -> None:
        text = _gather([action.message for action in actions], [action.layer for action in actions])
        _say_in_its_letters(self._say, f"hdi_callback {text}")


def place_to_read(rule: str) -> str:
    """Reference to the explanation of a rule: a page of the project, if its metadata name one, or a command.

    Args:
        rule: its name.

    Returns:
        An address, or a call of `hdi`; empty for a rule of the user's own.

    Example:
        >>> place_to_read("worst pair").endswith(("what-number-is-bad.html", "hdi explain worst-pair"))
        True
    """
    if rule not in rule_explanations():
        return ""
    pages = _documentation()
    return f"{pages.rstrip('/')}/what-number-is-bad.html" if pages else f"hdi explain {rule.replace(' ', '-')}"


@cache
def _documentation() -> str:
    """Address of the documentation in the metadata of the installed package."""
    try:
        urls = metadata("hdi-callback").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    pages = {name.strip().lower(): url.strip() for name, _, url in (line.partition(",") for line in urls)}
    return str(pages.get("documentation", ""))


def _is_warning_taken() -> bool:
    """Return whether a warning would go elsewhere than to the screen, which shows the line already."""
    shows = (warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None))
    is_replaced = any(getattr(show, "__module__", None) != "warnings" for show in shows)
    is_error = any(
        action == "error" and issubclass(HeadCollapseWarning, category) for action, _, category, *_ in warnings.filters
    )
    return is_replaced or is_error


def _warn(critical: Sequence[Alert]) -> None:
    if critical and _is_warning_taken():
        message = _gather([alert.message for alert in critical], [alert.layer for alert in critical])
        warnings.warn(message, HeadCollapseWarning, stacklevel=2)


def _groups(items: Iterable[_Item], kind: Callable[[_Item], object]) -> list[list[_Item]]:
    """Items grouped by kind, in the order of their first items."""
    groups: dict[object, list[_Item]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return list(groups.values())


def _gather(messages: Sequence[str], layers: Sequence[str]) -> str:
    """The first message in full, with the layers of the others."""
    others = list(layers[1:])
    if not others:
        return messages[0]
    named = ", ".join(others[:_MOST_NAMES])
    more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
    return f"{messages[0]} (and so in {named}{more})"
