"""A claim that was tried: numbers with intervals, verdicts by rules, and the page that shows them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from matplotlib.figure import Figure

Size = Literal["small", "full"]
Verdict = Literal["holds", "holds if", "fails", "open"]


@dataclass(frozen=True)
class Number:
    """A measured number.

    Attributes:
        name: what it is, in words.
        value: the number.
        low: lower end of its 95 % interval; None where it is exact, or a bound.
        high: upper end.
        of: what it was taken over: seeds, heads, draws.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    of: str = ""

    def row(self) -> str:
        interval = "" if self.low is None else f"{shown(self.low)} to {shown(self.high)}"
        return f"| {self.name} | {shown(self.value)} | {interval} | {self.of} |"


@dataclass(frozen=True)
class Part:
    """One statement of a claim, with its verdict.

    Attributes:
        statement: what is claimed, in words.
        rule: how the verdict follows from the numbers; written before them.
        verdict: the result.
        why: the numbers that decide, or the condition of a "holds if".
    """

    statement: str
    rule: str
    verdict: Verdict
    why: str


@dataclass
class Claim:
    """A claim that was tried.

    Attributes:
        name: of the module.
        title: a short sentence.
        words: what is claimed and how it is tried, for a reader with one course in statistics; paragraphs.
        parts: the statements with their verdicts; the first one is the claim of the abstract.
        numbers: everything that was measured.
        tables: further tables in Markdown, by their captions.
        left: what was not tried.
        seeds: the seeds of everything random.
        figure: the figure, with its caption.
        caption: what the figure shows.
    """

    name: str
    title: str
    words: list[str]
    parts: list[Part]
    numbers: list[Number]
    seeds: str
    left: str
    caption: str
    figure: Figure | None = None
    tables: dict[str, str] = field(default_factory=dict)
    seconds: float = math.nan
    size: Size = "full"

    def __getitem__(self, name: str) -> Number:
        """Find a number by its name."""
        return next(number for number in self.numbers if number.name == name)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the claim of the abstract, the first part."""
        return self.parts[0].verdict

    def to_json(self) -> dict[str, Any]:
        plain = {key: value for key, value in self.__dict__.items() if key not in ("figure", "parts", "numbers")}
        return {**plain, "parts": [asdict(p) for p in self.parts], "numbers": [asdict(n) for n in self.numbers]}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Claim:
        parts, numbers = ([kind(**one) for one in plain[key]] for kind, key in ((Part, "parts"), (Number, "numbers")))
        return cls(**{**plain, "parts": parts, "numbers": numbers})

    def page(self) -> str:
        """The page of the documentation."""
        lines = [f"# {self.title}", "", f"**Verdict: {self.verdict}.** {self.parts[0].why}", ""]
        lines += [line for paragraph in self.words for line in (paragraph, "")]
        lines += [f"![{self.caption}](../images/claims/{self.name}.png)", "", f"*{self.caption}*", ""]
        lines += ["## Verdicts", "", "Each rule was written before its numbers, unless it says otherwise.", ""]
        lines += ["| statement | rule | verdict | why |", "|---|---|---|---|"]
        lines += [f"| {p.statement} | {p.rule} | **{p.verdict}** | {p.why} |" for p in self.parts]
        lines += ["", "## Numbers", "", "| number | value | 95 % interval | over |", "|---|---|---|---|"]
        lines += [number.row() for number in self.numbers]
        for caption, table in self.tables.items():
            lines += ["", f"{caption}:", "", table]
        lines += ["", "## What was not tried", "", self.left, "", "## Run it", "", "```shell"]
        lines += [f"make theory ARGS={self.name}", "```", ""]
        lines += [f"This command wrote the page and its figure. Seeds: {self.seeds}.", ""]
        return "\n".join(lines)


def bars(points: list[Number]) -> list[list[float]]:
    """Lengths of the error bars below and above numbers, as matplotlib takes them."""
    return [[p.value - p.low for p in points], [p.high - p.value for p in points]]


def shown(value: float | None) -> str:
    """Write a number with three significant digits; very small ones as powers."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
