"""Readings, alerts and weights of eight trainings, as they were before the rebuild."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.goldens.trainings import FOLDER, INTERVENES, METRICS, OF_HEADS, RULES, TRAININGS, run_new, run_unwatched

SLOW = {"loop_two_ranks", "loop_compiled"}
NEEDS = {"transformers_llama": "transformers"}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TRAININGS]

# Where gradients are accumulated, this trainer read all forwards of a step; now the first counts, as with the others.
FIRST_FORWARD = {"transformers_llama"}
OF_FORWARDS = ("head_co", "head_var", "head_eff", "head_out", "token_")

# Readings two steps apart: the windows of rules are of steps as well as of readings now, and longer than this training.
TOO_SHORT = {"loop_padding"}

# Rules whose findings another rule tells now, and one that is gone.
RENAMED = {"worst pair": {"worst pair", "copied heads"}}
GONE = {"merged scores"}

# To what numbers agree; a history keeps five digits of those of single heads.
TOLERANCE = {"values": 1e-6, "heads": 5e-5}
# Pairs of heads that tie, or nearly: which of them is named is left to rounding.
TIED = 1e-5


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_a_training_reads_alerts_and_ends_as_before(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    for folder in ("watched", "unwatched"):
        (tmp_path / folder).mkdir()
    found = run_new(name, tmp_path / "watched")
    plain = run_unwatched(name, tmp_path / "unwatched")

    last = None  # step of the first intervention: what follows depends on what it wrote
    if name in INTERVENES:
        assert found["actions"], "the intervention has not acted"
        last = golden["actions"][0]  # of the reading; it acts once the step that follows is taken, and says so now
        assert found["actions"][0] in (last, last + 1)
        assert found["weights"] != plain["weights"]
    else:
        assert found["weights"] == plain["weights"], "the monitor has changed the training"
        assert found["loss"] == plain["loss"]
    assert plain["loss"] == pytest.approx(golden["unwatched"]["loss"], abs=1e-5)

    assert [one["step"] for one in found["readings"]] == [one["step"] for one in golden["readings"]]
    differences = [
        line
        for ours, theirs in zip(found["readings"], golden["readings"])
        if last is None or ours["step"] <= last
        for line in _differences(ours, theirs)
        if name not in FIRST_FORWARD or not line.partition(":")[0].rpartition(", ")[2].startswith(OF_FORWARDS)
    ]
    assert not differences, f"{len(differences)} differences:\n" + "\n".join(differences[:40])

    missing, extra = _alert_differences(found["alerts"], golden["alerts"], last)
    assert name in TOO_SHORT or not missing, f"alerts that are not raised any more: {missing}"
    assert not extra, f"alerts that were not raised before: {extra}"


def _differences(ours: dict, theirs: dict) -> list[str]:
    """What was measured before and is another number now, or none."""
    found = []
    if list(ours["layers"]) != list(theirs["layers"]):
        return [f"step {ours['step']}: layers {list(ours['layers'])}, were {list(theirs['layers'])}"]
    for layer, golden in theirs["layers"].items():
        for part in ("values", "heads"):
            now = ours["layers"][layer][part]
            for key, value in golden[part].items():
                if key not in (*METRICS, *OF_HEADS):  # measured then, and not any more
                    continue
                if value is None or (isinstance(value, list) and None in value):
                    continue
                if key.endswith("_pair") and isinstance(value, list) and _ties(golden, key):
                    continue
                if key not in now or not _close(now[key], value, TOLERANCE[part]):
                    found.append(f"step {ours['step']}, {layer}, {key}: {now.get(key, 'nothing')}, was {value}")
    return found


def _close(ours: object, theirs: object, tolerance: float) -> bool:
    if isinstance(theirs, list):
        return isinstance(ours, list) and ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    return ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def _ties(golden: dict, key: str) -> bool:
    """Whether a pair of heads cannot be told: nothing stands out."""
    metric = {"worst_pair": "hdi_worst_pair", "worst_alignment_pair": "hdi_worst_alignment"}.get(key)
    return metric is not None and abs(golden["values"].get(metric, 1.0)) < TIED


def _alert_differences(ours: list, theirs: list, last: int | None) -> tuple[list, list]:
    """Alerts that are missing, and those that are new: one event of several rules is one alert now.

    An alert that says more of what is active already (more heads) may be told as "worse" or not at all.
    """
    begins = [alert for alert in theirs if last is None or alert["step"] <= last]
    missing = [
        (alert["step"], rule, layer, heads)
        for number, alert in enumerate(begins)
        for rule in alert["rules"]
        if rule not in GONE
        for layer, heads in alert["where"].items()
        if not any(_says(one, alert["step"], rule, layer, heads) for one in ours)
        and not any(_same_event(earlier, rule, layer) for earlier in begins[:number])
    ]
    known = {(rule, layer) for alert in theirs for rule in alert["rules"] for layer in alert["where"]}
    extra = [
        (alert["step"], alert["rules"][0], list(alert["where"]))
        for alert in ours
        if (last is None or alert["step"] <= last)
        and alert["rules"][0] in RULES
        and not any((alert["rules"][0], layer) in known for layer in alert["where"])
    ]
    return missing, extra


def _says(alert: dict, step: int, rule: str, layer: str, heads: list[int]) -> bool:
    where = alert["where"].get(layer)
    # No heads: the whole layer.
    return (
        alert["step"] == step
        and not RENAMED.get(rule, {rule}).isdisjoint(alert["rules"])
        and where is not None
        and (not where or not heads or set(heads) <= set(where))
    )


def _same_event(alert: dict, rule: str, layer: str) -> bool:
    return rule in alert["rules"] and layer in alert["where"]
