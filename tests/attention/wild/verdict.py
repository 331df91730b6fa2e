"""Hold what the package says of a module by hand against what is true of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback import HDICallback, HeadDiversityMonitor, find_attention
from hdi_callback.attention.layer.heads import AttentionLayer
from hdi_callback.errors import UnsupportedAttentionError, UnsupportedAttentionWarning
from tests.attention.wild.proof import first_tensor, make_inputs, randomize, run
from tests.attention.wild.truth import Case, Core, weight_of

WAYS = ("model", "forward", "training")
RIGHT, REFUSED, UNTRUE, PART, MISSED, WRONG = "right", "refused", "refused, untrue", "half read", "missed", "wrong"
_NOT_RUN = "it could not be run with synthetic inputs"
VERDICTS = (RIGHT, REFUSED, UNTRUE, PART, MISSED, WRONG)


@dataclass(frozen=True)
class Verdict:
    """How a case was read in one way, and why."""

    name: str
    way: str
    verdict: str
    reason: str = ""


class Holder(nn.Module):
    """A model around a module by hand."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        block = randomize(case.make())
        # What is true is read from one that is as it was written: not quantised, not parametrised.
        self.written = (randomize(case.make()),)
        converted = None if case.convert is None else case.convert(block)
        self.block = block if converted is None else converted

    def forward(self, *inputs: Tensor) -> Any:
        return run(self.case, self.block, list(inputs))


def judge(case: Case, way: str, folder: Path | None = None) -> Verdict:
    """Let the package read a case in one way, and judge what it says."""
    holder = Holder(case)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        try:
            layers = _read(case, holder, way, folder)
        except Exception as error:
            return Verdict(case.name, way, WRONG, f"it ends with {type(error).__name__}: {error}")
    refusals = [str(one.message) for one in reported if issubclass(one.category, UnsupportedAttentionWarning)]
    if way == "model":  # which is true, and the two other ways must say more
        reported_all = {_reason(one) for one in refusals}
        if reported_all and not layers and all(_NOT_RUN in one for one in reported_all):
            return Verdict(case.name, way, REFUSED, next(iter(reported_all)))
    return Verdict(case.name, way, *verdict_of(case, holder.written[0], layers, refusals))


def _read(case: Case, holder: Holder, way: str, folder: Path | None) -> Sequence[AttentionLayer]:
    inputs = make_inputs(case, case.cast)
    if any(parameter.is_meta for parameter in holder.parameters()):
        inputs = [one.to("meta") for one in inputs]
    if way == "model":
        return find_attention(holder)
    if way == "forward":
        return find_attention(holder, forward=lambda: holder(*inputs))
    if any(one.is_meta for one in inputs):  # which no trainer moves to its device
        with HeadDiversityMonitor(holder) as monitor:
            monitor.arm()
            holder(*inputs)
            monitor.measure(0)
            return monitor.layers
    return _trained(holder, inputs, folder)


def _trained(holder: Holder, inputs: list[Tensor], folder: Path | None) -> Sequence[AttentionLayer]:
    import lightning as L

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.holder, self.shift = holder, nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            answer = first_tensor(self.holder(*inputs))
            return answer.float().square().mean() + self.shift

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad and not p.is_meta], lr=0.0)

    callback = HDICallback(every_n_steps=1, history=False, alerts=None)
    trainer = L.Trainer(
        max_steps=3, accelerator="cpu", logger=False, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.zeros(6, 1), batch_size=2))
    assert callback.monitor is not None
    return callback.monitor.layers


def verdict_of(
    case: Case, block: nn.Module, layers: Sequence[AttentionLayer], refusals: Sequence[str]
) -> tuple[str, str]:
    """Judge claims and refusals."""
    reported = " | ".join(_reason(one) for one in refusals)
    if case.none:
        claimed = [layer.name for layer in layers]
        return (WRONG, f"claims {claimed}, and no softmax runs over tokens") if claimed else (RIGHT, reported)
    if case.refused:
        if layers:
            return WRONG, f"claims {[layer.kind for layer in layers]}"
        return _of_refusal(reported, case.refused)
    left = list(layers)
    worst: tuple[str, str] = (RIGHT, "")
    if len(left) > 1 and all(layer.num_heads == 1 for layer in left):
        keys = [weight_of(core.key, block) for core in case.cores]
        rows = torch.cat([key.flatten(0, 1).float() for key in keys if key is not None])
        if all(_is_part(layer.weight("key").detach().float().flatten(0, 1), rows) for layer in left):
            return PART, f"{len(left)} attentions of one head, which are the heads of one"
    for core in case.cores:
        compared = [(*_compare(core, block, layer), layer) for layer in left]
        found = min(compared, key=lambda one: VERDICTS.index(one[0]), default=None)
        if found is not None and (found[0] in (RIGHT, REFUSED, PART) or len(left) >= len(case.cores)):
            left.remove(found[2])
            verdict = found[:2]
        elif reported:
            verdict = _of_refusal(reported, case.may_refuse)
        else:
            verdict = (MISSED, "nothing is said")
        worst = max(worst, verdict, key=lambda one: VERDICTS.index(one[0]))
    if left:
        worst = (WRONG, f"{left[0].kind}: {_compare(case.cores[0], block, left[0])[1]}")
    return worst


def _of_refusal(reported: str, reasons: str) -> tuple[str, str]:
    if not reported:
        return MISSED, "nothing is said"
    return (REFUSED if reasons and re.search(reasons, reported, re.IGNORECASE) else UNTRUE), reported


def _reason(message: str) -> str:
    return message.split(": ", 1)[-1].split(" Describe it with")[0].split(". ")[0][:200]


def _compare(core: Core, block: nn.Module, layer: AttentionLayer) -> tuple[str, str]:
    """Compare a claim with a core, head by head; heads may be named in another order, the same for all roles."""
    if layer.num_heads != core.heads:
        return WRONG, f"{layer.num_heads} heads, not {core.heads}"
    orders: dict[str, list[int]] = {}
    verdict = (RIGHT, "")
    for role in ("query", "key", "value", "output"):
        truth = weight_of(getattr(core, role), block)
        claimed = _claimed(layer, role)
        if role in core.free:
            continue
        if truth is None or claimed is None:
            if truth is not None:
                said = getattr(layer, "left_out", "")
                if role != "output":
                    verdict = (REFUSED, f"without {said}") if said else (PART, f"no {role}")
                continue
            if claimed is not None:
                return WRONG, f"claims a weight of the {role}, which is none"
            continue
        order, why = _matched(truth.float(), claimed.float(), is_output=role == "output")
        if order is None:
            return WRONG, f"{role}: {why}"
        orders[role] = order
    heads = orders.get("query") or orders.get("output") or list(range(core.heads))
    if "output" in orders and orders["output"] != heads:
        return WRONG, "the heads of queries and outputs come in different orders"
    for role in ("key", "value"):
        if role in orders:
            count = len(orders[role])
            reported = [orders[role][head // (core.heads // count)] for head in range(core.heads)]
            true = [core.group(head, count) for head in heads]
            if reported != true:
                return WRONG, f"heads go with the {role} heads {true}, reported are {reported}"
    return verdict


def _claimed(layer: AttentionLayer, role: Any) -> Tensor | None:
    try:
        return layer.weight(role).detach()
    except UnsupportedAttentionError:
        return None
    except RuntimeError:
        return torch.zeros(1, 1, 1)  # claimed, and cannot be read


def _matched(truth: Tensor, claimed: Tensor, is_output: bool) -> tuple[list[int] | None, str]:
    """Find the true head of each claimed one: their rows are the same, in any order, but for a common factor."""
    if truth.shape[0] != claimed.shape[0]:
        return None, f"{claimed.shape[0]} heads, not {truth.shape[0]}"
    if truth.shape[2] != claimed.shape[2]:
        return None, f"weights of {claimed.shape[2]} features, not {truth.shape[2]}"
    if claimed.is_meta:  # there are shapes and no values
        return (list(range(len(truth))), "") if claimed.shape == truth.shape else (None, "weights of another shape")
    order = []
    for head in claimed:
        same = [i for i, true in enumerate(truth) if _same_rows(true, head)]
        if not same:
            missing = [i for i, true in enumerate(truth) if _is_part(head, true)]
            return None, "some rows of a head are missing" if missing else "rows of several heads, or of another role"
        order.append(same[0])
    return (order, "") if len(set(order)) == len(order) else (None, "one head is named twice")


def _same_rows(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    distance = torch.cdist(one, other)
    scale = 1e-2 * float(one.norm(dim=-1).mean())  # int8 rounds
    return bool((distance.min(0).values < scale).all() and (distance.min(1).values < scale).all())


def _is_part(part: Tensor, whole: Tensor) -> bool:
    return bool((torch.cdist(part, whole).min(1).values < 1e-3).all())
