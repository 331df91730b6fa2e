"""`GraphCut`: what torch's functions do in a traced run.

The graph is cut where a parameter is multiplied with: the answer is a leaf of random features (`parameter_products`,
`contractions`, `stacks`, by `weight_views`). Norms take what they divide by for constants (`plain_norms`), attention is
computed by plain products (`plain_attention`), and a map that mixes heads is left out (`head_mixing`). What ranks swap
is answered in the graph (`exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.trace import parameter_products, plain_attention, plain_batches, plain_norms, plain_sums
from hdi_callback.attention.trace.draw import MOST_ELEMENTS, Draw
from hdi_callback.attention.trace.exchange import Exchange, handler_of_ranks
from hdi_callback.attention.trace.head_mixing import HeadMixing
from hdi_callback.attention.trace.maps import MapStub
from hdi_callback.attention.trace.traced_run import Leaf, TracedRun
from hdi_callback.attention.trace.weight_views import WeightViews

_HANDLERS: dict[Any, Callable[..., Any]] = {
    func: handler
    for room in (parameter_products, plain_attention, plain_batches, plain_norms, plain_sums)
    for handler, functions in room.HANDLERS.items()
    for func in functions
}


class GraphCut(TorchFunctionMode):
    """Cuts the graph where a parameter is multiplied with, and leaves out what hides which feature goes where.

    Args:
        run: what the run shows.
        draw: what linear maps answer.
        stubs: the linear maps of the copy.
        parameters: path -> every other parameter of the copy.
        mixing: maps that took weights of attention -> whether those of all heads.
        keeps_means: means over features are no constants.
        exchange: answers what ranks swap.
    """

    def __init__(
        self,
        run: TracedRun,
        draw: Draw,
        *,
        stubs: Iterable[MapStub],
        parameters: Mapping[str, nn.Parameter],
        mixing: dict[str, bool],
        keeps_means: bool,
        exchange: Exchange,
        keeps_top: bool = False,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.run, self.draw, self.keeps_means = run, draw, keeps_means
        self.views, self.mixing = WeightViews(stubs, parameters), HeadMixing(run, mixing)
        self.before: Callable[..., Tensor] | None = None
        self.calls: dict[str, int] = {}
        self.keeps_top, self.has_all = keeps_top, False  # all were chosen in place of the top k
        self.hidden = 0  # softmaxes that ran where autograd records nothing
        self.exponentials = 0  # and exponentials
        self.of_scores = 0  # exponentials of scores, where it records

    def __enter__(self) -> Any:
        self.before, MapStub.answer = MapStub.answer, self.answer
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        MapStub.answer, self.before = self.before, None  # else the last run, with its model, would live on
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, handler = kwargs or {}, _HANDLERS.get(func)
        if handler is None and isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            handler = handler_of_ranks(func)
        answer = NotImplemented if handler is None else handler(self, func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        made = func(*args, **kwargs)
        made = func(*args, **kwargs) if self.views.has_filled((*args, *kwargs.values()), made) else made
        if func in parameter_products.MIXING_TOKENS:
            parameter_products.note_mixed_tokens(self, func, made)
        return made

    def answer(
        self,
        parameter: str,
        taken: Tensor,
        features: int,
        *,
        module: MapStub | None = None,
        start: int = 0,
        axes: tuple[int, ...] = (),
        is_of_parts: bool = False,
    ) -> Tensor:
        """Give random features for each position of the input of a map.

        Args:
            parameter: dotted path of its matrix.
            taken: its input, ``(..., in_features)``.
            features: how many it gives.
            module: the map, where it is a module.
            start: which feature of the matrix is the first of them.
            axes: dims of the parameter that number the features, where it is no module's matrix.
            is_of_parts: a matrix for each head, of a part of its own of the features that come in.

        Returns:
            ``(..., features)``.

        Raises:
            ValueError: if that would take too much memory.
        """
        if taken.numel() // max(1, taken.shape[-1]) * features > MOST_ELEMENTS:
            raise ValueError("a traced run would take too much memory")
        if features == taken.shape[-1] and self.mixing.is_at(parameter, taken):
            return taken
        call = self.calls.get(parameter, 0)
        self.calls[parameter] = call + 1
        with torch._C.DisableTorchFunction():
            drawn = self.draw(parameter, call, (*taken.shape[:-1], features)).requires_grad_()
        original = None if module is None else module.original[0]
        taken = taken if torch.is_grad_enabled() else taken.detach()  # a view of what has a gradient claims one
        self.run.leaves.append(Leaf(parameter, drawn, taken, start, axes, original, is_of_parts))
        return drawn.clone(memory_format=torch.contiguous_format)
