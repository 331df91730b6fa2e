"""The commands: `hdi audit`, `report`, `compare`, `watch`, `alerts`, `explain`, `replay` and `allocate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hdi_callback.command.group import CANNOT_WORK, NOTHING_UNUSUAL, UNUSUAL, CommandGroup, print_json

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of a table.")
_CLASS = click.option(
    "--class", "model_class", metavar="MODULE:CLASS", help="The class of the model in a Lightning checkpoint."
)
_CONFIG = click.option(
    "--config", metavar="PATH", help="The config.json of a safetensors file, if it is not beside it."
)
_THRESHOLD = click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    metavar="[PATTERN:]NAME=VALUE",
    help="A limit of the rules, such as pair=0.9, 'encoder.*:mean=0.6' or trend=off. May be repeated.",
)
_LEVEL = click.option(
    "--level",
    type=click.Choice(["notice", "warning", "critical"]),
    default="notice",
    show_default=True,
    help="Leave out what is less serious.",
)

_EXIT_CODES = (
    "Exit codes: 0 nothing is unusual, 1 something is unusual (a warning or a critical alert is active), 2 the command "
    "has wrong arguments, or there is nothing to judge, 130 interrupted."
)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(package_name="hdi-callback", prog_name="hdi", message="%(prog)s %(version)s")
def hdi() -> None:
    """Check the diversity of the attention heads of a model, a checkpoint or a run.

    MODEL is a folder of transformers, a .safetensors file, a checkpoint with --class, or module:function.
    RUN is the history.jsonl of a run, or its folder.
    """


@hdi.command(epilog=_EXIT_CODES)
@click.argument("model")
@_CLASS
@_CONFIG
@click.option("--include", multiple=True, metavar="PATTERN", help="Only layers that match, such as 'encoder.*'.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out layers that match.")
@_THRESHOLD
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page that opens in a browser.")
@_JSON
def audit(
    model: str,
    model_class: str | None,
    config: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    thresholds: tuple[str, ...],
    html: Path | None,
    as_json: bool,
) -> int:
    """Judge the heads of a model or checkpoint, one layer at a time.

    Nothing in a file is executed. The weights are read layer by layer, so that a model that is larger than the memory
    can be audited. Ends with a verdict.

    \b
    Examples:
      hdi audit ./Llama-3.2-1B
      hdi audit model.safetensors --html audit.html
      hdi audit epoch=3.ckpt --class my_package.models:LitGPT
      hdi audit my_package.models:build_model --json
    """
    from hdi_callback.audits import audit as audit_model
    from hdi_callback.command import terminal
    from hdi_callback.command.limits import parse_limits
    from hdi_callback.command.progress import layer_progress

    if html is not None:
        _require_plotly()
    out = None if as_json else terminal.console()
    limits = parse_limits(thresholds)
    with layer_progress(is_quiet=as_json) as progress:
        found = audit_model(
            model, config=config, model_class=model_class, include=include or None, exclude=exclude or None,
            thresholds=limits, progress=progress,
        )  # fmt: skip
    if html is not None:
        from hdi_callback.dashboards.report import report as write_report

        write_report(found, path=html)
    if out is None:
        print_json(found.to_dict())
    else:
        terminal.print_audit(out, found)
        _print_written(html)
    if not found.audited:
        return CANNOT_WORK
    return UNUSUAL if found.unusual else NOTHING_UNUSUAL


@hdi.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN2 ...]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; by default report.html beside the first history.",
)
@click.option("--title", help="The title of the page.")
@_JSON
def report(runs: tuple[str, ...], output: Path | None, title: str | None, as_json: bool) -> int:
    """Write one HTML file about a run, or several side by side.

    The file opens without a network, on a phone and on paper too.

    \b
    Examples:
      hdi report lightning_logs/version_0
      hdi report runs/baseline runs/more-warmup -o both.html
    """
    from hdi_callback.dashboards.report import report as write_report

    _require_plotly()
    page = write_report(*runs, path=output, title=title)
    if as_json:
        print_json({"path": str(page.path), "verdicts": page.verdicts, "is_unusual": page.is_unusual})
    else:
        for name, verdict in page.verdicts.items():
            click.echo(f"{name}: {verdict}")
        _print_written(page.path)
    return UNUSUAL if page.is_unusual else NOTHING_UNUSUAL


@hdi.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Compare runs at their last readings up to this step.",
)
@click.option("--rows", type=click.IntRange(min=1), default=20, show_default=True, help="Layers in the table.")
@_CLASS
@_CONFIG
@_JSON
def compare(
    first: str, second: str, step: int | None, rows: int, model_class: str | None, config: str | None, as_json: bool
) -> int:
    """Show which layers and heads differ in two models or runs.

    \b
    Examples:
      hdi compare checkpoint-1000 checkpoint-2000
      hdi compare runs/baseline runs/more-warmup --step 5000
    """
    from hdi_callback.audits import compare as compare_models
    from hdi_callback.command import terminal
    from hdi_callback.command.progress import layer_progress

    out = None if as_json else terminal.console()
    with layer_progress(is_quiet=as_json) as progress:
        found = compare_models(first, second, step=step, model_class=model_class, config=config, progress=progress)
    if out is None:
        print_json(found.to_dict())
    else:
        terminal.print_comparison(out, found, rows)
    return NOTHING_UNUSUAL if found.layers else CANNOT_WORK


@hdi.command(epilog=_EXIT_CODES)
@click.argument("run")
@click.option("--once", is_flag=True, help="Draw the run as it is now, and end.")
@click.option(
    "--until", type=click.IntRange(min=0), metavar="STEP", help="End at the first reading of this step or a later one."
)
@click.option("--idle", type=float, metavar="SECONDS", help="End when nothing was written for this long.")
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between two updates.")
def watch(run: str, once: bool, until: int | None, idle: float | None, interval: float) -> int:
    """Follow a run live in the terminal.

    Ends with Ctrl-C, or as --once, --until and --idle say. The exit code says whether an alert is active.
    """
    from hdi_callback.command.live import follow

    return UNUSUAL if follow(run, once=once, until=until, idle=idle, interval=interval) else NOTHING_UNUSUAL


@hdi.command(epilog=_EXIT_CODES)
@click.argument("run")
@click.option("--since", type=click.IntRange(min=0), default=0, metavar="STEP", help="Only alerts from this step on.")
@_LEVEL
@_JSON
def alerts(run: str, since: int, level: str, as_json: bool) -> int:
    """List the alerts of a run, and which of them are active.

    \b
    Example:
      hdi alerts lightning_logs/version_0 --since 1000 --json
    """
    from hdi_callback.monitoring.history.run_folder import find_history
    from hdi_callback.monitoring.rules.replay import read_alerts

    path = find_history(run)
    return _show_alerts(path, read_alerts(path), since, level, as_json)


@hdi.command()
@click.argument("name", nargs=-1, metavar="[RULE or CURVE]")
@_JSON
def explain(name: tuple[str, ...], as_json: bool) -> int:
    """Explain a rule or a curve, and what to do about it.

    Without a name it lists the rules. An alert on the console names its rule at the end.

    \b
    Examples:
      hdi explain
      hdi explain worst-pair
      hdi explain hdi_alignment
    """
    from hdi_callback.command.explaining import print_explanation, print_rules
    from hdi_callback.monitoring.rules.explanations import explain as explain_one
    from hdi_callback.monitoring.rules.explanations import rule_explanations

    if name:
        found = explain_one(" ".join(name))
        if as_json:
            print_json(found.to_dict())
        else:
            print_explanation(found)
    elif as_json:
        print_json({"rules": [explanation.to_dict() for explanation in rule_explanations().values()]})
    else:
        print_rules(rule_explanations().values())
    return NOTHING_UNUSUAL


@hdi.command(epilog=_EXIT_CODES)
@click.argument("run")
@_THRESHOLD
@click.option("--since", type=click.IntRange(min=0), default=0, metavar="STEP", help="Only alerts from this step on.")
@_LEVEL
@_JSON
def replay(run: str, thresholds: tuple[str, ...], since: int, level: str, as_json: bool) -> int:
    """Judge a run again with other limits, without training again.

    \b
    Example:
      hdi replay lightning_logs/version_0 --threshold pair=0.9 --threshold trend=off
    """
    from hdi_callback.command.limits import parse_limits
    from hdi_callback.monitoring.history.run_folder import find_history
    from hdi_callback.monitoring.rules.replay import replay as judge_again

    path = find_history(run)
    return _show_alerts(path, judge_again(path, thresholds=parse_limits(thresholds)), since, level, as_json)


@hdi.command()
@click.argument("run")
@click.option("--keys", type=click.IntRange(min=1), required=True, help="Keys that a query sees: the context length.")
@click.option(
    "--multiple-of",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Suggest only head widths that are multiples of this.",
)
@_JSON
def allocate(run: str, keys: int, multiple_of: int, as_json: bool) -> int:
    """Suggest a number of heads from what a run measured.

    Needs a run with metrics=["default", "attention_samples", "token_rank"]. The suggestion comes from a model of the
    error with assumptions. Often no number can be suggested; the reason is printed.
    """
    from hdi_callback.command.allocation import allocations, print_allocations

    found = allocations(run, keys, multiple_of)
    if as_json:
        print_json(found)
    else:
        print_allocations(found)
    return NOTHING_UNUSUAL


def _show_alerts(path: Path, found: list[Any], since: int, level: str, as_json: bool) -> int:
    from hdi_callback.command import terminal
    from hdi_callback.monitoring.alerts import is_at_least
    from hdi_callback.monitoring.history import read_records
    from hdi_callback.monitoring.rules.replay import active_alerts

    active = active_alerts(found)
    shown = [alert for alert in found if alert.step >= since and is_at_least(alert.level, level)]  # type: ignore[arg-type]
    if as_json:
        still = [alert.to_dict() for alert in active]
        # `standing` is the name that version 0.1 gave to `active`; it goes with version 0.4.
        print_json({"alerts": [alert.to_dict() for alert in shown], "active": still, "standing": still})
    else:
        terminal.print_alerts(terminal.console(), shown, active)
        if not found and not read_records(path):
            click.echo("There is no reading yet.")
    return UNUSUAL if active else NOTHING_UNUSUAL


def _require_plotly() -> None:
    from hdi_callback.dashboards.report import require_plotly

    require_plotly()


def _print_written(path: Path | None) -> None:
    if path is not None:
        click.echo(f"written: {path}", file=sys.stderr)
