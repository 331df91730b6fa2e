"""For the tests of other packages: `assert_heads` fails when the attention of a model breaks."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn

from hdi_callback.checks import Check, check


def assert_heads(
    model: nn.Module,
    forward: Callable[[], object] | None = None,
    *,
    heads: int | None = None,
    key_heads: int | None = None,
    causal: bool | None = None,
    layers: str = "*",
) -> Check:
    """Assert that nothing is wrong with the attention of a model, and that its heads are as they should be.

    Args:
        model: the model.
        forward: runs a forward of it, without arguments: ``lambda: model(batch)``; see `hdi_callback.check`.
        heads: heads that each layer has to have.
        key_heads: different heads of keys that each layer has to have.
        causal: whether each token must see no later ones.
        layers: pattern of the names of layers that are meant, such as ``"decoder.*self_attn"``.

    Returns:
        What was found, for further assertions.

    Raises:
        AssertionError: with the reasons, the cards and the findings.

    Example:
        >>> import torch
        >>> model = torch.nn.MultiheadAttention(32, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 6, 32)
        >>> found = assert_heads(model, lambda: model(x, x, x, need_weights=False), heads=4, causal=False)
    """
    result = check(model, forward)
    cards = [card for card in result.cards if fnmatchcase(card.layer, layers)]
    reasons = [str(finding) for finding in result.wrong if fnmatchcase(finding.layer, layers)]
    reasons += [f"the heads of {card.layer} are not known: {card.lines['why']}" for card in cards if not card.heads]
    for name, expected in {"heads": heads, "key_heads": key_heads, "is_causal": causal}.items():
        differing = [card for card in cards if card.heads and expected not in {None, getattr(card, name)}]
        reasons += [f"{name} of {card.layer} is {getattr(card, name)}, and not {expected}" for card in differing]
    if not cards:
        reasons.append(f"no attention ran in a layer like {layers!r}")
    if reasons:
        raise AssertionError("\n".join([*reasons, "", str(result)]))
    return result
