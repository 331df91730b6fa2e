"""What a traced run computes in another way is what torch computes: batched functions, ragged sequences, sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from hdi_callback.attention.trace.plain_batches import _looped, _of_jagged
from hdi_callback.attention.trace.plain_flex import _attended
from hdi_callback.attention.trace.plain_sums import as_product, cosines, distances
from hdi_callback.attention.trace.sequences import _sequences


def one_and_other(x, y):
    return x @ y, {"sum": x.sum(-1)}


@pytest.mark.parametrize(
    ("in_dims", "out_dims"), [((0, None), 0), ((1, 0), (1, {"sum": 0})), ((0, 2), (0, {"sum": 1}))]
)
def test_a_loop_in_place_of_vmap_gives_the_same_result(in_dims, out_dims):
    torch.manual_seed(0)
    x, y = torch.randn(3, 3, 3), torch.randn(3, 3, 3)
    expected = torch.vmap(one_and_other, in_dims, out_dims)(x, y)
    found = _looped(one_and_other, in_dims, out_dims, x, y)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("parts", "is_looped"), [(64, True), (65, False)])
def test_vmap_over_more_than_64_parts_is_not_replaced_by_a_loop(parts, is_looped):
    assert (_looped(lambda x: x, 0, 0, torch.ones(parts, 2)) is not NotImplemented) is is_looped


def test_a_vmap_whose_function_returns_other_types_is_left_to_torch():
    assert _looped(lambda x: (x, 1), 0, 0, torch.ones(2, 2)) is NotImplemented


@pytest.mark.parametrize("how", [{"offsets": torch.tensor([0, 2, 5])}, {"lengths": torch.tensor([2, 3])}])
def test_jagged_sequences_are_padded_at_their_ends(how):
    values = torch.arange(10.0).view(5, 2)
    expected = torch.tensor([[[0, 1], [2, 3], [0, 0]], [[4, 5], [6, 7], [8, 9]]])
    assert torch.equal(_of_jagged(None, values, **how), expected)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_flex_attention_is_plain_attention_in_which_query_heads_share_those_of_keys(key_heads):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, key_heads, key_heads))
    found, *sizes = _attended(None, query, key, value, "score_mod")
    shared = [one.repeat_interleave(4 // key_heads, 1) for one in (key, value)]
    expected = (query @ shared[0].mT / 8**0.5).softmax(-1) @ shared[1]
    torch.testing.assert_close(found, expected)
    assert [one.shape for one in sizes] == [(2, 4, 5)] * 2


def cut(behind: object = None) -> SimpleNamespace:
    """What a sum asks a run: which tensors are parameters, and which node has a product behind it."""
    products = SimpleNamespace(first=lambda node: ("product" if node is behind is not None else None, None))
    views = SimpleNamespace(is_of_parameter=lambda one: getattr(one, "is_parameter", False))
    return SimpleNamespace(run=SimpleNamespace(normed=[], upstream_products=products), views=views)


def activations(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() * 1 for shape in shapes]


def nodes(tensor: torch.Tensor) -> set[str]:
    found, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [one for one, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        (((2, 5, 1, 4), (2, 1, 7, 4)), (-1,)),  # all queries and all keys
        (((5, 1, 4), (7, 4)), (2,)),
        (((2, 5, 1, 4, 3), (2, 1, 7, 4, 3)), (-1, -2)),
        (((2, 5, 1, 4), (2, 5, 7, 4)), (3,)),  # each query and its own neighbours
    ],
)
def test_a_sum_of_elementwise_products_becomes_one_matrix_product(shapes, dims):
    left, right = activations(*shapes)
    terms = left * right
    answer = terms.sum(dims)
    found = as_product(cut(), terms, dims, answer)
    torch.testing.assert_close(found, answer)
    assert "BmmBackward0" in nodes(found)
    assert "MulBackward0" not in nodes(found) - nodes(left) - nodes(right)


def test_a_sum_of_anything_but_products_of_two_activations_stays_a_sum():
    left, right = activations((5, 1, 4), (7, 4))
    leaf = torch.randn(7, 4, requires_grad=True)
    marked = right * 1
    marked.is_parameter = True
    assert as_product(cut(), left + right, (-1,), (left + right).sum(-1)) is None
    assert as_product(cut(), left * leaf, (-1,), (left * leaf).sum(-1)) is None
    assert as_product(cut(), left * marked, (-1,), (left * marked).sum(-1)) is None
    assert as_product(cut(), left * right, (0,), (left * right).sum(0)) is None, "one of them lacks this dimension"
    same = left * (left * 2)
    assert as_product(cut(), same, (-1,), same.sum(-1)) is None, "neither has rows of its own"
    narrow, wide = activations((5, 1, 4), (5, 7, 4))
    for left, right in ((narrow, wide), (wide, narrow)):
        terms = left * right
        assert as_product(cut(behind=wide.grad_fn), terms, (-1,), terms.sum(-1)) is None, "weights of each feature"
        assert as_product(cut(behind=narrow.grad_fn), terms, (-1,), terms.sum(-1)) is not None


def test_cosine_similarity_and_cdist_agree_with_torch_and_their_norms_are_constants():
    left, right = activations((5, 1, 4), (7, 4))
    run = cut()
    found = cosines(run, F.cosine_similarity, (left, right), {"dim": -1})
    torch.testing.assert_close(found, F.cosine_similarity(left, right, dim=-1))
    rows = activations((3, 4, 2), (3, 4, 2))
    torch.testing.assert_close(cosines(cut(), F.cosine_similarity, tuple(rows), {}), F.cosine_similarity(*rows))
    assert [one is other for one, other in zip(run.run.normed, (left, right), strict=True)] == [True, True]
    size = left.detach().norm(dim=-1, keepdim=True) * right.detach().norm(dim=-1, keepdim=True)
    (gradient,) = torch.autograd.grad(found.sum(), left)
    torch.testing.assert_close(gradient, (right / size).sum(1, keepdim=True))
    queries, keys = activations((2, 5, 4), (2, 7, 4))
    torch.testing.assert_close(distances(run, torch.cdist, (queries, keys), {}), torch.cdist(queries, keys))
    torch.testing.assert_close(distances(run, torch.cdist, (queries, keys, 2.0), {}), torch.cdist(queries, keys))
    assert distances(run, torch.cdist, (queries, keys), {"p": 1.0}) is NotImplemented


def test_parts_with_key_tokens_in_common_belong_to_one_sequence():
    def of(*positions: int, leaf: int = 0) -> SimpleNamespace:
        return SimpleNamespace(masks=[leaf], positions=lambda leaf: positions)

    numbers = _sequences({0: of(1, 2), 1: of(5), 5: of(7), 2: of(3), 3: of(2, 3), 4: of(1, leaf=1)})
    assert numbers[0] == numbers[2] == numbers[3]
    assert len({numbers[0], numbers[1], numbers[4], numbers[5]}) == 4
