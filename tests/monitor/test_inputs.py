"""What the model is given is judged by how it has varied: far outside of that, at two readings, it is a notice."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hdi_callback import load_history, watch_heads
from hdi_callback.attention.tape import Tape
from hdi_callback.monitor import contract
from hdi_callback.monitor.inputs import INPUTS, ModelInputs, UsualRanges

KINDS, WIDTH, SAMPLES, LENGTH = 40, 16, 8, 12
START = 40
FIELDS = torch.tensor([0, KINDS // 2])


class Model(nn.Module):
    """One layer of attention on tokens with positions, or on features."""

    def __init__(self, features=0):
        super().__init__()
        self.embed = nn.Linear(features, WIDTH) if features else nn.Embedding(KINDS, WIDTH)
        self.places, self.qkv = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x, places=None):
        places = torch.arange(x.shape[1]).expand(x.shape[:2]) if places is None else places
        x = self.embed(x) + self.places(places)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.head((x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))).mean(1))


def tokens_of(length=LENGTH, fewest=2, most=KINDS):
    return torch.randint(fewest, most, (SAMPLES, length))


def spoken():
    """Tokens of which some are frequent, as words are."""
    return torch.multinomial(1 / torch.arange(1.0, KINDS + 1), SAMPLES * LENGTH, True).view(SAMPLES, LENGTH)


def features_of():
    return torch.randn(SAMPLES, LENGTH, 6)


def padded(at_start):
    is_padding = torch.arange(LENGTH) >= torch.randint(4, LENGTH, (SAMPLES, 1))
    is_padding = is_padding.flip(1) if at_start else is_padding
    return tokens_of().masked_fill(is_padding, 0), ((~is_padding).cumsum(1) - 1).clamp(min=0)


def packed(runs_on=False):
    is_start = torch.rand(SAMPLES, LENGTH) < 0.3
    places = torch.arange(LENGTH).expand(SAMPLES, -1)
    return tokens_of(), places if runs_on else places - (places * is_start).cummax(1).values


class Kept:
    """Returns the first of its batches again."""

    def __init__(self, make):
        self.make, self.batch = make, None

    def __call__(self, step, on):
        self.batch = self.batch if on and self.batch is not None else self.make()
        return (self.batch,)


CHANGED = {
    "unknown tokens": (
        lambda step, on: (tokens_of().where(torch.rand(SAMPLES, LENGTH) > 0.6 * on, 1),),
        "one token is 0.",
    ),
    "few kinds of tokens": (
        lambda step, on: (tokens_of() % (9 if on else KINDS),),
        "different tokens are looked up in `embed`",
    ),
    "padding at the start": (lambda step, on: padded(on)[:1], "repeat a token at their start"),
    "another vocabulary": (
        lambda step, on: ((spoken() + 7 * on) % KINDS,),
        "known tokens in `embed`, or their places, differ by 0.",
    ),
    "exchanged fields": (
        lambda step, on: ((tokens_of(LENGTH // 2) // 2)[..., None].add(FIELDS.flip(0) if on else FIELDS).flatten(1),),
        "known tokens in `embed`, or their places, differ by 1 of all from the mean so far, and by at most 0.",
    ),
    "positions that count padding": (
        lambda step, on: (padded(at_start=True)[0], torch.arange(LENGTH).expand(SAMPLES, -1)) if on else padded(True),
        "rows of `places of 12 places`",
    ),
    "positions that run on through documents": (
        lambda step, on: packed(runs_on=on),
        "0 of the positions in `places of 12 places` do not follow the one before",
    ),
    "one batch again": (Kept(tokens_of), "what enters `embed` is the same to the bit"),
    "a batch of one sample": (
        lambda step, on: (tokens_of()[:1].expand(SAMPLES, -1) if on else tokens_of(),),
        "0.125 of the rows",
    ),
}
CHANGED_FEATURES = {
    "scaled twice": (
        lambda step, on: (features_of() / (255 if on else 1),),
        "standard deviation of what enters `embed` is 0.0",
    ),
    "features in another order": (
        lambda step, on: ((features_of() + torch.arange(6)).flip(-1) if on else features_of() + torch.arange(6),),
        "the mean of a feature that enters `embed` is",
    ),
    "moved": (lambda step, on: (features_of() + 3 * on,), "the mean of what enters `embed`"),
    "one batch of features again": (Kept(features_of), "the same to the bit"),
}
USUAL = {
    "a language": (lambda step, on: (tokens_of(),), 0),
    "padding": (lambda step, on: padded(at_start=False)[:1], 0),
    "longer sequences in steps": (lambda step, on: (tokens_of(4 + 8 * (step // 30)),), 0),
    "more kinds of tokens in steps": (lambda step, on: (tokens_of(most=8 + 16 * (step // 45)),), 0),
    "words": (lambda step, on: (spoken(),), 0),
    "a mixture of words in each batch": (lambda step, on: (spoken() % torch.randint(8, KINDS, ()),), 0),
    "packed documents": (lambda step, on: packed(), 0),
    "a set of five batches": (lambda step, on: (SET[step % 5],), 0),
    "sets that take turns": (lambda step, on: (tokens_of() if step % 3 else tokens_of() % 5,), 0),
    "features": (lambda step, on: (features_of(),), 6),
    "augmented from the middle on": (
        lambda step, on: (features_of() * (0.6 + 0.8 * torch.rand(SAMPLES, 1, 1)) if on else features_of(),), 6
    ),
    "noise that rises": (lambda step, on: (features_of() * (1 + step / 30),), 6),
    "one batch from the start": (lambda step, on: (SET[0],), 0),
}  # fmt: skip
torch.manual_seed(1)
SET = [tokens_of() for _ in range(5)]


def alerts_of(batch, features, folder):
    torch.manual_seed(0)
    model = Model(features)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_heads(model, optimizer, 1, log_dir=folder) as heads:
        for step in range(60):
            with heads.step():
                x, *places = batch(step, step >= START)
                F.cross_entropy(model(x, *places), torch.randint(4, (SAMPLES,))).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [alert for alert in load_history(heads.history_path).alerts if alert.rule == contract.NAME]


@pytest.fixture
def _each_fifth_reading(monkeypatch):
    monkeypatch.setattr(contract, "EVERY", 5)


@pytest.mark.usefixtures("_each_fifth_reading")
@pytest.mark.parametrize("name", [*CHANGED, *CHANGED_FEATURES])
def test_what_the_model_is_given_is_told_where_it_is_far_from_all_before(name, tmp_path):
    batch, message = {**CHANGED, **CHANGED_FEATURES}[name]
    alerts = alerts_of(batch, 0 if name in CHANGED else 6, tmp_path)
    (alert,) = [alert for alert in alerts if alert.message.startswith("what the model is given has changed")]
    assert message in alert.message
    assert alert.level == "notice"
    assert alert.where == {"the model": ()}
    assert START - 5 <= alert.since <= START + 1 <= alert.step


@pytest.mark.usefixtures("_each_fifth_reading")
@pytest.mark.parametrize("name", USUAL)
def test_nothing_is_told_of_batches_that_vary_as_ever_or_of_a_curriculum(name, tmp_path):
    batch, features = USUAL[name]
    assert [str(alert) for alert in alerts_of(batch, features, tmp_path)] == []


def numbers_of(model, *given):
    inputs = ModelInputs()
    with Tape(model, inputs.look):
        model(*given)
    (facts,) = inputs.take()
    assert {key[2] for key in facts.terms(*facts.tensors)} == {INPUTS}
    return [tensor.double() for tensor in facts.tensors]


def test_numbers_of_tokens_and_features_are_those_of_what_was_given():
    tokens = tokens_of()
    of_tokens, of_places = numbers_of(Model(), tokens)
    counts = torch.bincount(tokens.flatten(), minlength=256).double()
    torch.testing.assert_close(of_tokens[5:].view(256, 4).sum(1), counts / tokens.numel())
    first = torch.bincount(tokens[:, ::4].flatten(), minlength=256).double()
    torch.testing.assert_close(of_tokens[5:].view(256, 4)[:, 0], first / tokens.numel())
    assert of_tokens[1] == 1, "all rows differ"
    assert of_places[1] == 1 / SAMPLES, "all rows are alike"
    assert of_places[3] == 1, "each place is one more than that before"
    features = 3 + 2 * features_of()
    of_features, _ = numbers_of(Model(6), features)
    torch.testing.assert_close(of_features[2:4], torch.stack([features.mean(), features.std()]).double())
    torch.testing.assert_close(of_features[4:], features.mean((0, 1)).double())


def test_checksums_differ_where_one_token_or_one_bit_does():
    model, tokens = Model(), tokens_of()
    other = tokens.clone()
    other[3, 4] += 1
    sums = [float(numbers_of(model, each)[0][0]) for each in (tokens, tokens.clone(), other, tokens.roll(1, 1))]
    assert sums[0] == sums[1]
    assert len(set(sums)) == 3
    features = features_of()
    changed = features.clone()
    changed[0, 0, 0] = torch.nextafter(changed[0, 0, 0], torch.tensor(math.inf))
    assert numbers_of(Model(6), features)[0][0] != numbers_of(Model(6), changed)[0][0]


def told(values):
    usual = UsualRanges({"size": (1.0, float, "{0} is {1}, and {2} to {3} before")}, 3)
    return [usual.departures("it", {"size": torch.tensor([value])}).get("it size") for value in values]


@pytest.mark.parametrize("kinds", [2, 17])
def test_checksums_differ_between_batches_of_coarse_numbers(kinds):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(kinds, (16, 8, 6), generator=generator) / 16 for _ in range(100)]
    assert len({float(numbers_of(Model(6), batch)[0][0]) for batch in batches}) == 100


def test_a_number_is_told_from_its_second_reading_far_outside_on_and_only_by_its_first_value():
    assert told([0.0, 1.0, 0.5, 9.0, 9.2, 0.3]) == ["", "", "", *["it is 9, and 0 to 1 before"] * 3]


def test_a_mixture_is_told_by_its_distance_from_the_mean_of_those_before():
    usual = UsualRanges({"mixture": (0.2, float, "{0} is off by {1}, and by {3} before")}, 3)
    shares = torch.tensor(
        [[0.5, 0.5, 0], [0.6, 0.4, 0], [0.4, 0.6, 0], [0.25, 0.25, 0.5], *[[0.5, 0.5, 0]] * 3, *[[0.2, 0.0, 0.8]] * 2]
    )
    texts = [usual.departures("it", {"mixture": each}).get("it mixture") for each in shares]
    assert texts == [*[None] * 3, *[""] * 4, *["it is off by 0.5, and by 0 before"] * 2], (
        "what is new takes from all alike at the fourth"
    )


def test_a_number_that_comes_back_moves_on_or_varies_is_not_told():
    assert told([0.0, 0.0, 0.0, 9.0, 0.0, 9.0, 9.0])[4:] == [""] * 3, "9 has been"
    assert told([0.0, 0.0, 0.0, 5.0, 9.0, 5.0])[4:] == [""] * 2
    assert told([0.0, 4.0, 2.0, 11.0, 11.0]) == [""] * 5, "less than twice as far outside as ever"
    assert told([0.0, 9.0, 9.0]) == [""] * 3, "too few"
    assert told([0.0, math.nan, 0.0, 0.0]) == ["", None, "", ""]
