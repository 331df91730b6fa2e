"""What makes weights of scores in place of a softmax: heads, the card, and the name, against published functions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import entmax
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback import check, watch_heads
from hdi_callback.attention.discovery.find import survey
from hdi_callback.history import load_history
from tests.attention.by_hand import B, C, D, T, between, truth_of_four
from tests.attention.test_capture import captured

ONE = "weights that add up to one"
RELU, SQUARED = "ReLU over its sum", "squared ReLU over its sum"
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)


def over_its_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(1e-9)


def sparsemax(x: Tensor) -> Tensor:
    ordered = x.sort(-1, descending=True)[0]
    sums, count = ordered.cumsum(-1) - 1, torch.arange(1, x.shape[-1] + 1)
    size = (count * ordered > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, size - 1) / size).clamp(min=0)


def changed_in_place(x: Tensor) -> Tensor:
    relu = x.relu_()
    return relu.div_(relu.sum(-1, keepdim=True) + 1e-6)


NORMALISERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "entmax": (lambda x: entmax.entmax15(x, -1), "entmax of order 1.5"),
    "entmax as a module": (entmax.Entmax15(-1), "entmax of order 1.5"),
    "entmax by bisection": (lambda x: entmax.entmax_bisect(x, 1.5), "entmax of order 1.5"),
    "entmax of another order": (lambda x: entmax.entmax_bisect(x, 1.25), ONE),
    "normmax": (lambda x: entmax.normmax_bisect(x, 2), ONE),
    "sparsemax": (lambda x: entmax.sparsemax(x, -1), "sparsemax"),
    "sparsemax by bisection": (entmax.sparsemax_bisect, "sparsemax"),
    "sparsemax written out": (sparsemax, "sparsemax"),
    "ReLU": (lambda x: over_its_sum(x.relu()), RELU),
    "ReLU, normalised by torch": (lambda x: F.normalize(x.relu(), p=1, dim=-1), RELU),
    "ReLU in place": (changed_in_place, RELU),
    "squared ReLU": (lambda x: over_its_sum(x.relu() ** 2), SQUARED),
    "sigmoid over its sum": (lambda x: over_its_sum(x.sigmoid()), "sigmoid over its sum"),
    "softplus over its sum": (lambda x: over_its_sum(F.softplus(x)), ONE),
    "square over its sum": (lambda x: over_its_sum(x.square()), ONE),
}


def attention(function: Callable[[Tensor], Tensor], *, causal: bool = False, dropout: float = 0.0) -> nn.Module:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / D**0.5
        scores = scores.masked_fill(LATER, -1e9) if causal else scores
        return F.dropout(function(scores), dropout, m.training) @ v

    torch.manual_seed(0)
    return between(attend)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("name", NORMALISERS)
def test_heads_and_name_are_known_by_what_is_done_to_scores(name, causal):
    function, said = NORMALISERS[name]
    module = attention(function, causal=causal, dropout=0.1)
    x = torch.randn(B, T, C)
    found = survey(module, lambda: module(x))
    assert not found.refused
    for role, expected in truth_of_four(module).items():
        assert torch.equal(found.layers[0].weight(role), expected)
    assert found.layers[0].kind.endswith(f"{said} in place of a softmax")
    verdict = check(module, lambda: module(x))
    assert verdict.cards[0].lines["softmax"] == f"none: {said}, over keys; dropout 0.1 behind it"
    assert verdict.cards[0].is_causal == causal
    leaks = causal and name == "square over its sum"  # the square of a mask of -1e9 is the largest of all
    assert [finding.name for finding in verdict.findings] == (["later tokens"] if leaks else [])


@pytest.mark.parametrize("name", ["entmax", "ReLU"])
def test_trying_what_makes_weights_moves_no_random_state_and_no_gradient(name):
    module, x = attention(NORMALISERS[name][0], dropout=0.1), torch.randn(B, T, C)

    def trained(run: Callable[[], object]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        module.zero_grad()
        run()
        module(x).square().mean().backward()
        return module.k.weight.grad.clone(), torch.get_rng_state()

    plain = trained(lambda: None)  # `survey` puts back what its own forward draws
    ours = trained(lambda: survey(module, lambda: module(x)))
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(plain[1], ours[1])


def test_a_learned_order_of_entmax_is_taken_as_it_is():
    module = between(
        lambda m, q, k, v: entmax.entmax_bisect(q @ k.mT / D**0.5, 1 + m.order.sigmoid()) @ v,
        order=nn.Parameter(torch.zeros(4, 1, 1)),
    )
    layer = survey(module, lambda: module(torch.randn(B, T, C))).layers[0]
    assert layer.kind.endswith("entmax of order 1.5 in place of a softmax")


# rows, against what products with the values received


class Received(TorchDispatchMode):
    """Keeps the first factors of products of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default:
            self.factors.append(args[0].clone())
        return func(*args, **(kwargs or {}))


def received(module: nn.Module, x: Tensor) -> Tensor:
    """Return what the product with the values receives without dropout, ``(B, heads, T, T)``."""
    was_training = module.training
    with Received() as seen, torch.no_grad():
        module.eval()(x)
    module.train(was_training)
    return seen.factors[1].unflatten(0, (len(x), -1))


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("name", NORMALISERS)
def test_rows_are_what_the_product_with_the_values_receives(name, causal):
    module, x = attention(NORMALISERS[name][0], causal=causal, dropout=0.1), torch.randn(B, T, C)
    (found,) = captured(module, lambda: module(x)).values()
    (rows,) = found.rows
    assert torch.equal(rows["weights"], received(module, x))
    assert torch.equal(rows["visible"], (~LATER if causal else torch.ones(T, T, dtype=torch.bool)).expand(B, 4, T, T))


@pytest.mark.parametrize("in_place", [False, True])
def test_scores_that_nothing_scales_are_read_with_their_rows(in_place):
    function = changed_in_place if in_place else NORMALISERS["ReLU"][0]
    module, x = between(lambda m, q, k, v: function(q @ k.mT) @ v), torch.randn(B, T, C)
    (found,) = captured(module, lambda: module(x)).values()
    (rows,) = found.rows
    assert torch.equal(rows["weights"], received(module, x))
    q, k = (linear(x).unflatten(-1, (4, -1)).transpose(1, 2) for linear in (module.q, module.k))
    logits = q @ k.mT
    assert torch.allclose(rows["weights"], over_its_sum(logits.relu()), atol=1e-5)


MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda x: over_its_sum(x.relu().masked_fill(LATER, 0)),
    "weights, by a factor": lambda x: over_its_sum(x.relu() * (~LATER).float()),
    "weights, of a sigmoid": lambda x: over_its_sum(x.sigmoid().tril()),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_causal_mask_on_weights_in_place_of_scores_counts_as_one(name):
    module, x = attention(MASKED[name]), torch.randn(B, T, C)
    (found,) = captured(module, lambda: module(x)).values()
    (rows,) = found.rows
    assert torch.equal(rows["weights"], received(module, x))
    assert torch.equal(rows["visible"], (~LATER).expand(B, 4, T, T))
    is_known = "sigmoid" not in name  # what `tril` leaves is not followed
    assert check(module, lambda: module(x)).cards[0].is_causal is (True if is_known else None)


def exponentials(scores: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True)).exp()


def in_place(scores: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    weights = exponentials(scores)
    weights *= mask
    weights /= weights.sum(-1, keepdim=True)
    return F.dropout(weights, 0.1) @ values


def by_einsum(scores: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    weights = exponentials(scores) * mask.float()
    weights = weights / torch.einsum("bhqk->bhq", weights)[..., None]
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(weights, 0.1), values)


def divided_behind_values(scores: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    weights = exponentials(scores).masked_fill(~mask, 0)
    return (F.dropout(weights, 0.1) @ values) / (weights.sum(-1, keepdim=True) + 1e-9)


WRITTEN_OUT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "no mask": lambda s, mask, v: F.dropout(over_its_sum(exponentials(s.masked_fill(~mask, -1e9))), 0.1) @ v,
    "by a factor": lambda s, mask, v: F.dropout(over_its_sum(exponentials(s) * mask), 0.1) @ v,
    "by a factor of numbers": lambda s, mask, v: F.dropout(over_its_sum(s.exp() * mask.float()), 0.1) @ v,
    "filled": lambda s, mask, v: F.dropout(over_its_sum(exponentials(s).masked_fill(~mask, 0)), 0.1) @ v,
    "chosen": lambda s, mask, v: F.dropout(over_its_sum(torch.where(mask, exponentials(s), 0)), 0.1) @ v,
    "normalised by torch": lambda s, mask, v: F.dropout(F.normalize(exponentials(s) * mask, p=1, dim=-1), 0.1) @ v,
    "in place": in_place,
    "by einsum": by_einsum,
    "divided behind values": divided_behind_values,
}
MASKS = {"causal": ~LATER, "padding": torch.arange(T) < torch.tensor([T, 5])[:, None, None, None]}


def masked(attend: Callable[[Tensor, Tensor, Tensor], Tensor], mask: str) -> nn.Module:
    torch.manual_seed(0)
    return between(lambda m, q, k, v: attend(q @ k.mT / D**0.5, MASKS[mask], v))


def with_infinity(mask: str) -> nn.Module:
    return masked(lambda s, seen, v: F.dropout(s.masked_fill(~seen, -torch.inf).softmax(-1), 0.1) @ v, mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_mask_between_exponentials_and_their_sum_is_one_of_a_softmax(name, mask):
    module, x = masked(WRITTEN_OUT[name], mask), torch.randn(B, T, C)
    found = survey(module, lambda: module(x))
    assert not found.refused
    for role, expected in truth_of_four(module).items():
        assert torch.equal(found.layers[0].weight(role), expected)
    verdict, other = (check(each, lambda each=each: each(x)) for each in (module, with_infinity(mask)))
    lines, others = ({**each.cards[0].lines, "positions": ""} for each in (verdict, other))  # random masks hide these
    assert lines == others
    assert verdict.cards[0].is_causal == (mask == "causal")
    assert [finding.name for finding in verdict.findings] == [finding.name for finding in other.findings]


def readings(module: nn.Module, path: str) -> list[dict[str, float]]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    with watch_heads(module, optimizer, every_n_steps=1, history=path) as heads:
        for _ in range(3):
            x = torch.randn(B, T, C)
            with heads.step():
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [record.layers["the model"].values for record in load_history(path).records[:3]]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", sorted(WRITTEN_OUT.keys() - {"in place"}))  # which autograd refuses
def test_a_softmax_written_out_has_the_numbers_of_one_that_hides_keys_by_infinity(name, mask, tmp_path):
    ours = readings(masked(WRITTEN_OUT[name], mask), str(tmp_path / "ours.jsonl"))
    other = readings(with_infinity(mask), str(tmp_path / "other.jsonl"))
    names = set(other[0])
    assert {"attention_entropy", "head_covariance"} <= names
    if name == "divided behind values":  # no row adds up to one, and so none says which tokens are padding
        names = set(ours[0]) - ({"head_covariance"} if mask == "padding" else set())
        assert not {"attention_entropy", "attention_logit"} & names
    for values, expected in zip(ours, other, strict=True):
        assert {each: values[each] for each in names} == pytest.approx(
            {each: expected[each] for each in names}, abs=1e-6
        )


def test_rows_in_bfloat16_are_those_that_the_normaliser_gives():
    module, x = attention(NORMALISERS["sparsemax"][0]), torch.randn(B, T, C)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    (found,) = captured(module, run).values()
    with Received() as seen:
        run()
    (rows,) = found.rows
    assert torch.equal(rows["weights"].bfloat16(), seen.factors[1].unflatten(0, (B, 4)))


class Blocks(nn.Module):
    """Blocks that normalise in a module of their own, in other ways, one of them a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("entmax", "squared ReLU", "sparsemax written out")
        functions = [*(NORMALISERS[name][0] for name in names), lambda x: x.softmax(-1)]
        self.blocks = nn.ModuleList(attention(function, causal=True, dropout=0.1) for function in functions)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def entropy_of(weights: Tensor) -> Tensor:
    """Return the closed form under a causal mask: of queries that see two keys or more, per head."""
    rows = weights[:, :, 1:].double()
    plain = torch.where(rows > 0, -rows * rows.clamp_min(1e-300).log(), 0).sum(-1)
    return (plain / torch.arange(2, rows.shape[-1] + 1).double().log()).mean((0, 2))


@pytest.mark.parametrize("way", ["eager", "compiled", "blocks compiled"])
def test_entropy_is_measured_from_the_first_step_on(way, tmp_path):
    torch._dynamo.reset()
    model = Blocks()
    run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    for block in model.blocks if way == "blocks compiled" else ():
        block.compile(backend="aot_eager")
    optimizer, truth = torch.optim.SGD(model.parameters(), 0.5), []
    with watch_heads(model, optimizer, every_n_steps=1, history=str(tmp_path / "history.jsonl")) as heads:
        for _ in range(3):
            x = torch.randn(B, T, C)
            truth.append(entropy_of(received(copy.deepcopy(model.blocks[0]), x)))
            with heads.step():
                run(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    *records, _ = load_history(str(tmp_path / "history.jsonl")).records
    assert [record.step for record in records] == [0, 1, 2]
    for record, entropy in zip(records, truth):
        assert list(record.layers) == [f"blocks.{number}" for number in range(4)]
        for layer in record.layers.values():
            assert {"attention_entropy", "attention_logit", "head_covariance"} <= layer.values.keys()
        first = record.layers["blocks.0"].values
        assert first["attention_entropy"] == pytest.approx(float(entropy.mean()), abs=1e-5)


@pytest.mark.parametrize(("name", "alerts"), [("squared ReLU", []), ("softmax of 20 times", ["sharp from the start"])])
def test_only_a_softmax_is_told_to_be_sharp_from_the_start(name, alerts, tmp_path):
    module = attention(NORMALISERS.get(name, (lambda x: (20 * x).softmax(-1), ""))[0], causal=True)
    scale = 40.0 if name == "squared ReLU" else 1.0  # of inputs: large scores make a sparse row sparser
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    path = str(tmp_path / "history.jsonl")
    with watch_heads(module, optimizer, every_n_steps=1, history=path) as heads, heads.step():
        module(scale * torch.randn(B, T, C)).square().mean().backward()
        optimizer.step()
    first = load_history(path).records[0]
    assert first.layers["the model"].values["attention_entropy"] < 0.5
    assert [alert.rule for alert in first.alerts] == alerts


def test_a_row_that_adds_up_neither_to_one_nor_to_nothing_is_not_measured():
    factor = torch.ones(())
    module, x = attention(lambda x: over_its_sum(x.relu()) * factor), torch.randn(B, T, C)
    layers = survey(module, lambda: module(x)).layers
    factor.fill_(2)
    (found,) = captured(module, lambda: module(x), layers).values()
    (rows,) = found.rows
    assert rows["weights"].isnan().all()
