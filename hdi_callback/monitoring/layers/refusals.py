"""Warnings about attention that is not watched, one for each kind of module and reason."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from hdi_callback.attention import AttentionLayer, Refusal
from hdi_callback.errors import UnsupportedAttentionWarning
from hdi_callback.monitoring.absent import listed


def warn_by_kind(refused: Iterable[tuple[Refusal, str]], *, stacklevel: int) -> None:
    """Warn of refusals, in one warning for those of one type and reason.

    Args:
        refused: refusals, with the message for the first of its kind.
        stacklevel: as for `warnings.warn`, counted from the caller.
    """
    kinds: dict[tuple[str, str], list[tuple[Refusal, str]]] = {}
    for refusal, message in refused:
        kinds.setdefault((refusal.module_type, refusal.reason), []).append((refusal, message))
    for (_, message), *others in kinds.values():
        more = f" The same holds for {listed([one.name for one, _ in others])}." if others else ""
        warnings.warn(message + more, UnsupportedAttentionWarning, stacklevel=stacklevel + 1)


def nothing_to_watch(model: nn.Module) -> str:
    """Message that a model has no layer that can be watched.

    Args:
        model: the model.

    Returns:
        The message, with the types of its modules.
    """
    kinds = sorted({type(module).__name__ for module in model.modules()})
    return (
        f"No attention layer was found whose heads can be read in {type(model).__name__}, so there is "
        f"nothing to watch. Its modules are of these types: {', '.join(kinds)}. Describe the attention with "
        "`register_layout`."
    )


def may_attend(model: nn.Module) -> bool:
    """Return whether a forward of the model may compute attention.

    Args:
        model: the model.

    Returns:
        False if all its modules are torch's own, and none is attention.
    """
    return any(isinstance(module, nn.MultiheadAttention) or not _is_of_torch(module) for module in model.modules())


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def uncountable(layer: AttentionLayer) -> Refusal:
    """Refusal of a layer of which a rank may hold only a part of the heads.

    Args:
        layer: a layer whose projections are split over ranks.

    Returns:
        The refusal, with its remedy.
    """
    return Refusal(
        layer.name,
        type(layer.module).__name__,
        "its projections are split over ranks, and it does not say how wide a head is, so that its number of heads may "
        "be that of one rank",
        f"Give it an attribute `head_dim`{f', or skip it with exclude=[{layer.name!r}]' if layer.name else ''}.",
    )
