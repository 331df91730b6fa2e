"""Parts of tokens that are multiplied with a matrix each, in a traced run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hdi_callback.attention.trace.contractions import contracted, einsum

H, TOKENS, TAKEN, WIDTH = 4, 5, 6, 3


class Cut:
    """Answers with what each matrix gives, written out token by token."""

    def __init__(self, stack: torch.Tensor) -> None:
        self.stack, self.run = stack, SimpleNamespace(tensors=[], stacked=[])
        self.views = SimpleNamespace(view_of=lambda weight: SimpleNamespace(parameter="stack", is_whole=True))

    def draw_output(self, name: str, map_input: torch.Tensor, features: int, **options: Any) -> torch.Tensor:
        assert (name, features, options) == ("stack", H * WIDTH, {"axes": (0, 2), "is_of_parts": True})
        parts = map_input.unflatten(-1, (H, TAKEN))
        return torch.cat([parts[..., h, :] @ self.stack[h] for h in range(H)], -1)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("where", ["{}htk,hkw->{}htw", "{}thk,hkw->{}thw", "{}thk,hkw->{}htw"])
def test_features_are_numbered_head_by_head_with_or_without_a_batch(lead, where):
    formula = where.format("ab"[: len(lead)], "ab"[: len(lead)])
    joined, out = formula.split("->")
    ix, iw = joined.split(",")
    sizes = {"h": H, "t": TOKENS, "k": TAKEN, "a": 2, "b": 3}
    x, stack = torch.randn([sizes[i] for i in ix]), torch.randn(H, TAKEN, WIDTH)
    answer = contracted(cast("Any", Cut(stack)), x, stack, ix, iw, out)
    torch.testing.assert_close(answer, torch.einsum(formula, x, stack))


def test_a_single_matrix_is_not_split_into_matrices_of_parts():
    x, stack = torch.randn(1, TOKENS, TAKEN), torch.randn(1, TAKEN, WIDTH)
    assert contracted(cast("Any", Cut(stack)), x, stack, "htk", "hkw", "htw") is NotImplemented


@pytest.mark.parametrize("formula", ["ab,bc->ac", "...b,bc->...c"])
def test_an_einsum_of_no_parameter_or_of_two_parameters_is_left_to_torch(formula):
    x, y = torch.randn(2, 3), torch.randn(3, 4)
    for are_parameters in (False, True):
        views = SimpleNamespace(is_of_parameter=lambda _, answer=are_parameters: answer)
        cut = cast("Any", SimpleNamespace(views=views))
        assert einsum(cut, torch.einsum, (formula, x, y), {}) is NotImplemented
