from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hdi_callback.monitor.places import Places, sketch_of
from tests.monitor.test_training_step import ONSET, texts, trained

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(32, 32) for _ in range(3))
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)
        self.embed = nn.Embedding(300, 32)
        self.patch = nn.Conv2d(3, 32, 8)


def moved(change, steps=0):
    """Return what is said after `change` of a model, with so many steps of Adam before and after it."""
    torch.manual_seed(0)
    model, places = Layer(), Places()
    names = [("", name) for name, _ in model.named_parameters()]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def compare():
        places.compare(names, *sketch_of([*model.parameters()], CPU))

    def train():
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()

    compare()
    train()
    with torch.no_grad():
        change(model)
    train()
    compare()
    return {name: text for (_, name), text in places.moved.items()}


def _permute(model):
    model.embed.weight.copy_(model.embed.weight[torch.randperm(300)])


def _exchange(model):
    model.q.weight[:16] = model.q.weight[:16].roll(8, 0).clone()


def _swap(model):
    first, second = model.q.weight.clone(), model.k.weight.clone()
    model.q.weight.copy_(second)
    model.k.weight.copy_(first)


@pytest.mark.parametrize("steps", [0, 20])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_exchange, {"q.weight": "rows of `q.weight` are old rows of it in another place: 8-15 at 0-7, and 8 more"}),
        (
            lambda model: model.out.weight.copy_(model.out.weight.roll(8, 1)),
            {"out.weight": "columns of `out.weight` are old columns of it in another place: 0-23 at 8-31, and 8 more"},
        ),
        (
            lambda model: model.out.weight.copy_(model.out.weight.T.clone()),
            {"out.weight": "rows of `out.weight` are old columns of it in another place: 0-31 at 0-31"},
        ),
        (
            _swap,
            {
                "q.weight": "rows of `q.weight` are old rows of `k.weight`: 0-31 at 0-31",
                "k.weight": "rows of `k.weight` are old rows of `q.weight`: 0-31 at 0-31",
            },
        ),
        (
            lambda model: model.up.weight.data.copy_(model.down.weight.T),
            {"up.weight": "rows of `up.weight` are old columns of `down.weight`: 0-95 at 0-95"},
        ),
        (
            lambda model: model.embed.weight.copy_(model.embed.weight.roll(1, 0)),
            {"embed.weight": "rows of `embed.weight` are old rows of it in another place: 299 at 0, and 99 more"},
        ),
        (
            lambda model: model.patch.weight.copy_(model.patch.weight.flip(1)),
            {
                "patch.weight": "columns of `patch.weight` are old columns of it in another place: "
                "128-191 at 0-63, and 64 more"
            },
        ),
    ],
)
def test_rows_and_columns_that_lie_elsewhere_are_told_with_where_they_were_also_when_steps_lie_between(
    change, expected, steps
):
    assert moved(change, steps) == expected


def test_each_permutation_of_a_vocabulary_is_told():
    for seed in range(10):
        torch.manual_seed(seed)
        assert [*moved(_permute, 5)] == ["embed.weight"]


def _draw(model):
    model.embed.weight[:100].normal_()
    model.q.reset_parameters()


def _average(model):
    for parameter in model.parameters():
        parameter.lerp_(torch.randn_like(parameter) * parameter.std(), 0.4)


def _prune(model):
    model.up.weight[::2] = 0
    model.q.weight.mul_(torch.rand(32, 32) < 0.5)
    model.embed.weight[0] = 0


def _begin_as_others(model):
    model.embed.weight[290:] = model.embed.weight[3]
    model.embed.weight[280:290] = model.embed.weight[:10]
    model.k.weight[:8] = model.q.weight[:8]


def _fill(model):
    for parameter in model.parameters():
        parameter.fill_(0.5)


@pytest.mark.parametrize("steps", [0, 20, 400])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        _draw,
        _average,
        _prune,
        _begin_as_others,
        _fill,
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
        lambda model: [parameter.mul_(-0.5) for parameter in model.parameters()],
        lambda model: model.up.weight.clamp_(-0.01, 0.01),
    ],
    ids=["steps alone", "drawn", "averaged", "pruned", "copies of few", "equal", "loaded", "scaled", "clamped"],
)
def test_weights_that_are_drawn_averaged_pruned_scaled_or_begin_as_a_few_others_have_not_moved(change, steps):
    assert moved(change, steps) == {}


def test_a_parameter_that_is_empty_or_has_another_shape_now_is_not_compared():
    places = Places()
    for size in (40, 32):
        embed, empty = nn.Embedding(size, 16), nn.Parameter(torch.zeros(4, 0))
        torch.manual_seed(size)
        places.compare([("", "embed"), ("", "empty")], *sketch_of([embed.weight, empty], CPU))
    assert places.moved == {}


def test_rows_that_were_equal_before_are_not_called_moved():
    places = Places()
    model = nn.Linear(32, 32)
    with torch.no_grad():
        model.weight.copy_(model.weight[:16].repeat(2, 1))
    places.compare([("", "weight")], *sketch_of([model.weight], CPU))
    with torch.no_grad():
        model.weight.copy_(model.weight.roll(4, 0))
    places.compare([("", "weight")], *sketch_of([model.weight], CPU))
    assert places.moved == {}


def _exchange_heads(model, step):
    if step == ONSET:
        queries = model.body.layers[1].self_attn.in_proj_weight.data[:16]
        queries.copy_(queries.roll(4, 0))  # no version counts it, and the loss hardly sees it


def _roll_vocabulary(model, step):
    if step == ONSET:
        model.embed.weight.copy_(model.embed.weight.roll(1, 0))


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (
            _exchange_heads,
            "rows of `body.layers.1.self_attn.in_proj_weight` are old rows of it in another place: 0-11 at 4-15, and",
        ),
        (_roll_vocabulary, "rows of `embed.weight` are old rows of it in another place: 0-5 at 1-6, and 1 more"),
    ],
)
def test_heads_and_tokens_in_another_place_are_a_warning_of_the_contract_in_a_training(after, says, tmp_path):
    _, alerts = trained(tmp_path, after=after, every=2, steps=170)
    told = [alert for alert in alerts if alert.rule == "contract change" and says in alert.message]
    assert [alert.level for alert in told] == ["warning"]
    assert ONSET <= told[0].step <= ONSET + 60


def _clip_to_nothing(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-5)


def test_gradients_that_are_clipped_to_nothing_are_told(tmp_path):
    (text,) = texts(trained(tmp_path, before=_clip_to_nothing)[1])
    assert "gradients 50 times smaller than ever from a backward that gives as large ones as before" in text


@pytest.mark.parametrize("scale", [1e-4, 1e4, 65536.0])
def test_a_loss_of_another_scale_that_is_undone_before_the_step_is_no_change_of_the_step(scale, tmp_path):
    def backward(loss, step):
        (loss * (scale if step >= ONSET else 1.0)).backward()

    def before(model):
        for parameter in model.parameters():
            parameter.grad.div_(scale)

    assert texts(trained(tmp_path, before=before, backward=backward)[1]) == []
