"""Write the gallery of alerts from recorded trainings: ``python docs/gallery.py``; a test compares the page."""

from __future__ import annotations

import sys
from pathlib import Path

from hdi_callback.dashboards.pictures import draw_evidence
from hdi_callback.record import Alert
from hdi_callback.rules import RULES, Alerts

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # for the recorded trainings

from tests.rules.test_replay import records, stored  # noqa: E402

OPENING = """# A gallery of alerts

Each alert once, from the recorded trainings of `tests/rules/faults.json.gz`: what was done to the training, what the
alert says, and the picture that TensorBoard, W&B and the report show with it. The accused number is red, the other
layers are grey; the dotted line is where it began, the triangle the alert. Recorded trainings have no patterns of
attention, which are drawn below these panels in a run of yours. Made by `python docs/gallery.py`.
"""


def first_alerts() -> dict[str, tuple[str, Alert, list]]:
    """Give rule -> fault, alert and readings of the first training that raised it, after step 0 if any."""
    found = {}
    for run in sorted(stored(), key=lambda run: run["is_healthy"]):
        engine, read = Alerts(layers=run["facts"]), []
        for record in records(run):
            read.append(record)
            for alert in engine.judge(record):
                before = None if alert.rule not in found else found[alert.rule][1]
                is_plainer = before is not None and alert.level != "notice" and before.level == "notice"
                if (before is None or is_plainer or (before.step == 0 and alert.step > 0)) and not alert.is_over:
                    found[alert.rule] = run["kind"], alert, read
    return found


def page(alerts: dict[str, tuple[str, Alert, list]]) -> str:
    """Give the text of the page."""
    parts = [OPENING]
    for rule in RULES:
        parts.append(f"## {rule.name}\n")
        if rule.name not in alerts:
            parts.append(f"No recorded training raises it. It is raised when {rule.condition}.\n")
            continue
        fault, alert, _ = alerts[rule.name]
        parts.append(f"**{fault}**: {alert.message[:1].upper()}{alert.message[1:]}.\n")
        action = alert.action.removesuffix(".")
        parts.append(f"*What to do now*: {action[:1].lower()}{action[1:]}.\n")
        if (FOLDER / picture(rule.name)).exists():
            parts.append(f"![{rule.name}: the accused number over the steps]({picture(rule.name)})\n")
    return "\n".join(parts)


def picture(rule: str) -> str:
    """Give the path of a picture from the page."""
    return f"images/alerts/{rule.replace(' ', '_')}.png"


if __name__ == "__main__":
    alerts = first_alerts()
    (FOLDER / "images" / "alerts").mkdir(parents=True, exist_ok=True)
    for name, (_, alert, read) in alerts.items():
        figure = draw_evidence(alert, read)
        if figure is not None:
            figure.savefig(FOLDER / picture(name), dpi=80, metadata={"Software": None})
    (FOLDER / "gallery.md").write_text(page(alerts), encoding="utf-8")
