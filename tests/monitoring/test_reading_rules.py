"""Rules over circuits, attention rows, tokens, contributions and movement: on curves, and on models that are broken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import (
    AttendAlike,
    AttentionSink,
    DeadHeads,
    EntropyCollapse,
    FewerKeys,
    FlatAttention,
    FrozenHeads,
    InputsLoseRank,
    LaterTokens,
    LogitGrowth,
    MergedMessages,
    MergedScores,
    NoContribution,
    NonFinite,
    OneKey,
    RoundedAway,
    SharpFromStart,
    SuddenShrink,
    TokensAlike,
    UntrainedWeights,
    VanishingWeights,
    WeightJump,
    default_rules,
)
from tests.experiments.collapse.models import Attention, Shape

METRICS = ["hdi", "circuit_qk", "circuit_ov", "attention_alike", "attention_logit", "weights_not_finite",
           "outputs_not_finite", "head_contribution_min", "head_movement_min", "token_cosine"]  # fmt: skip


def judge(rule, records, *, pretrained=False):
    alerts = Alerts([rule], [{"name": "attn", "num_heads": 8}], pretrained=pretrained)
    return [alert for item in records for alert in alerts.judge(item)]


def curve(metric, values, arrays=None):
    return [
        Record(10 * place, {"attn": LayerRecord({metric: value}, {} if arrays is None else arrays(value))})
        for place, value in enumerate(values)
    ]


class Layer(nn.Module):
    """Grouped-query attention behind a norm, whose heads can be written."""

    def __init__(self, heads=8, key_heads=4, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention(Shape(heads=heads, key_heads=key_heads, width=width))
        self.x = torch.randn(4, 24, width)

    def forward(self):
        return self.attn(self.x)


def heads(layer: Layer, name: str) -> torch.Tensor:
    projection = getattr(layer.attn, f"{name}_proj")
    if name == "out":
        return projection.weight.data.T.unflatten(0, (layer.attn.num_heads, -1))
    return projection.weight.data.unflatten(0, (-1, projection.weight.shape[0] // {"q": 8}.get(name, 4)))


def readings(layer: Layer, breaks, steps=(0, 10, 20, 30)) -> list[Record]:
    """Measure a layer at some steps; `breaks` is called after the first."""
    records = []
    with HeadDiversityMonitor(layer, metrics=METRICS) as monitor:
        for step in steps:
            monitor.arm()
            layer()
            records.append(monitor.measure(step).record())
            with torch.no_grad():
                breaks(layer)
    return records


def move(layer: Layer) -> None:
    for parameter in layer.attn.parameters():
        parameter += 1e-3 * torch.randn_like(parameter)


# --- circuits and rows


def test_query_heads_that_merge_within_a_group_are_reported():
    def merge(layer):
        move(layer)
        q = heads(layer, "q")
        q[1] = q[0] + 0.01 * q[0].std() * torch.randn_like(q[0])

    (alert,) = judge(MergedScores(), readings(Layer(), merge))
    assert alert.finding.groups == ((0, 1),)
    assert "heads 0 and 1 are scoring alike (largest cosine of QK circuits 1.00)" in alert.message
    assert 'DiversityPenalty(measure="circuit")' in alert.message


def test_merged_value_and_output_heads_are_reported_and_again_with_a_second_group():
    calls = []

    def merge(layer):
        calls.append(0)
        out = heads(layer, "out")
        out[1] = out[0] + 1e-4 * torch.randn_like(out[0])
        if len(calls) > 7:
            out[5] = out[4] + 1e-4 * torch.randn_like(out[4])

    alerts = judge(MergedMessages(), readings(Layer(), merge, steps=range(0, 90, 10)))
    assert [(alert.step, alert.finding.groups) for alert in alerts] == [(10, ((0, 1),)), (80, ((0, 1), (4, 5)))]


def test_outputs_initialised_at_zero_that_first_move_alike_are_not_reported():
    values = [0.99, 0.97, 0.95, 0.91, 0.6, 0.3, 0.2, 0.2]
    assert judge(MergedMessages(), curve("circuit_ov_worst", values)) == []


def test_heads_with_small_initial_weights_are_reported_as_merged_only_if_their_difference_shrinks():
    layer, calls, circuits = Layer(), [], []
    torch.manual_seed(3)
    for parameter in layer.attn.parameters():
        parameter.data *= 0.1
    first, one, other = torch.randn(8), torch.randn(64), torch.randn(64)

    def learn(layer):
        calls.append(0)
        q, k = heads(layer, "q"), heads(layer, "k")
        circuits.append(torch.stack([q[h].T @ k[h // 2] for h in range(8)]).flatten(1))
        if len(calls) < 5:
            q += 0.02 * first[:, None] * one + 0.01 * torch.randn_like(q)
            k += 0.02 * first[:, None] * other + 0.01 * torch.randn_like(k)
        else:
            q[3] += 0.99 * (q[2] - q[3])

    (alert,) = judge(MergedScores(), readings(layer, learn, steps=range(0, 70, 10)))
    assert (alert.step, alert.finding.groups) == (50, ((2, 3),))
    began, now = circuits[0], circuits[4]  # of the readings at steps 0 and 40, by hand
    assert torch.cosine_similarity(now[2], now[3], dim=0) > 0.9
    assert (now[2] - now[3]).norm() > (began[2] - began[3]).norm()


def test_pretrained_heads_with_equal_scores_are_not_reported():
    layer = Layer()
    q = heads(layer, "q")
    q[1] = q[0]
    records = readings(layer, lambda layer: None)
    assert judge(MergedScores(), records, pretrained=True) == []
    assert len(judge(MergedScores(), records)) == 1


def test_heads_that_attend_alike_are_reported_with_their_group():
    def sharpen(layer):
        q = heads(layer, "q")
        q[1] = q[0]
        q *= 3

    (alert,) = judge(AttendAlike(), readings(Layer(), sharpen))
    assert alert.finding.groups == ((0, 1),)


# --- levels


@pytest.mark.parametrize(
    ("rule", "metric", "healthy", "broken", "over", "reported"),
    [
        (EntropyCollapse(), "attention_entropy", [0.9, 0.8, 0.6, 0.05], 0.005, 0.4, 40),
        (LogitGrowth(), "attention_logit", [1.0, 3.0, 8.0, 20.0], 90.0, 10.0, 40),
        (TokensAlike(), "token_cosine", [0.0, 0.1, 0.2, 0.98], 0.999, 0.3, 60),
    ],
)
def test_a_metric_beyond_its_limit_is_reported_once_and_resolved_below_its_hysteresis(
    rule, metric, healthy, broken, over, reported
):
    alerts = judge(rule, curve(metric, [*healthy, broken, broken, broken, over]))
    assert [(alert.step, alert.is_resolved) for alert in alerts] == [(reported, False), (70, True)]
    assert alerts[0].finding.metric == metric


def test_tokens_that_are_nearly_equal_for_a_few_early_readings_raise_no_alert():
    of_healthy = [  # plain SGD at a high rate
        [0.6184, 0.9035, 0.9711, 0.9942, 0.9952, 0.9943, 0.989, 0.9206, 0.9174],
        [0.3497, 0.8661, 0.9875, 0.9937, 0.9972, 0.997, 0.9957, 0.9856, 0.9367],
        [0.3497, 0.8661, 0.9875, 0.9985, 0.9985, 0.997, 0.9957, 0.9856, 0.9367],
    ]
    for values in of_healthy:
        assert judge(TokensAlike(), curve("token_cosine", values)) == []
    (alert,) = judge(TokensAlike(), curve("token_cosine", [0.6, 0.98, 0.9984, 0.999, 0.9991, 0.9992]))
    assert (alert.step, alert.finding.since) == (40, 20)
    assert "nearly identical: mean cosine (0.999, 0.989 at the start)" in alert.message


@pytest.mark.parametrize(
    ("rule", "metric", "value"),
    [(EntropyCollapse(), "attention_entropy", 0.005), (LogitGrowth(), "attention_logit", 90.0),
     (TokensAlike(), "token_cosine", 0.999)],
)  # fmt: skip
def test_a_value_that_a_run_has_had_from_its_start_raises_no_alert(rule, metric, value):
    assert judge(rule, curve(metric, [value] * 20)) == []


def test_an_attention_sink_is_reported_only_if_all_heads_have_it():
    def arrays(value):
        return {"attention_sink": [value, value if value < 0.95 else 0.3]}

    assert judge(AttentionSink(), curve("attention_sink", [0.2, 0.3, 0.96], arrays)) == []
    both = curve("attention_sink", [0.2, 0.3, 0.96], lambda value: {"attention_sink": [value, value]})
    (alert,) = judge(AttentionSink(), both)
    assert "all heads attend to one position: share of attention (0.96, 0.25 at the start)" in alert.message


def test_heads_with_large_scores_are_named():
    records = curve("attention_logit", [1.0, 2.0, 90.0], lambda value: {"attention_logit": [value, 1.0, value]})
    (alert,) = judge(LogitGrowth(), records)
    assert alert.finding.heads == (0, 2)
    assert "QKClip" in alert.message


# --- silence


def test_heads_whose_values_vanish_are_reported_as_without_contribution():
    def kill(layer):
        heads(layer, "v")[2] *= 1e-9

    (alert,) = judge(NoContribution(), readings(Layer(key_heads=4), kill))
    assert alert.finding.heads == (4, 5)  # both query heads of the group
    assert alert.step == 10


def test_heads_initialised_without_an_output_are_reported_after_twenty_readings():
    values = {"head_contribution_min": 0.0}
    record = [Record(step, {"attn": LayerRecord(values, {"head_contribution": [0.0, 0.7]})}) for step in range(25)]
    assert [alert.step for alert in judge(NoContribution(), record)] == [20]
    assert judge(NoContribution(), record, pretrained=True) == []


def test_a_head_that_does_not_move_while_others_do_is_reported_as_frozen():
    layer = Layer(key_heads=8)
    held = {name: heads_of(layer, name)[3].clone() for name in ("q", "k", "v")}
    out = heads(layer, "out")[3].clone()

    def step(layer):
        move(layer)
        for name, weight in held.items():
            heads_of(layer, name)[3] = weight
        heads(layer, "out")[3] = out

    (alert,) = judge(FrozenHeads(), readings(layer, step, steps=range(0, 60, 10)))
    assert (alert.step, alert.finding.heads) == (30, (3,))


def heads_of(layer: Layer, name: str) -> torch.Tensor:
    return getattr(layer.attn, f"{name}_proj").weight.data.unflatten(0, (8, -1))


def test_a_layer_that_does_not_move_is_reported_if_it_should_train_and_others_move():
    def row(moves):
        return LayerRecord({"head_movement_min": min(moves)}, {"head_movement": moves})

    records = [Record(step, {"still": row([0.0, 0.0]), "moves": row([0.1, 0.2])}) for step in range(5)]
    resting = [Record(step, {"still": row([0.0, 0.0]), "moves": row([0.0, 0.0])}) for step in range(5)]
    for trains, items, reported in ((True, records, ["still"]), (False, records, []), (True, resting, [])):
        facts = [{"name": name, "trains": trains} for name in ("still", "moves")]
        alerts = Alerts([FrozenHeads()], facts)
        assert [alert.layer for item in items for alert in alerts.judge(item)] == reported


@pytest.mark.parametrize(
    ("rule", "still"),
    [
        (FrozenHeads(), {"head_movement_min": 0.0, "head_unchanged": 1.0}),
        (RoundedAway(), {"head_movement_min": 1e-6, "head_unchanged": 0.95}),
    ],
    ids=["frozen heads", "rounded away"],
)
@pytest.mark.parametrize(
    ("has_stood", "reported"),
    [
        ("m.ss.s", [(5, False, 2)]),  # the third that is known; since the first of them
        ("mm.ss", []),
        ("mss.ms", []),
        ("msss..ssm", [(3, False, 1), (8, True, 1)]),  # reported once, and resolved once it moves
        ("msss.m", [(3, False, 1), (5, True, 1)]),
        ("msss...", [(3, False, 1)]),
        ("m......", []),
    ],
)
def test_an_unknown_movement_after_a_resumption_neither_starts_nor_ends_an_alert(rule, still, has_stood, reported):
    """Each reading of which it is not known (`.`) comes first after a resumption."""

    def layer(kind, heads):
        values = {"s": still, "m": {"head_movement_min": 0.1, "head_unchanged": 0.0}, ".": {}}[kind]
        names = {"head_movement": "head_movement_min", "head_unchanged": "head_unchanged"}
        return LayerRecord(values, {name: [values.get(value)] * heads for name, value in names.items()})

    facts = [{"name": name, "num_heads": 2} for name in ("attn", "moves")]
    alerts, raised = Alerts([rule], facts, pretrained=False), []
    for step, kind in enumerate(has_stood):
        if kind == ".":
            state, alerts = alerts.state_dict(), Alerts([rule], facts, pretrained=False)
            alerts.load_state_dict(state)
        layers = {"attn": layer(kind, 2), "moves": layer("." if kind == "." else "m", 2)}
        raised += alerts.judge(Record(10 * step, layers))
    found = [(alert.step // 10, alert.is_resolved, (alert.finding.since or 0) // 10) for alert in raised]
    assert found == reported
    assert {alert.layer for alert in raised} <= {"attn"}


def moving(*readings):
    return [
        Record(10 * place, {"attn": LayerRecord({"head_movement_min": min(moves)}, {"head_movement": list(moves)})})
        for place, moves in enumerate(readings)
    ]


def test_single_heads_whose_weights_jump_are_named_if_the_others_move_as_before():
    steady = [(0.01, 0.012, 0.008, 0.011)] * 6
    (alert,) = asked([WeightJump()], moving(*steady, (0.01, 0.9, 0.009, 0.4)))
    assert (alert.step, alert.finding.heads, alert.finding.value) == (60, (1, 3), 0.9)
    assert alert.finding.what.startswith("the weights of heads 1 and 3 have changed by 90 % since")
    (whole,) = asked([WeightJump()], moving(*steady, (0.1, 0.9, 0.2, 0.4)))
    assert whole.finding.heads == ()
    assert asked([WeightJump()], moving(*steady, (0.01, 0.038, 0.009, 0.01))) == [], "below a twentieth"
    faster = [tuple(5 * move for move in row) for row in steady]
    assert asked([WeightJump()], moving(*faster, (0.05, 0.15, 0.05, 0.05))) == [], "below four times"
    still = [(0.0, 0.012, 0.008, 0.011)] * 6
    assert asked([WeightJump()], moving(*still, (0.01, 0.9, 0.009, 0.4))) == [], "a head is frozen: nothing to compare"


def test_heads_rewritten_by_an_intervention_are_not_reported_as_a_jump():
    records = moving(*[(0.01, 0.012)] * 6, (0.01, 0.9))
    alerts = Alerts([WeightJump()], [{"name": "attn", "num_heads": 2}], pretrained=False)
    for record in records[:-1]:
        alerts.judge(record)
    alerts.rewrite("attn", [1])
    assert alerts.judge(records[-1]) == []


def norms(queries, keys=None):
    return [
        Record(10 * place, {"attn": LayerRecord({"query_norm": query, "key_norm": key})})
        for place, (query, key) in enumerate(zip(queries, keys or queries))
    ]


def test_queries_or_keys_that_shrink_suddenly_for_good_are_reported_until_halfway_back():
    steady = [2.0, 2.1, 2.2, 2.1, 2.3, 2.4]
    (alert,) = asked([SuddenShrink()], norms([*steady, 0.4, 0.5]))
    assert (alert.step, alert.finding.since, alert.finding.metric) == (70, 60, "query_norm")
    (of_keys,) = asked([SuddenShrink()], norms([*steady, 2.4, 2.4], [*steady, 0.4, 0.5]))
    assert of_keys.finding.metric == "key_norm"
    over = asked([SuddenShrink()], norms([*steady, 0.4, 0.5, 1.3, 1.5]))
    assert [(one.step, one.is_resolved) for one in over] == [(70, False), (90, True)]
    assert asked([SuddenShrink()], norms([*steady, 0.4, 2.2])) == [], "one batch"
    assert asked([SuddenShrink()], norms([4 * 0.8**place for place in range(20)])) == [], "decay"
    assert asked([SuddenShrink()], norms([0.0] * 9)) == [], "keys that begin at zero"


def test_queries_shrunk_by_an_intervention_are_not_reported():
    alerts = Alerts([SuddenShrink()], [{"name": "attn", "num_heads": 2}], pretrained=False)
    news = []
    for place, record in enumerate(norms([2.0] * 6 + [0.4, 0.4])):
        if place == 6:
            alerts.rewrite("attn", [0])
        news += alerts.judge(record)
    assert news == []


def test_a_sudden_fall_of_noisy_first_layer_input_rank_is_reported_and_a_slow_one_is_not():
    def reported(values, layer="first"):
        facts = [{"name": "first", "num_heads": 2, "is_first": True}, {"name": "second", "num_heads": 2}]
        alerts = Alerts([InputsLoseRank()], facts, pretrained=False)
        records = [Record(10 * at, {layer: LayerRecord({"token_rank": value})}) for at, value in enumerate(values)]
        return [(one.step, one.finding.since) for record in records for one in alerts.judge(record)]

    noisy, fallen = [18.4, 19.5, 18.9, 18.4, 20.3, 19.1, 18.6, 17.1], [12.3, 12.2, 12.0, 12.5]
    assert reported([*noisy, *fallen]) == [(110, 80)]
    assert reported([*noisy, *fallen], layer="second") == [], "the inputs of a later layer depend on training"
    assert reported([*noisy, 16.5, 15.0, 13.5, 12.0]) == [], "it goes on falling"
    assert reported([*noisy, 12.3, 12.2, 18.0, 12.5]) == [], "it came back"
    assert reported([21.0, 20.0, 19.0, 18.0, 17.0, 16.0, 15.0, *fallen]) == [], "it had been falling"


def test_a_weight_jump_is_compared_with_the_known_movements_before_a_resumption():
    moves = [0.01] * 5 + [None, 0.5, None, 0.01]
    records = [Record(step, {"attn": LayerRecord({} if move is None else {"head_movement_min": move})})
               for step, move in enumerate(moves)]  # fmt: skip
    assert [(one.step, one.is_resolved) for one in judge(WeightJump(), records)] == [(6, False), (8, True)]


@pytest.mark.parametrize("name", ["q", "v", "out"])
def test_nan_weights_are_critical_in_every_role(name):
    def spoil(layer):
        heads(layer, name)[-1, 0, 0] = math.nan

    (alert,) = judge(NonFinite(), readings(Layer(), spoil))
    assert alert.level == "critical"
    assert set(alert.finding.heads) >= {7}
    assert "they did not at step 0" in alert.message


# --- healthy layers, and rules that are not measured


def test_a_layer_in_healthy_training_raises_no_alert():
    layer = Layer()
    alerts = Alerts(default_rules(), [{"name": "attn", "num_heads": 8}])
    reported = [alert for item in readings(layer, move, steps=range(0, 250, 10)) for alert in alerts.judge(item)]
    assert reported == []


def test_missing_metrics_and_null_values_raise_no_alert():
    alerts = Alerts(default_rules(), [{"name": "attn", "num_heads": 8}])
    assert alerts.judge(Record(0, {"attn": LayerRecord({"hdi": 0.5}, {"rank": [1.0, 1.0]})})) == []
    nothing = [Record(step, {"attn": LayerRecord({"head_movement_min": 0.0, "head_contribution_min": 0.5},
                                                 {"head_movement": [None, 0.0], "head_contribution": [None, 0.5]})})
               for step in range(5)]  # fmt: skip
    assert [alert for item in nothing for alert in alerts.judge(item)] == []


# --- masks, scales, weights that stand still, jump or fade


class Masked(nn.Module):
    """Attention whose mask and scale can be changed as it runs."""

    def __init__(self, mask: str = "causal", scale: float = 1.0, heads: int = 4, width: int = 32):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.scale, self.heads = mask, scale, heads
        self.qkv, self.out_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        for projection in (self.qkv, self.out_proj):
            nn.init.normal_(projection.weight, std=width**-0.5)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        n = x.shape[1]
        visible = {"causal": torch.ones(n, n).tril(), "none": torch.ones(n, n), "self": torch.eye(n)}[self.mask].bool()
        scale = self.scale * q.shape[-1] ** -0.5
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


OF_ALL = ("hdi", "attention_logit", "head_movement_min", "circuit_qk", "circuit_ov", "token_rank")


def watched(
    model, breaks=lambda step, model: None, *, steps=range(0, 60, 10), length=16, metrics=OF_ALL
) -> list[Record]:
    """Read a model that is given other tokens at each reading; `breaks` acts before it."""
    found, generator = [], torch.Generator().manual_seed(1)
    with HeadDiversityMonitor(nn.ModuleDict({"attn": model}), metrics=list(metrics)) as monitor:
        for step in steps:
            with torch.no_grad():
                breaks(step, model)
            monitor.arm()
            model(torch.randn(4, length, 32, generator=generator))
            found.append(monitor.measure(step).record())
    return found


def asked(rules, records, *, pretrained=False):
    facts = [{"name": "attn", "num_heads": 4, "num_key_heads": 4, "head_dim": 8, "width": 32}]
    alerts = Alerts(list(rules), facts, pretrained=pretrained)
    return [alert for item in records for alert in alerts.judge(item)]


def test_attention_ahead_agrees_with_the_softmax_weights_of_later_tokens():
    model = Masked("none").double()
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(3)).double()
    with HeadDiversityMonitor(nn.ModuleDict({"attn": model}), metrics=["hdi", "attention_ahead"]) as monitor:
        monitor.arm()
        model(x)
        layer = monitor.measure(0).record().layers["attn"]
    q, k, _ = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in model.qkv(x).chunk(3, -1))
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    expected = weights.detach().triu(1).sum(-1).mean((0, 2))
    assert layer.arrays["attention_ahead"] == pytest.approx(expected.tolist(), rel=1e-4)
    assert layer.values["attention_ahead"] == pytest.approx(float(expected.max()), rel=1e-4)
    assert layer.values["attention_keys"] == 12


def test_a_lost_causal_mask_is_reported_and_a_model_without_one_is_not():
    def lose(step, model):
        model.mask = "none" if step >= 30 else "causal"

    (alert,) = asked([LaterTokens()], watched(Masked(), lose))
    assert (alert.step, alert.level, alert.finding.heads) == (30, "critical", ())
    assert "which were hidden from it at step 0" in alert.message
    assert asked([LaterTokens()], watched(Masked("none"))) == []
    assert asked([LaterTokens()], watched(Masked("causal"))) == []


def test_a_mask_that_leaves_each_token_only_itself_is_reported_at_step_0():
    rows = ["hdi", "attention_keys"]
    (alert,) = asked([OneKey()], watched(Masked("self"), metrics=rows))
    assert (alert.step, alert.level) == (0, "critical")
    assert asked([OneKey()], watched(Masked("causal"))) == []
    assert asked([OneKey()], watched(Masked(), length=1, metrics=rows)) == [], "there is one token alone"


def test_a_wrong_scale_is_reported_only_at_step_0_of_fresh_weights():
    records = watched(Masked(scale=8.0))
    (alert,) = asked([SharpFromStart()], records)
    assert alert.step == 0
    assert "attention is sharp before anything was learned" in alert.message
    assert asked([SharpFromStart()], records, pretrained=True) == []
    assert asked([SharpFromStart()], watched(Masked())) == []


def test_attention_that_stays_uniform_is_reported_after_fifteen_readings():
    (alert,) = asked([FlatAttention()], watched(Masked(scale=0.01), steps=range(0, 200, 10)))
    assert (alert.step, alert.finding.since) == (140, 0)

    def begin(step, model):
        model.scale = 1.0 if step >= 50 else 0.0

    assert asked([FlatAttention()], watched(Masked(), begin, steps=range(0, 200, 10))) == []


def test_flat_attention_is_not_reported_while_the_scores_grow():
    def entropy(largest):
        values = [{"attention_entropy": 0.9998, "attention_logit": logit} for logit in largest]
        return [Record(10 * place, {"attn": LayerRecord(value)}) for place, value in enumerate(values)]

    learns = [
        0.0,
        0.0,
        0.0,
        0.0,
        0.05,
        0.25,
        0.53,
        0.71,
        0.83,
        0.8,
        0.77,
        0.78,
        0.77,
        0.8,
        0.74,
        0.71,
    ]  # keys began at 0
    assert asked([FlatAttention()], entropy(learns)) == []
    (alert,) = asked([FlatAttention()], entropy([0.1 * value for value in learns]))
    assert "largest score 0.083" in alert.message


def test_flat_attention_from_small_initial_weights_is_a_notice_and_from_a_wrong_scale_a_warning():
    def shrink(step, model):
        if step == 0:
            model.qkv.weight *= 0.05

    steps = range(0, 200, 10)
    (slow,) = asked([FlatAttention()], watched(Masked(), shrink, steps=steps, metrics=[*OF_ALL, "query_norm"]))
    assert slow.level == "notice"
    assert "as queries and keys are small" in slow.message
    for breaks in (shrink, lambda step, model: None):
        records = watched(Masked(scale=0.01), breaks, steps=steps, metrics=[*OF_ALL, "query_norm"])
        (wrong,) = asked([FlatAttention()], records)
        assert wrong.level == "warning"
        assert "the scale of the scores" in wrong.message

    def fade(step, model):  # what a norm with a wrong epsilon gives
        if step == 0:
            model.register_forward_pre_hook(lambda module, inputs: (0.05 * inputs[0],))

    (faded,) = asked([FlatAttention()], watched(Masked(), fade, steps=steps, metrics=[*OF_ALL, "query_norm"]))
    assert faded.level == "warning"
    assert "the size of the inputs of the layer" in faded.message


def test_attention_that_becomes_uniform_slowly_is_reported_and_resolved_once_it_is_not():
    def cool(step, model):
        model.scale *= 0.6 if step < 150 else 1 / 0.6

    found = asked([FlatAttention()], watched(Masked(), cool, steps=range(0, 300, 10)))
    assert [alert.is_resolved for alert in found] == [False, True]
    assert "attention has become uniform" in found[0].message
    assert found[0].finding.since == found[0].step - 40
    assert asked([FlatAttention()], watched(Masked(), steps=range(0, 300, 10))) == []


def test_updates_that_bfloat16_rounds_away_are_reported_and_small_float32_updates_are_not():
    def train(kind):
        def act(step, model):
            for parameter in model.parameters():
                parameter += 1e-5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
                if step >= 20:
                    parameter.copy_(parameter.to(kind))

        return act

    (alert,) = asked([RoundedAway()], watched(Masked(), train(torch.bfloat16)))
    assert (alert.step, alert.finding.since) == (50, 30)
    assert "exactly what they were at the reading before" in alert.message
    assert asked([RoundedAway()], watched(Masked(), train(torch.float32))) == []


@pytest.mark.parametrize(
    ("apart", "has_copies", "is_reported"), [(1, True, False), (20, True, False), (20, False, True)]
)
def test_bfloat16_weights_with_float32_copies_are_not_reported_as_rounded_away(apart, has_copies, is_reported):
    """Copies that move by 1e-4 at each step change a bfloat16 weight of 0.1 every few steps."""
    copies: list[torch.Tensor] = []

    def act(step, model):
        generator = torch.Generator().manual_seed(step)
        copies[:] = copies or [parameter.clone() for parameter in model.parameters()]
        for copy, parameter in zip(copies, model.parameters()):
            news = 4e-6 * torch.randn(copy.shape, generator=generator).sign().add(2) * apart
            copy += news if has_copies else 0
            parameter.copy_((copy if has_copies else parameter + news / apart).bfloat16())

    found = asked([RoundedAway()], watched(Masked(), act, steps=range(0, 8 * apart, apart)))
    assert bool(found) == is_reported


def test_the_share_of_weights_that_do_not_move_is_counted():
    def act(step, model):
        if step:
            model.qkv.weight[:8] += 0.1  # the queries of the first of four heads, a third of its own rows of qkv

    layer = watched(Masked(), act, steps=(0, 10), metrics=["hdi", "head_unchanged"])[1].layers["attn"]
    assert layer.arrays["head_unchanged"] == pytest.approx([0.75, 1, 1, 1])
    assert layer.values["head_unchanged"] == 1


def test_weights_rewritten_at_once_are_reported_and_a_warm_up_is_not():
    def rewrite(step, model):
        for parameter in model.parameters():
            parameter += 1e-4 * step * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        if step == 80:
            model.qkv.weight.copy_(model.qkv.weight.roll(32, 0))

    (alert,) = (
        one for one in asked([WeightJump()], watched(Masked(), rewrite, steps=range(0, 110, 10))) if not one.is_resolved
    )
    assert alert.step == 80

    def warm_up(step, model):
        for parameter in model.parameters():
            parameter += 2e-3 * step * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))

    assert asked([WeightJump()], watched(Masked(), warm_up, steps=range(0, 110, 10))) == []


@pytest.mark.parametrize(("rows", "metric"), [(slice(32, 40), "circuit_qk_norm"), (slice(64, 72), "circuit_ov_norm")])
def test_a_head_with_vanishing_weights_is_reported_with_the_circuit_that_vanishes(rows, metric):
    def fade(step, model):
        if step:
            model.qkv.weight[rows] *= 0.5

    (alert,) = asked([VanishingWeights()], watched(Masked(), fade))
    assert (alert.step, alert.finding.heads, alert.finding.metric) == (40, (0,), metric)
    assert alert.finding.value == pytest.approx(0.5**4, rel=1e-3)


def test_a_head_initialised_near_zero_is_not_reported_as_vanishing():
    model = Masked()
    with torch.no_grad():
        model.qkv.weight[32:40] *= 1e-4

    def fade(step, model):
        if step:
            model.qkv.weight[32:40] *= 0.1

    assert asked([VanishingWeights()], watched(model, fade)) == []


class Normed(nn.Module):
    """Attention with or without a norm on queries and keys, head by head."""

    def __init__(self, has_norm: bool):
        super().__init__()
        torch.manual_seed(0)
        self.has_norm = has_norm
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_norm:
            q, k = (nn.functional.rms_norm(part, (8,), eps=1e-12) for part in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def asked_of(rules, model, breaks, steps=range(0, 60, 10)):
    """Read a model, break it before each reading, and judge with the facts of its layer."""
    x, found = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)), []
    with HeadDiversityMonitor(nn.ModuleDict({"attn": model}), metrics=list(OF_ALL)) as monitor:
        alerts = Alerts(list(rules), monitor.facts, pretrained=False)
        for step in steps:
            with torch.no_grad():
                breaks(step, model)
            monitor.arm()
            model(x)
            found += alerts.judge(monitor.measure(step).record())
    return found


@pytest.mark.parametrize("rule", [VanishingWeights, DeadHeads])
def test_keys_that_shrink_before_a_norm_are_not_reported(rule):
    def shrink(step, model):
        model.k_proj.weight *= 0.3 if step else 1.0

    model = Normed(True)
    x = torch.randn(2, 12, 32)
    before = model(x)
    assert asked_of([rule()], model, shrink) == []
    assert torch.allclose(model(x), before, atol=1e-5), "the norm takes the size away"
    (alert,) = asked_of([rule()], Normed(False), shrink)
    assert alert.finding.heads == (0, 1, 2, 3)


def move_all_but(*left):
    def act(step, model):
        for name, parameter in model.named_parameters():
            if name.removesuffix("_proj.weight") not in left:
                parameter += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))

    return act


@pytest.mark.parametrize(
    ("left", "said"),
    [(("k",), "one of the query"), (("q", "k"), "two of the query"), (("q", "k", "v"), "three of the query")],
)
def test_weights_that_no_step_changes_are_reported_with_their_share(left, said):
    steps = range(0, 80, 10)
    (alert,) = asked_of([UntrainedWeights()], Normed(False), move_all_but(*left), steps)
    assert alert.step == 50, "at five readings that know what the one before was"
    assert said in alert.message
    assert alert.finding.value == pytest.approx(len(left) / 4, abs=0.002)


@pytest.mark.parametrize(
    ("zero", "rule", "said"),
    [
        ("qkvo", "frozen heads", "heads 2 and 3 are zero and do not move"),
        ("qk", "untrained weights", "two of the query, key, value and output weights of heads 2 and 3 never change"),
        ("q", None, ""),
    ],
)
def test_heads_initialised_at_zero_without_a_gradient_are_reported(zero, rule, said):
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))

    def train(step, model):
        if step == 0:
            for name in zero:
                weight = getattr(model, f"{name}_proj").weight
                (weight.T if name == "o" else weight)[16:] = 0
        with torch.enable_grad():
            loss = (model(x) - x.flip(1)).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter -= 0.3 * gradient

    model = Normed(False)
    found = asked_of([FrozenHeads(), UntrainedWeights()], model, train, range(0, 80, 10))
    assert [alert.rule for alert in found] == ([] if rule is None else [rule])
    for alert in found:
        assert said in alert.message
        assert alert.finding.heads == (2, 3)
        assert not model.q_proj.weight[16:].any(), "training left them at zero"


def test_weights_that_all_change_or_have_no_gradient_are_not_reported_as_untrained():
    steps = range(0, 80, 10)
    assert asked_of([UntrainedWeights()], Normed(False), move_all_but(), steps) == []
    model = Normed(False)
    model.k_proj.weight.requires_grad_(False)
    assert asked_of([UntrainedWeights()], model, move_all_but("k"), steps) == []
    still = asked_of([UntrainedWeights()], Normed(False), move_all_but("q", "k", "v", "o"), steps)
    assert still == [], "those are of frozen heads"


def keys(*numbers):
    return curve("attention_keys", numbers)


def test_a_lasting_fall_of_visible_keys_is_reported():
    (alert,) = judge(FewerKeys(), keys(*[22.0] * 7, 8.0, 8.0, 8.0))
    assert (alert.step, alert.finding.since, alert.finding.value) == (80, 70, 8)
    assert "a query sees 8 keys, and saw 22 at every reading until step 60" in alert.message
    over = judge(FewerKeys(), keys(*[22.0] * 7, 8.0, 8.0, 22.0))
    assert [(one.step, one.is_resolved) for one in over] == [(80, False), (90, True)]


@pytest.mark.parametrize(
    "numbers",
    [
        [22.0] * 7 + [8.0, 22.0, 22.0],  # one batch
        [22.0, 40.0, 22.0, 30.0, 22.0, 22.0, 22.0, 8.0, 8.0],  # lengths that vary
        [8.0] * 4 + [16.0] * 4 + [32.0] * 4,  # a curriculum
        [22.0] * 7 + [15.0, 15.0],
        [22.0] * 5 + [8.0, 8.0, 8.0],  # too little is known of before
    ],
)
def test_visible_keys_that_vary_or_increase_are_not_reported(numbers):
    assert judge(FewerKeys(), keys(*numbers)) == []


def test_a_head_of_zeros_before_a_norm_is_reported_as_dead():
    def clear(step, model):
        model.k_proj.weight[:8] *= 0.3 if step < 30 else 0.0

    (alert,) = asked_of([DeadHeads()], Normed(True), clear)
    assert (alert.step, alert.finding.heads) == (30, (0,))


def test_vanishing_values_are_reported_beside_normed_queries_and_keys():
    def fade(step, model):
        model.v_proj.weight[:8] *= 0.4 if step else 1.0

    (alert,) = asked_of([VanishingWeights()], Normed(True), fade)
    assert (alert.finding.heads, alert.finding.metric) == ((0,), "circuit_ov_norm")


def test_inputs_that_lose_rank_suddenly_are_reported_and_slow_losses_are_not():
    def tokens(ranks):
        values = [{"token_rank": rank} for rank in ranks]
        return [Record(10 * place, {"attn": LayerRecord(value)}) for place, value in enumerate(values)]

    steady = [20.0, 21.0, 19.5, 20.5, 20.0, 21.0, 20.0]
    (alert,) = asked([InputsLoseRank()], tokens([*steady, 4.0, 4.1, 4.2]))
    assert (alert.step, alert.finding.since) == (90, 70)
    over = asked([InputsLoseRank()], tokens([*steady, 4.0, 4.1, 4.2, 15.0]))
    assert [(one.step, one.is_resolved) for one in over] == [(90, False), (100, True)]
    assert asked([InputsLoseRank()], tokens([*steady, 4.0, 20.0, 19.0])) == [], "one batch"
    assert asked([InputsLoseRank()], tokens([*steady, 4.0, 4.1, 19.0])) == [], "two batches"
    learned = [7.31, 7.22, 7.12, 6.61, 6.79, 7.07, 7.17, 7.18, 4.95, 4.29, 2.92, 2.84, 2.47]  # of healthy runs
    paused = [7.913, 8.668, 8.484, 9.226, 9.108, 8.347, 3.78, 3.992, 2.91, 2.532, 2.598, 2.466, 2.593]
    assert asked([InputsLoseRank()], tokens(learned)) == []
    assert asked([InputsLoseRank()], tokens(paused)) == []
    assert asked([InputsLoseRank()], tokens([20 * 0.7**place for place in range(12)])) == []
    assert asked([InputsLoseRank()], tokens([*steady, 17.0])) == []


def test_layers_that_look_fresh_count_as_pretrained_if_most_of_the_model_is():
    facts = [{"name": name, "num_heads": 4, "num_key_heads": 4, "head_dim": 8, "width": 32} for name in "abc"]
    even, uneven = ([flatness] * 4 for flatness in (0.85, 0.05))

    def first(*flatness):
        layers = {
            name: LayerRecord({"attention_entropy": 0.3}, {"flatness": one, "rank": [8] * 4})
            for name, one in zip("abc", flatness)
        }
        return Record(0, layers)

    assert Alerts([SharpFromStart()], facts).judge(first(uneven, uneven, even)) == []
    alerts = Alerts([SharpFromStart()], facts)
    assert [alert.layer for alert in alerts.judge(first(uneven, even, even))] == ["b", "c"]
    resumed = Alerts([SharpFromStart()], facts)
    resumed.load_state_dict(alerts.state_dict())
    assert resumed.state_dict() == alerts.state_dict()


def test_the_default_rules_have_what_they_need_with_the_default_metrics():
    from hdi_callback.monitoring.chosen_metrics import check_needs
    from hdi_callback.monitoring.session.settings import Settings

    settings = Settings()
    for rule in default_rules():
        check_needs(rule.name, rule.needs, [*settings.metrics, *settings.rule_metrics])
    assert not set(settings.rule_metrics) & set(settings.metrics), "what rules look at is measured and not drawn"
    assert Settings(alerts=default_rules()).rule_metrics == Settings(metrics=["default", "update_hdi"]).rule_metrics
    assert (
        Settings(metrics=["hdi"]).rule_metrics
        == Settings(alerts=None).rule_metrics
        == Settings(alerts=[]).rule_metrics
        == ()
    )


def test_the_certainty_of_a_finding_is_stated_only_for_the_default_limit_of_its_rule():
    def fade(step, model):
        model.v_proj.weight[:8] *= 0.4 if step else 1.0

    (alert,) = asked_of([VanishingWeights()], Normed(True), fade)
    assert "the limit is 0.10 of the first norm, and none of" in alert.finding.certainty
    flat = watched(Masked(scale=0.01), steps=range(0, 200, 10))
    (alert,) = asked([FlatAttention()], flat)
    assert alert.finding.certainty.endswith('healthy runs of small models raised "flat attention"')
    (alert,) = asked([FlatAttention(readings=12)], flat)
    assert alert.finding.certainty == "", "nothing is known of another limit"


def test_the_first_layer_is_marked_only_if_all_attention_of_the_model_is_watched():
    torch.manual_seed(0)
    model = nn.Sequential(
        Attention(Shape(heads=2, key_heads=2, width=16)), Attention(Shape(heads=2, key_heads=2, width=16))
    )

    def first(**chosen):
        with HeadDiversityMonitor(model, metrics=["hdi"], **chosen) as monitor:
            return [facts["name"] for facts in monitor.facts if facts["is_first"]]

    assert first() == ["0"]
    assert first(include=["1"]) == []
    assert first(exclude=["0"]) == []


def test_freezing_or_unfreezing_a_layer_during_a_run_raises_no_alert():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: Attention(Shape(heads=2, key_heads=2, width=16)) for name in ("a", "b")})
    x = torch.randn(2, 6, 16)

    def reported(frozen):
        optimizer, news = torch.optim.SGD(model.parameters(), lr=0.1), []
        with HeadDiversityMonitor(model, metrics=["head_movement_min"]) as monitor:
            alerts = Alerts([FrozenHeads(), RoundedAway()], monitor.facts, pretrained=False)
            for step in range(12):
                for parameter in model["a"].parameters():
                    parameter.requires_grad_(not frozen(step))
                    if frozen(step):
                        parameter.grad = None
                model["a"](model["b"](x)).square().sum().backward()
                optimizer.step()
                news += alerts.judge(monitor.measure(step + 1).record())
                optimizer.zero_grad()
        return [(one.step, one.layer, one.rule) for one in news]

    assert reported(lambda step: step >= 5) == []
    assert reported(lambda step: step < 5) == []


@pytest.mark.parametrize(("still", "reported"), [("ab", {"rounded away"}), ("a", {"frozen heads"})])
def test_weights_that_stop_moving_are_reported_once_by_the_rule_that_fits(still, reported):
    """One layer that stops is left out of training; where all layers stop, the rate has fallen to nothing."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: Attention(Shape(heads=2, key_heads=2, width=16)) for name in ("a", "b")})
    x, news = torch.randn(2, 6, 16), []
    with HeadDiversityMonitor(model, metrics=["head_movement_min"]) as monitor, torch.no_grad():
        alerts = Alerts([FrozenHeads(), RoundedAway()], monitor.facts, pretrained=False)
        for step in range(10):
            monitor.arm()
            model["a"](model["b"](x))
            news += alerts.judge(monitor.measure(step).record())
            for name, layer in model.items():
                for parameter in layer.parameters():
                    parameter.mul_(1.0 if step > 3 and name in still else 1.01)
    assert {(one.layer, one.rule) for one in news} == {(layer, rule) for layer in still for rule in reported}
    assert len(news) == len(still)
