"""The commands: `hdi check`, `audit`, `report` and `explain`."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import Any

import click

from hdi_callback.command.group import CommandGroup, print_rows

_MODEL = click.option(
    "--model", "build", metavar="MODULE:NAME", help="The class or function that builds the model of a checkpoint."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead.")
_EXIT_CODES = (
    "Exit codes: 0 nothing unusual; 1 something is wrong, or a warning or a critical alert is active; 2 wrong "
    "arguments, or nothing to judge; 130 interrupted."
)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(package_name="hdi-callback", prog_name="hdi", message="%(prog)s %(version)s")
def hdi() -> None:
    """Check the attention heads of a model, a checkpoint or a run.

    TARGET is a folder that transformers saved, a checkpoint with --model, or module:function. RUN is the history.jsonl
    of a run, or its folder.
    """


@hdi.command(epilog=_EXIT_CODES)
@click.argument("target")
@_MODEL
@click.option("--strict", is_flag=True, help="Exit with code 1 also for what is odd.")
@_JSON
def check(target: str, build: str | None, strict: bool, as_json: bool) -> str:
    """Say what each attention of a model does, and what is wrong or odd about it.

    A few forwards run: on the batch that module:function gives beside its model, on example_input_array, or on a
    made-up batch of a model of transformers, which needs its config.json alone.

    \b
    Examples:
      hdi check ./Llama-3.2-1B
      hdi check epoch=3.ckpt --model my_package.models:LitGPT
    """
    from hdi_callback.audits.sources import open_target
    from hdi_callback.checks import check as check_model

    opened = open_target(target, model=build, needs_weights=False)
    result = opened.first_result(lambda forward: check_model(opened.model, forward))
    _print_result(result, as_json and asdict(result))
    if result.wrong or (strict and result.findings):
        return "alert"
    return "clear" if any(card.heads for card in result.cards) else "nothing to judge"


@hdi.command(epilog=_EXIT_CODES)
@click.argument("target")
@_MODEL
@_JSON
def audit(target: str, build: str | None, as_json: bool) -> str:
    """Judge the heads of a model or checkpoint.

    Code in files is never executed. The last line is the verdict.

    Example: hdi audit epoch=3.ckpt --model my_package.models:LitGPT
    """
    from hdi_callback.audits import audit as audit_target

    result = audit_target(target, model=build)
    _print_result(result, as_json and _of_verdict(result.verdict, result.findings))
    if not as_json:
        _print_remedy(result.verdict)
    return result.verdict.state


@hdi.command(epilog=_EXIT_CODES)
@click.argument("run")
@_JSON
def report(run: str, as_json: bool) -> str:
    """List the alerts of a run, and write report.html beside its history, which opens without a network.

    Example: hdi report lightning_logs/version_0
    """
    from hdi_callback.dashboards.report import write_report
    from hdi_callback.dashboards.verdict import events, state, verdict
    from hdi_callback.history import load_history

    history = load_history(run)
    if history.skipped_lines:
        click.echo(f"{history.skipped_lines} lines of {history.path} could not be read and are left out.", err=True)
    judgement, raised = verdict(history.records, history.layers), events(history.records)
    if as_json:
        _print_result("", _of_verdict(judgement, raised))
        return judgement.state
    if judgement.state != "nothing to judge":
        click.echo(f"Written: {write_report(history)}", err=True)
    for alert in raised:
        click.echo(f"step {alert.step}, {alert.level}, {state(alert)} (hdi explain {alert.rule}): {alert.message}")
    click.echo(("\n" if raised else "") + judgement.text)
    _print_remedy(judgement)
    return judgement.state


@hdi.command()
@click.argument("name", nargs=-1, metavar="[NAME]")
def explain(name: tuple[str, ...]) -> None:
    """Explain a curve, a picture, a rule, a metric, an intervention or a finding, and what to do about it.

    Lists every name if none is given. Example: hdi explain hdi/closest_pair
    """
    from hdi_callback.dashboards.names import every_name, look_up
    from hdi_callback.rules import LIMITS, RULES

    if not name:
        for kind, entries in groupby(every_name().values(), lambda entry: entry.kind):
            click.echo(f"{kind}:\n")
            print_rows(
                (entry.text, entry.meaning.removeprefix("Raised when ").partition(". ")[0].rstrip("."))
                for entry in entries
            )
            click.echo()
        click.echo("hdi explain NAME says more, and what to do.")
        return
    entry = look_up(" ".join(name))
    data = {"what it is": entry.meaning}
    if entry.metric:
        judged = [rule.name for rule in RULES if entry.metric in (*rule.needs, *rule.reads)]
        data["judged by"] = ", ".join(judged) or "no rule"
        data["to draw it"] = f'HDICallback(metrics=["{entry.metric}"])'
    elif entry.kind == "intervention":
        data["to use it"] = f"HDICallback(interventions=[{entry.text}(...)])"
    elif entry.kind == "rule":
        rule = next(rule for rule in RULES if rule.name == entry.text)
        limits = [f"{limit}={LIMITS[limit].value:g}: {LIMITS[limit].meaning}" for limit in rule.limits]
        data = {
            "raised when": rule.condition,
            "meaning": rule.meaning,
            "what to do now": rule.action,
            "arguments": rule.code or "none that help",
            "reads": ", ".join((*rule.needs, *rule.reads)),
            "limits": "\n".join(limits) or "none to set",
        }
        if rule.limits:
            data["to set one"] = f'HDICallback(thresholds={{"*": {{"{next(iter(rule.limits))}": VALUE}}}})'
    click.echo(f"{entry.text} ({entry.kind})\n")
    print_rows(data.items())


def _print_result(result: Any, data: Any) -> None:
    """Print a result for people, or plain data for programs, in which numbers that are not finite are null."""
    from hdi_callback.history.lines import plain

    click.echo(json.dumps(plain(data), indent=2) if data else str(result))


def _of_verdict(verdict: Any, alerts: Any) -> dict[str, Any]:
    return {"state": verdict.state, "verdict": verdict.text, "alerts": [asdict(alert) for alert in alerts]}


def _print_remedy(verdict: Any) -> None:
    if verdict.alert is not None:
        click.echo(f"\nWhat to do: {verdict.alert.remedy}")
