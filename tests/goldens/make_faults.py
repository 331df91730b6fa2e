"""Write faults.json.gz: trainings with faults and healthy ones, with what the sixteen rules read of them, and said.

It runs in a checkout of commit 1cb7c1a, which held the experiment on faults and the rules as they were tuned:

    PYTHONPATH=. OMP_NUM_THREADS=1 python .../tests/goldens/make_faults.py faults.json.gz

Seven minutes on one core. A run is ``{"kind", "base", "seed", "is_healthy", "facts", "records", "alerts"}``; a record
is ``[step, loss, {place of the layer: [values, heads, matrices]}]``, with matrices below the diagonal, and only where a
pair comes close; an alert is ``[step, place of the layer, rule, level, heads]``.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

from tests.experiments.faults import run as runs
from tests.experiments.faults.further import EVERY_KIND, GOOD
from tests.experiments.faults.further import plan as further_plan
from tests.experiments.faults.plan import HEALTHY, Job, plan
from tests.experiments.faults.trainings import BASES, PROVOKED

RULES = {
    "mean alignment", "worst pair", "tied heads", "merged scores", "weights not finite", "weight jump", "frozen heads",
    "rounded away", "vanishing weights", "sharp from the start", "flat attention", "logit growth", "sudden sharpening",
    "sudden flattening", "later tokens", "one key", "tokens alike",
}  # fmt: skip
TWICE = {
    "two heads copied", "queries merge", "keys merge", "two heads merge", "all heads begin as copies",
    "keys share one direction", "tokens become one", "mask left out", "rate 30 times too high, for good",
    "a head is frozen", "keys and queries of all heads merge", "NaN in the values of a head",
}  # fmt: skip
VALUES = (
    "hdi_alignment", "hdi_energy_alignment", "hdi_worst_alignment", "hdi_energy_worst_alignment", "hdi_worst_pair",
    "hdi_effective_heads", "circuit_qk_worst", "circuit_qk_norm", "attention_entropy", "attention_logit",
    "attention_keys", "attention_ahead", "token_cosine", "query_norm", "key_norm", "head_movement_min",
    "head_unchanged", "weights_not_finite", "outputs_not_finite",
)  # fmt: skip
HEADS = (
    "worst_pair", "worst_alignment_pair", "energy_worst_alignment_pair", "rank", "nearest", "nearest_overlap",
    "circuit_qk_worst_pair", "circuit_qk_norm", "circuit_ov_norm", "head_movement", "head_unchanged", "attention_logit",
    "attention_ahead", "weights_not_finite", "outputs_not_finite",
)  # fmt: skip
OF_THE_FIRST = ("head_norm", "flatness")


def jobs() -> list[Job]:
    faulty = [job for job in plan("looked-at") if job.kind != HEALTHY]
    faulty += [job for job in further_plan("looked-at") if job.kind not in GOOD]
    faulty += [job for job in plan("fresh", rounds=1, healthy=0) if job.kind in TWICE]
    healthy = [Job(HEALTHY, base, 700_000 + place) for place, base in enumerate(BASES)]
    healthy += [Job(HEALTHY, base, 700_100 + place) for place, base in enumerate(PROVOKED) if "encoder" not in base]
    return faulty + healthy + [job for job in further_plan("looked-at") if job.kind in GOOD]


def short(value: Any) -> Any:
    """Five digits; nine beside 1, where *equal heads* looks."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.9g}") if abs(1 - value) < 1e-3 else float(f"{value:.5g}")


def below_diagonal(matrix: Any) -> list[float | None]:
    return [short(float(matrix[h, g])) for h in range(len(matrix)) for g in range(h)]


def layer_of(layer: Any, is_first: bool, trains: bool) -> list[Any]:
    values = {name: short(float(layer.values[name])) for name in VALUES if name in layer.values}
    names = (*HEADS, *OF_THE_FIRST) if is_first else HEADS
    heads = {name: [short(one) for one in layer.arrays[name]] for name in names if name in layer.arrays}
    wanted = {"overlap": 0.3, "pair_alignment": 0.3} if layer.values.get("hdi_worst_alignment", 0) >= 0.3 else {}
    if layer.values.get("hdi_worst_pair", 0) > 0.999:
        wanted["energy_pair_alignment"] = 0.3
    if layer.values.get("circuit_qk_worst", 0) >= 0.5:
        wanted["circuit_qk"] = 0.5
    matrices = {name: below_diagonal(layer.matrices[name]) for name in wanted if name in layer.matrices}
    return [{**values, "trains": float(trains)}, heads, matrices]


def main(path: Path) -> None:
    kept: dict[str, list[Any]] = {}

    class Keeping(runs.Session):
        def after_step(self, *args: Any, **options: Any) -> Any:
            return self.keep(super().after_step(*args, **options))

        def flush(self, *args: Any, **options: Any) -> Any:
            return self.keep(super().flush(*args, **options))

        def keep(self, results: Any) -> Any:
            for result in results:
                record = result.record
                frozen = record.frozen or ()
                layers = {
                    name: layer_of(layer, not kept["records"], name not in frozen)
                    for name, layer in record.layers.items()
                }
                kept["records"].append([record.step, layers])
                kept["alerts"] += [
                    [alert.step, alert.layer, alert.rule, alert.level, list(alert.finding.heads)]
                    for alert in result.alerts
                    if alert.rule in RULES and not alert.is_resolved
                ]
            return results

    runs.Session = Keeping
    stored = []
    for job in jobs():
        kept.update(records=[], alerts=[])
        result = runs.train(job, fault=EVERY_KIND.get(job.kind))
        names = [one["name"] for one in result["facts"]]
        if not names:
            continue  # found at the first forward alone
        known = (
            "name",
            "num_heads",
            "num_key_heads",
            "head_dim",
            "value_dim",
            "width",
            "normed",
            "trains",
            "all_train",
        )
        losses = dict(enumerate(result["losses"]))
        records = [
            [step, losses.get(step), {names.index(name): layer for name, layer in layers.items()}]
            for step, layers in kept["records"]
        ]
        stored.append({
            "kind": job.kind, "base": job.base, "seed": job.seed,
            "is_healthy": job.kind == HEALTHY or job.kind in GOOD,
            "facts": [{name: one[name] for name in known if name in one} for one in result["facts"]],
            "records": records,
            "alerts": [[step, names.index(layer), *others] for step, layer, *others in kept["alerts"]],
        })  # fmt: skip
        print(job, len(kept["alerts"]), flush=True)  # noqa: T201
    path.write_bytes(gzip.compress(json.dumps(stored, separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
