"""`HeadRows`: the features of linear maps that the heads of one core are made of, or why there are none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from hdi_callback.attention.layer.heads import Centring, Role

ROUNDED = "its {role}s are rounded, so that no gradient shows which projection they come from"
SINGLE_KEYS = "each query had a single key when it was run, which does not show its key heads"
NOT_FOLLOWED = "its {role}s are computed from `{name}`, but not by a linear map of single tokens that can be read"
VALUES_ARE_INPUTS = "its values are its inputs, without a projection"


class NoHeadsError(Exception):
    """An attention core whose heads cannot be read, and why: a clause about its module, such as "its heads mix"."""


class UndecidedError(NoHeadsError):
    """An attention core that a traced run does not show well enough: another run may read it."""


class NoRowsError(UndecidedError):
    """A role whose rows are in no single weight."""


@dataclass(frozen=True)
class Rows:
    """Features of one head in one linear map, and those of another map that feeds it.

    Attributes:
        parameter: of the map.
        features: of the head, in order.
        inner: the rows that feed it; all of what the outer map takes.
        gain: for each of them the number that it is multiplied by; ones if there is nothing in between.
        problem: why the rows that feed it cannot be told; it counts where these rows are not left out.
    """

    parameter: str
    features: tuple[int, ...]
    inner: Rows | None = None
    gain: tuple[float, ...] = ()
    centring: Centring = ""
    problem: str = field(default="", compare=False)


@dataclass
class HeadRows:
    """Heads of a core in the order in which they were found, and what holds for all of them."""

    rows: dict[Role, list[Rows]]
    members: list[list[int]]  # parts of the core for each head: numbers of `units`
    normed: set[Role] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)
    left_out: str = ""
    units: Units = field(default_factory=lambda: Units())
    row: int | None = None  # of the weights, whose query is of the stream that is read, where there are two
    tied: Tensor | None = None  # (rows, value width), columns of values of each row, where one map is of several rows
    stream: str = ""  # what is left out of a second stream
    outputs_left_out: str = ""  # why the outputs of heads that are added up are not read, in words


@dataclass(frozen=True)
class Units:
    """Parts of a core, each of which is of one head: its matrices of weights, or some rows of each.

    Attributes:
        rows: rows of each matrix that belong together; all of them where there is one part.
    """

    rows: tuple[Tensor, ...] = ()

    @property
    def count(self) -> int:
        """Number of parts of a matrix."""
        return max(1, len(self.rows))

    def of(self, tensor: Tensor, unit: int) -> Tensor:
        """Select the part of a tensor that belongs to a part.

        Args:
            tensor: ``(N, rows, ...)``.
            unit: number of the part.

        Returns:
            ``(rows of the part, ...)``.
        """
        matrix = tensor[unit // self.count]
        return matrix[self.rows[unit % self.count]] if self.rows else matrix


def module_of(parameter: str) -> str:
    """Return the path of a map by that of its matrix.

    Args:
        parameter: dotted path of the matrix.

    Returns:
        The path of the module, or of the bare parameter.
    """
    return parameter.removesuffix(".weight")


def named(parameters: Iterable[str]) -> str:
    """Name maps in a sentence.

    Args:
        parameters: dotted paths of their matrices.

    Returns:
        Their paths in quotes, each once, with "and" between.
    """
    return " and ".join(dict.fromkeys(f"`{module_of(one)}`" for one in parameters))
