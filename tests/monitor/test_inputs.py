"""What the model is given is judged by how it has varied: far outside of that, at two readings, it is a notice."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hdi_callback import load_history, watch_heads
from hdi_callback.attention.tape import Tape
from hdi_callback.monitor import contract
from hdi_callback.monitor.inputs import INPUTS, LabelFit, ModelInputs, UsualRanges, fit_of

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


def told(values, fewest=3, steadiness=math.inf):
    usual = UsualRanges({"size": (1.0, float, "{0} is {1}, and {2} to {3} before")}, fewest, steadiness)
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
    assert told([0.0, 0.4, 0.2, 9.0, 9.0], steadiness=0.3) == [""] * 5
    assert told([0.0, 9.0, 9.0]) == [""] * 3, "too few"
    assert told([0.0, math.nan, 0.0, 0.0]) == ["", None, "", ""]


CLASSES, MANY = 5, 32


def with_labels(step, classes=CLASSES, many=MANY):
    labels = torch.randint(classes, (many,))
    means = torch.randn(CLASSES, LENGTH, 6, generator=torch.Generator().manual_seed(3))
    return means[labels] + torch.randn(many, LENGTH, 6), labels


def words_with_labels(step):
    labels = torch.randint(CLASSES, (MANY,))
    return torch.where(torch.rand(MANY, LENGTH) < 0.5, labels[:, None], torch.randint(KINDS, (MANY, LENGTH))), labels


def changed(change, batch=with_labels):
    return lambda step: change(*batch(step)) if step >= START else batch(step)


UNFIT = {
    "labels of other samples": changed(lambda x, y: (x, y.roll(1))),
    "samples in another order": changed(lambda x, y: (x[torch.randperm(MANY)], y)),
    "labels that are sorted": changed(lambda x, y: (x, y.sort().values)),
    "classes in another order": changed(lambda x, y: (x, torch.tensor([3, 0, 4, 1, 2])[y])),
    "words with labels of other samples": changed(lambda x, y: (x, y.roll(1)), words_with_labels),
}
FITTING = {
    "as ever": with_labels,
    "words": words_with_labels,
    "noise that rises": lambda step: (lambda x, y: (x + step / 10 * torch.randn_like(x), y))(*with_labels(step)),
    "labels of noise": changed(lambda x, y: (x, y.where(torch.rand(MANY) < 0.6, torch.randint(CLASSES, (MANY,))))),
    "mixed, with the label of the larger part": changed(lambda x, y: (0.7 * x + 0.3 * x.roll(1, 0), y)),
    "smaller batches": lambda step: with_labels(step, many=8 if step >= START else MANY),
    "more classes": lambda step: with_labels(step, classes=CLASSES if step >= START else 3),
    "negatives, as of another set": changed(lambda x, y: (1 - x, y)),
    "labels at random from the start": lambda step: (features_of(), torch.randint(CLASSES, (SAMPLES,))),
}


def told_of_labels(batch, folder):
    torch.manual_seed(0)
    model = Model(6) if batch(0)[0].is_floating_point() else Model()
    model.head = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_heads(model, optimizer, 1, log_dir=folder) as heads:
        for step in range(60):
            x, labels = batch(step)
            with heads.step():
                F.cross_entropy(model(x), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [alert for alert in load_history(heads.history_path).alerts if "labels of the output" in alert.message]


@pytest.mark.usefixtures("_each_fifth_reading")
@pytest.mark.parametrize("name", UNFIT)
def test_labels_that_fit_no_more_what_the_model_is_given_are_told(name, tmp_path):
    (alert,) = told_of_labels(UNFIT[name], tmp_path)
    assert "labels of the output and samples by `embed` fit at most a third as well as at each" in alert.message
    assert alert.level == "notice"
    assert START - 5 <= alert.since <= START + 1 <= alert.step


@pytest.mark.usefixtures("_each_fifth_reading")
@pytest.mark.parametrize("name", FITTING)
def test_labels_that_fit_less_well_or_never_did_are_not_told(name, tmp_path):
    assert [str(alert) for alert in told_of_labels(FITTING[name], tmp_path)] == []


def test_a_fit_is_in_deviations_of_all_orders_of_labels():
    torch.manual_seed(0)
    numbers, labels = torch.randn(6, 3).double(), F.one_hot(torch.tensor([0, 2, 1, 0, 2, 3]), 4).double()
    covariance = torch.randn(3, 4).double()
    covariance[:, 3] = 0  # of a kind that has not been
    fit, count = fit_of(numbers, labels, covariance)
    orders = torch.tensor([*permutations(range(5))])
    sums = torch.einsum("ia,ab,pib->p", numbers[:5], covariance, labels[:5][orders])
    torch.testing.assert_close(fit, (sums[0] - sums.mean()) / sums.std(unbiased=False))
    assert count == 5


def test_what_is_written_to_after_it_was_given_is_not_compared_with_labels():
    for is_written in (False, True):
        fit, output = LabelFit(), torch.zeros(SAMPLES, 4)
        fit.tensors["embed"] = tokens = tokens_of()
        places = fit.places_of(output)
        _ = tokens.add_(1) if is_written else tokens
        for is_passed_over in (is_written, True):  # once is enough
            fit.look("the output", places, *(torch.arange(SAMPLES),) * 2, torch.ones(SAMPLES, dtype=torch.bool))
            assert len(fit.take()) == 1 - is_passed_over


def test_labels_are_compared_with_what_their_own_call_was_given():
    """Of outputs of other sizes, in the order in which they are differentiated, and of features that grow."""
    fit, found = LabelFit(), []
    for size, width in ((32, 6), (16, 6), (8, 64), (8, 6)):
        fit.tensors["embed"] = torch.randn(size, width)
        found.append((fit.places_of(torch.zeros(size, 4)), size))
        fit.tensors = {}
    for places, size in found:
        fit.look("the output", places, torch.arange(size), torch.arange(size) % 4, torch.ones(size, dtype=torch.bool))
        assert fit.take()
    assert sorted(key[1] for key in fit._sums) == [6, 64]


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_one_batch_of_huge_numbers_ends_no_comparison(size):
    torch.manual_seed(0)
    fit, labels, found = LabelFit(), torch.arange(64) % 4, []
    for batch in range(8):
        features = F.one_hot(labels, 6) + 0.1 * torch.randn(64, 6)
        features[:2] = size if batch == 3 else features[:2]
        fit.tensors["embed"] = features
        fit.look("it", fit.places_of(torch.zeros(64, 4)), torch.arange(64), labels, torch.ones(64, dtype=torch.bool))
        (facts,) = fit.take()
        found.append(facts.tensors[0])
    assert torch.stack(found[5:]).isfinite().all()
    assert min(float(numbers[0]) for numbers in found[5:]) > 4
