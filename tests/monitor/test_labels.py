"""What each position is trained to predict is read from the gradient of the output, and compared with what it got."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdi_callback import load_history, watch_heads
from hdi_callback.attention.tape import Tape
from hdi_callback.monitor import contract
from hdi_callback.monitor.labels import ELSEWHERE, IGNORED, LABELS, LOSS, PARTLY, TARGET, LossLabels

LABELS_KEY = ("", 0, LABELS)
SIZE, TOKENS, SAMPLES, WIDTH = 40, 16, 6, 32


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def later_by_one(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(2)


def prefix(tokens):
    hidden = causal(tokens)
    hidden[:, :6] = False
    return hidden


class Layer(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = mask

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.mask is not None:
            scores = scores.masked_fill(self.mask(x.shape[1]), -torch.inf)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A language model; `shift` moves its tokens by one, `source` adds an encoder, `further` an output."""

    def __init__(self, *masks, shift=False, source=False, further=False):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(SIZE, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.layers, self.head, self.shift = nn.ModuleList(map(Layer, masks)), nn.Linear(WIDTH, SIZE), shift
        self.encoder = Layer(None) if source else None
        self.further = nn.Linear(WIDTH, SIZE) if further else None

    def forward(self, tokens, source=None):
        x = self.embedding(tokens)
        if self.encoder is not None:
            x = x + self.encoder(self.embedding(source)).mean(1, keepdim=True)
        x = (F.pad(x[:, :-1], (0, 0, 1, 0)) if self.shift else x) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.further is None else (self.head(x), self.further(x))


def cross_entropy(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def reward(logits, labels):
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (chosen * (labels >= 0) * torch.linspace(-1, 1, len(labels))[:, None]).sum()


LOSSES = {
    "cross entropy": cross_entropy,
    "smoothed": lambda logits, labels: cross_entropy(logits, labels, label_smoothing=0.2),
    "of a copy in float32": lambda logits, labels: cross_entropy(logits.float(), labels),
    "scaled": lambda logits, labels: 65536 * cross_entropy(logits, labels),
    "with weights of classes": lambda logits, labels: cross_entropy(logits, labels, weight=torch.rand(SIZE) + 0.1),
    "in chunks": lambda logits, labels: sum(map(cross_entropy, logits.chunk(3), labels.chunk(3))),
    "of slices": lambda logits, labels: cross_entropy(logits[:, 2:-2], labels[:, 2:-2]),
    "log softmax by hand": lambda logits, labels: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten()),
    "with an added square": lambda logits, labels: cross_entropy(logits, labels) + 1e-4 * logits.logsumexp(-1).mean(),
    "a reward of either sign": reward,
}


def shifted(tokens, offset):
    """What a position is to predict, `offset` places ahead; ignored where the sequence ends."""
    at = torch.arange(tokens.shape[1]) + offset
    return tokens.roll(-offset, 1).masked_fill((at < 0) | (at >= tokens.shape[1]), -100)


def terms_of(model, loss, tokens, labels, returned=lambda logits: logits):
    """What is known after one forward and backward of a model on its own."""
    looking = LossLabels()
    with Tape(model) as tape:
        logits = model(tokens)
        output = returned(logits)
    looking.note(tape, output)
    loss(logits, labels).backward()
    terms = {}
    for facts in looking.take():
        terms |= facts.terms(*facts.tensors)
    return {key: value for key, value in terms.items() if key[2] != LOSS}


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return torch.randint(SIZE, (SAMPLES, TOKENS))


@pytest.mark.parametrize("offset", range(-3, 4))
@pytest.mark.parametrize("loss", LOSSES)
def test_the_token_that_positions_are_trained_to_predict_is_that_of_the_labels(loss, offset, tokens):
    labels = shifted(tokens, offset)
    terms = terms_of(Model(causal), LOSSES[loss], tokens, labels)
    assert terms[LABELS_KEY] == offset
    if loss not in {"of slices", "a reward of either sign"}:
        assert torch.equal(terms["", 0, TARGET].is_trained, labels >= 0)


def test_labels_are_read_where_the_output_is_cast_flat_or_in_a_dictionary(tokens):
    for returned in (lambda y: y.double(), lambda y: {"loss": y.mean(), "logits": [y.flatten(0, 1)]}):
        assert terms_of(Model(causal), cross_entropy, tokens, shifted(tokens, 1), returned)[LABELS_KEY] == 1


def test_labels_are_read_in_half_precision_and_where_tokens_come_before_samples(tokens):
    assert terms_of(Model(causal).bfloat16(), cross_entropy, tokens, shifted(tokens, 2))[LABELS_KEY] == 2
    model = nn.Sequential(nn.Embedding(SIZE, WIDTH), nn.Linear(WIDTH, SIZE))
    for offset in (0, 1, 2):
        labels = shifted(tokens, offset)
        terms = terms_of(model, cross_entropy, tokens.T.contiguous(), labels.T)
        assert terms[LABELS_KEY] == offset
        assert offset == 0 or torch.equal(terms["", 0, TARGET].is_trained, labels >= 0)


def test_labels_of_a_trained_model_are_read_with_smoothing_and_where_it_is_sure(tokens):
    for options in ({}, {"label_smoothing": 0.1}):
        model = Model(causal)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(150):
            optimizer.zero_grad()
            cross_entropy(model(tokens), shifted(tokens, 1), **options).backward()
            optimizer.step()
        assert cross_entropy(model(tokens), shifted(tokens, 1)) < 0.3
        terms = terms_of(
            model, lambda *args, options=options: cross_entropy(*args, **options), tokens, shifted(tokens, 1)
        )
        assert terms.get(LABELS_KEY, 1) == 1


def test_labels_of_other_samples_and_ignored_ones_are_told_from_what_is_not_known(tokens):
    labels = shifted(tokens, 1)
    assert terms_of(Model(causal), cross_entropy, tokens, labels.roll(1, 0)) == {LABELS_KEY: ELSEWHERE}
    nothing = terms_of(Model(causal), lambda *args: cross_entropy(*args, reduction="sum"), tokens, labels * 0 - 100)
    assert nothing == {LABELS_KEY: IGNORED}
    constant = torch.full_like(tokens, 3)
    assert terms_of(Model(causal), cross_entropy, constant, constant) == {}, "all offsets agree"
    partly = torch.where(torch.rand(tokens.shape) < 0.75, labels, torch.randint(SIZE, tokens.shape))
    assert terms_of(Model(causal), cross_entropy, tokens, partly) == {LABELS_KEY: PARTLY}, "most are the next tokens"
    assert terms_of(Model(causal), lambda logits, _: logits.mean(1).square().sum(), tokens, labels).get(TARGET) is None


@pytest.mark.parametrize(
    "shaped",
    [
        lambda y: y[:, :0],
        lambda y: torch.complex(y, y),
        lambda y: y.to_sparse(),
        lambda y: torch.nested.as_nested_tensor([*y]),
    ],
)
def test_outputs_without_rows_are_passed_over_in_silence(shaped, tokens, recwarn):
    looking, model = LossLabels(), nn.Sequential(nn.Embedding(SIZE, WIDTH), nn.Linear(WIDTH, SIZE))
    with Tape(model) as tape:
        logits = model(tokens)
    output = shaped(logits)
    looking.note(tape, [output, logits])
    cross_entropy(logits, shifted(tokens, 1)).backward()
    assert {key for facts in looking.take() for key in facts.terms(*facts.tensors)} >= {LABELS_KEY}
    assert [str(warning.message) for warning in recwarn if "failed" in str(warning.message)] == []


WAYS = {
    "in place": lambda model, tokens: model(tokens).mul_(1.5),
    "retained": lambda model, tokens: (logits := model(tokens)).retain_grad() or logits,
    "checkpointed": lambda model, tokens: checkpoint(model, tokens, use_reentrant=False),
    "plain": lambda model, tokens: model(tokens),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("twice", [False, True])
def test_training_is_the_same_to_the_bit(way, twice, tmp_path):
    def train(watched):
        torch.manual_seed(0)
        model = Model(causal, causal)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        heads = watch_heads(model, optimizer, 1, log_dir=tmp_path / way / str(twice)) if watched else None
        losses = []
        for _ in range(12):
            tokens = torch.randint(SIZE, (SAMPLES, TOKENS))
            step = heads.step() if watched else torch.enable_grad()
            with step:
                loss = cross_entropy(WAYS[way](model, tokens), shifted(tokens, 1))
                if twice:
                    (gradient,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
                    loss = loss + 0.1 * gradient.square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        if watched:
            heads.finish()
        return losses, [parameter.detach() for parameter in model.parameters()]

    with_watch, without = train(watched=True), train(watched=False)
    assert all(torch.equal(a, b) for lists in zip(with_watch, without) for a, b in zip(*lists))


def test_no_tensor_of_the_training_is_kept(tokens):
    looking, model = LossLabels(), Model(causal)
    with Tape(model) as tape:
        logits = model(tokens)
    looking.note(tape, logits)
    arrived = []
    logits.register_hook(lambda gradient: arrived.append(weakref.ref(gradient)))
    cross_entropy(logits, shifted(tokens, 1)).backward()
    looking.take()
    output = weakref.ref(logits)
    del logits, tape
    assert output() is None
    assert arrived[0]() is None


def test_a_failure_is_a_warning_and_the_gradient_arrives(tokens, monkeypatch):
    model = Model(causal)
    monkeypatch.setattr(torch.linalg, "vector_norm", None)
    with pytest.warns(match="Looking at what the loss trains failed"):
        assert terms_of(model, cross_entropy, tokens, shifted(tokens, 1)) == {}
    assert all(parameter.grad is not None for parameter in model.parameters())


# in a training

ON = 14


def changed(change):
    """A language model whose labels something changes at a step."""
    return lambda model, text, step: cross_entropy(
        model(text), change(shifted(text, 1)) if step >= ON else shifted(text, 1)
    )


def masked(model, text, step):
    is_masked = torch.rand(text.shape) < 0.3
    return cross_entropy(model(text.masked_fill(is_masked, 0)), text.masked_fill(~is_masked, -100))


def masked_no_more(model, text, step):
    return masked(model, text, step) if step < ON else cross_entropy(model(text), text)


def ahead(offset, first=0):
    def loss(model, text, step):
        labels = shifted(text, offset)
        labels[:, :first] = -100
        return cross_entropy(model(text), labels)

    return loss


def of_source(model, text, step):
    return cross_entropy(model(text, text), shifted(text, 1))


def classes(model, text, step):
    return F.cross_entropy(model(text).mean(1), text[:, 0])


def without_prompts(model, text, step):
    return ahead(1, 0 if step < ON else 10)(model, text, step)


def longer(model, text, step):
    return ahead(1)(model, text[:, : 5 + step // 3], step)


def two_and_three_ahead(model, text, step):
    """As heads for speculative decoding are trained, beside one for the next token that is frozen."""
    return sum(cross_entropy(each, shifted(text, ahead)) for each, ahead in zip(model(text), (2, 3)))


def padded(model, text, step):
    lengths = torch.randint(4, TOKENS, (len(text), 1))
    is_padding = torch.arange(TOKENS) >= lengths
    return cross_entropy(model(text.masked_fill(is_padding, 0)), shifted(text, 1).masked_fill(is_padding, -100))


def drawn(model, text, step):
    """Fewer and fewer of the tokens that are given are those of the text, as the model draws the others itself."""
    own = torch.randint(SIZE, text.shape)
    return cross_entropy(model(torch.where(torch.rand(text.shape) < step / 15, own, text)), shifted(text, 1))


SEES = "is so since step 0: it sees later tokens, and each position is trained to predict the next one"
NEXT = "and the next token before"


def focal(logits, labels):
    losses = cross_entropy(logits, labels, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def computed(before, after):
    """A language model whose loss something computes otherwise from a step on."""
    return lambda model, text, step: (after if step >= ON + 6 else before)(model(text), shifted(text, 1))


TOLD = {
    "another offset": ([causal] * 2, changed(lambda y: shifted(y, 1)), f"predict the token 2 places ahead, {NEXT}"),
    "their own tokens": ([causal], changed(lambda y: y.roll(1, 1)), f"predict its own token, {NEXT}"),
    "labels of other samples": ([causal], changed(lambda y: y.roll(1, 0)), f"no token up to three places away, {NEXT}"),
    "no mask in the inputs": ([None], masked_no_more, "predict its own token, and no token up to three"),
    "no mask": ([None] * 2, ahead(1), f"layers.0-1 {SEES}"),
    "no mask in one layer": ([causal, None], ahead(1), f"layers.1 {SEES}"),
    "a mask later by one": ([later_by_one] * 2, ahead(1), f"layers.0-1 {SEES}"),
    "shifted twice": ([causal], ahead(2), "is so since step 0: each position is trained to predict the token 2 places"),
}  # fmt: skip
SILENT = {
    "a language model": ([causal] * 2, ahead(1), {}),
    "masked tokens": ([None] * 2, masked, {}),
    "classes": ([None], classes, {}),
    "a prefix that is not trained": ([prefix] * 2, ahead(1, first=5), {}),
    "an autoencoder": ([causal], of_source, {"source": True}),
    "prompts that are ignored from a step on": ([causal], without_prompts, {}),
    "padding": ([causal], padded, {}),
    "longer sequences": ([causal], longer, {}),
    "tokens that a model shifts itself": ([causal], ahead(0), {"shift": True}),
    "tokens that a model draws more and more": ([causal], drawn, {}),
    "a copy with a delay": ([causal], ahead(-2), {}),
    "two tokens ahead, seen": ([None], ahead(2), {}),
    "a focal loss": ([causal], lambda model, text, step: focal(model(text), shifted(text, 1)), {}),
    "a loss scaler": ([causal], lambda model, text, step: 2.0 ** (1 + step // 9) * ahead(1)(model, text, step), {}),
    "weights that move": ([causal], lambda model, text, step: (1 + step / 30) * ahead(1)(model, text, step), {}),
    "weights of the loss that vary": (
        [causal],
        lambda model, text, step: float(torch.rand(())) * ahead(1)(model, text, step),
        {},
    ),
    "a loss that becomes a cross entropy": ([causal], computed(LOSSES["with weights of classes"], cross_entropy), {}),
    "two and three tokens ahead": ([causal], two_and_three_ahead, {"further": True}),
}


def alerts_of(masks, loss, folder, **options):
    torch.manual_seed(0)
    model = Model(*masks, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_heads(model, optimizer, 1, log_dir=folder) as heads:
        for step in range(36):
            with heads.step():
                loss(model, torch.randint(SIZE, (SAMPLES, TOKENS)), step).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [alert for alert in load_history(heads.history_path).alerts if alert.rule == contract.NAME]


@pytest.fixture
def _each_third_reading(monkeypatch):
    monkeypatch.setattr(contract, "EVERY", 3)


@pytest.mark.usefixtures("_each_third_reading")
@pytest.mark.parametrize("name", TOLD)
def test_labels_that_change_and_masks_that_show_them_are_told(name, tmp_path):
    masks, loss, message = TOLD[name]
    (alert,) = alerts_of(masks, loss, tmp_path)
    assert message in alert.message
    assert alert.level == "warning"


@pytest.mark.usefixtures("_each_third_reading")
@pytest.mark.parametrize("name", SILENT)
def test_what_is_right_is_not_accused(name, tmp_path):
    masks, loss, options = SILENT[name]
    assert [str(alert) for alert in alerts_of(masks, loss, tmp_path, **options) if alert.level != "notice"] == []


def rewarded(model, text, step):
    """Rewards of zero at first and at last."""
    return (reward(model(text), shifted(text, 1)) - 0.1) * (4 < step < ON)


def ignored(model, text, step):
    return cross_entropy(model(text), shifted(text, 1) * (step < ON) - 100 * (step >= ON), reduction="sum")


@pytest.mark.usefixtures("_each_third_reading")
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (ahead(0), "predict its own token"),
        (ignored, "predict nothing at all, and the next token before"),
        (
            computed(cross_entropy, lambda logits, labels: cross_entropy(logits.softmax(-1), labels)),
            "the way from the output to the loss has now softmax (dim -1)",
        ),
        (
            computed(cross_entropy, lambda *args: cross_entropy(*args) / 16),
            "the way from the output to the loss has now div",
        ),
        (
            computed(cross_entropy, lambda *args: cross_entropy(*args, reduction="sum")),
            "has now nll_loss (ignore_index -100, reduction 2)",
        ),
    ],
)
def test_what_some_right_model_does_as_well_is_a_notice(loss, message, tmp_path):
    (alert,) = alerts_of([causal], loss, tmp_path)
    assert alert.level == "notice"
    assert message in alert.message


@pytest.mark.usefixtures("_each_third_reading")
def test_rewards_that_are_zero_at_times_are_not_accused(tmp_path):
    assert {alert.level for alert in alerts_of([causal], rewarded, tmp_path)} <= {"notice"}
