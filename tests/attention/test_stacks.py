"""Parts of tokens that are multiplied with a matrix each, in a traced run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hdi_callback.attention.trace.stacks import by_each_matrix

H, TOKENS, TAKEN, WIDTH = 4, 5, 6, 3


class Cut:
    """Answers with what each matrix gives, written out token by token."""

    def __init__(self, stack: torch.Tensor) -> None:
        self.stack, self.run = stack, SimpleNamespace(tensors=[])

    def answer(self, name: str, taken: torch.Tensor, features: int, **told: Any) -> torch.Tensor:
        assert (name, features, told) == ("stack", H * WIDTH, {"axes": (0, 2), "is_of_parts": True})
        parts = taken.unflatten(-1, (H, TAKEN))
        return torch.cat([parts[..., h, :] @ self.stack[h] for h in range(H)], -1)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_features_are_numbered_head_by_head_with_or_without_a_batch(lead):
    x, stack = torch.randn(*lead, H, TOKENS, TAKEN), torch.randn(H, TAKEN, WIDTH)
    answer = by_each_matrix(cast("Any", Cut(stack)), "stack", x, stack)
    torch.testing.assert_close(answer, x @ stack)


@pytest.mark.parametrize(
    ("x", "stack"), [((TOKENS, TAKEN), (H, TAKEN, WIDTH)), ((1, TOKENS, TAKEN), (1, TAKEN, WIDTH))]
)
def test_tokens_that_have_no_parts_and_a_single_matrix_are_left_to_torch(x, stack):
    cut = cast("Any", Cut(torch.randn(stack)))
    assert by_each_matrix(cut, "stack", torch.randn(x), torch.randn(stack)) is NotImplemented
