"""Record of one observed forward: maps that ran, and every attention with what was read of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hdi_callback.attention.observe.compare.cores import ObservedCore, ReadRows, Stretch
from hdi_callback.attention.observe.compare.samples import Arrangement, arrangements, arrangements_of_rows
from hdi_callback.attention.observe.map_log import MapLog
from hdi_callback.attention.observe.module_stack import ModuleStack
from hdi_callback.attention.observe.quiet import holds_numbers, is_plain
from hdi_callback.attention.observe.row_reader import Request, RowReader
from hdi_callback.attention.observe.scores.lineage import Scores
from hdi_callback.attention.observe.scores.masks import MaskTerm


class Recorder:
    """Record maps and attentions of a forward.

    Args:
        request: what is to be read.
        names: id of a module or parameter -> its dotted path.

    Attributes:
        stack: the modules that run.
        maps: the maps that ran.
        reader: reads rows.
        cores: the attentions that ran; of one that ran again the first time alone.
        is_recorded: autograd records what runs now.
    """

    def __init__(self, request: Request, names: Mapping[int, str]) -> None:
        self.stack = ModuleStack()
        self.maps = MapLog(self.stack, names, keeps_samples=request.keeps_samples, claimed=request.claimed)
        self.reader = RowReader(request, self.maps, self.stack)
        self.cores: list[ObservedCore] = []
        self.is_recorded = False
        self._by_place: dict[tuple[Any, ...], ObservedCore] = {}

    @property
    def is_repeated(self) -> bool:
        """Whether the next attention of the running module was recorded at an earlier run."""
        return bool(self.stack.modules) and self._known(self.stack.next_place) is not None

    def _known(self, place: tuple[Any, ...]) -> ObservedCore | None:
        """Return a record, unless it is of a forward that does not train and this one does."""
        known = self._by_place.get(place)
        return None if known is not None and self.is_recorded and not known.is_recorded else known

    def forget(self) -> None:
        """Discard the state of one forward."""
        self.reader.forget()
        self.stack.modules.clear()

    def weights_ran(self, scores: Scores, inputs: Tensor, weights: Tensor, axis: int) -> ReadRows:
        """Read the weights of a softmax; see `RowReader.of_weights`."""
        return ReadRows() if self.is_repeated else self.reader.of_weights(scores, inputs, weights, axis)

    def core_ran(
        self,
        via: str,
        scores: Scores,
        value: Tensor | None,
        output: Tensor | None,
        read: ReadRows | None,
        *,
        kind: str = "softmax",
    ) -> None:
        """Record that values were averaged; of an attention that was recorded, count that it ran again.

        Args:
            via: what computed it.
            scores: of which product the weights are.
            value: ``(*lead, keys, width)``.
            output: ``(*lead, queries, width)``.
            read: what was read of the weights.
            kind: of weights.
        """
        place = self.stack.take_place(via)
        known = self._known(place)
        if known is not None:
            known.runs += 1
            return
        module = self.stack.innermost
        core = ObservedCore(
            **vars(read or ReadRows()),
            module=self.stack.owner,
            module_type="" if module is None else type(module).__name__,
            kind=kind,
            order=self.maps.core_ran(),
            place=place,
            scale=scores.scale,
            changed=(*scores.unknown, *scores.altered),
            maps=self.maps.recent(),
            parts=tuple(name for name, _ in self.stack.modules),
            is_recorded=self.is_recorded,
            tied=scores.tied,
            stretch=Stretch.of(scores.query) if scores.query is not None and is_plain(scores.query) else None,
        )
        if scores.altered:
            core.rows, core.unread = None, f"its weights are changed by {', '.join(scores.altered)} after the softmax"
        query, key = scores.query, scores.key
        # Sequences of several lengths in one nested tensor have no length that is a number.
        if query is not None and key is not None and all(type(size) is int for size in (*query.shape, *key.shape)):
            core.queries, core.keys, core.width = query.shape[-2], key.shape[-2], query.shape[-1] // scores.tied
        if place in self._by_place:
            self.cores.remove(self._by_place[place])
        self._by_place[place] = core
        self.cores.append(core)
        if self.maps.keeps_samples:
            tokens = self.maps.tokens()[:4]
            for role, tensor in (("query", query), ("key", key), ("value", value), ("output", output)):
                if tensor is not None and holds_numbers(tensor) and tensor.dim() >= 2:
                    core.samples[role] = list(_samples(tensor, tokens, scores.tied, role in ("query", "key")))

    def fused_ran(
        self,
        via: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        *,
        terms: Sequence[MaskTerm] = (),
        scale: float | None = None,
        unread: str = "",
    ) -> None:
        """Record a fused kernel, which does not return its weights.

        Args:
            via: its name.
            query: ``(*lead, queries, width)``.
            key: ``(*lead, keys, width)``.
            value: ``(*lead, keys, value width)``.
            output: ``(*lead, queries, value width)``.
            terms: what hides keys, and what is added.
            scale: factor of the scores; None for one over the root of the width.
            unread: why its rows cannot be computed; empty if they can.
        """
        factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        biases = [(term.tensor, 1.0) for term in terms if term.kind == "added" and term.tensor is not None]
        scores = Scores(query, key, scale=factor, terms=list(terms), biases=list(biases))
        read = None if self.is_repeated else self.reader.of_operands(scores, unread)
        self.core_ran(via, scores, value, output, read)


def _samples(tensor: Tensor, tokens: Sequence[int], tied: int, is_tied: bool) -> Iterator[Arrangement]:
    """Sample an input or output of attention, whose rows lie side by side in queries and keys if tied."""
    if tied == 1:
        return arrangements(tensor, tokens)
    opened = tensor.reshape(*tensor.shape[:-1], tied, -1).movedim(-2, 0) if is_tied else tensor
    return arrangements_of_rows(opened, tokens, tied)
