"""Which trainings there are, and how they are drawn."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field

HAND_WRITTEN = ("separate", "fused", "interleaved", "linear per head", "bare parameters")
PRETRAINED = ("bert", "gpt2", "llama", "t5", "albert")
FAMILIES = (*HAND_WRITTEN, "torch encoder", "lora", *PRETRAINED)

PLAIN = ("by hand", "loop")
LIGHTNING = ("lightning", "lightning, manual")
SHELLS = (*PLAIN, *LIGHTNING, "transformers")


@dataclass(frozen=True)
class Trait:
    """Where something that a training may have can be.

    Attributes:
        families: of models that can have it.
        shells: that can have it.
        conflicts: traits that it cannot be together with, as the training would fail without a monitor too.
        is_slow: drawn seldom.
    """

    families: Collection[str] = FAMILIES
    shells: Collection[str] = SHELLS
    conflicts: Collection[str] = ()
    is_slow: bool = False


COMPILED = ("compiled eager", "compiled aot_eager")
_PRECISIONS = ("bf16 autocast", "loss scale", "bf16 weights")
_WEIGHTS = ("spectral norm", "spectral norm by hook", "weight norm", "weight norm by hook")
_PARAMETRIZED = ("spectral norm", "weight norm", "parametrization that counts", "parametrization that draws")
_CHECKPOINTING = ("checkpointing", "reentrant checkpointing")
_COPIES = ("copied while training", "saved whole while training")
# Torch's encoder reads the weights of its parts without calling them; LoRA wraps linear maps and wants to own them.
_CALLED = tuple(family for family in FAMILIES if family not in ("torch encoder", "lora", "gpt2", "bare parameters"))

# The Trainer of transformers saves no weights of several names, such as the embedding of t5 within a network.
_NOT_SAVED = ("t5", "transformers")

TRAITS: dict[str, Trait] = {
    "dropout": Trait(),
    # code of the user's that draws, counts or keeps
    "draws of torch": Trait(),
    "draws of python": Trait(),
    "draws of numpy": Trait(),
    "draws of a generator": Trait(),
    "weight noise": Trait(_CALLED),
    "counter of a class": Trait(),
    "auxiliary losses in a list": Trait(conflicts=_CHECKPOINTING),
    "batch norm": Trait(HAND_WRITTEN),
    "spectral norm": Trait(_CALLED, conflicts=(*_WEIGHTS, "bf16 weights", "weight noise")),
    "spectral norm by hook": Trait(
        _CALLED, conflicts=(*_WEIGHTS, *_COPIES, "bf16 weights", "weight noise", "reentrant checkpointing")
    ),
    "weight norm": Trait(_CALLED, conflicts=(*_WEIGHTS, "weight noise")),
    "weight norm by hook": Trait(_CALLED, conflicts=(*_WEIGHTS, *_COPIES, "weight noise")),
    "parametrization that counts": Trait(_CALLED, conflicts=("spectral norm by hook", "weight norm by hook")),
    "parametrization that draws": Trait(_CALLED, conflicts=("spectral norm by hook", "weight norm by hook")),
    "user hooks": Trait(),
    "backward hooks": Trait(),
    "global hooks": Trait(),
    # parts of the model
    "lazy head": Trait(shells=(*PLAIN, *LIGHTNING), conflicts=(*_COPIES, "frozen attention", "bf16 weights")),
    "lazy attention": Trait(
        ("separate", "fused"),
        (*PLAIN, *LIGHTNING),
        (*_WEIGHTS, *_COPIES, "frozen attention", "frozen block", "bf16 weights"),
    ),
    "frozen block": Trait(HAND_WRITTEN),
    "frozen attention": Trait(tuple(family for family in FAMILIES if family != "lora")),
    "tied blocks": Trait(HAND_WRITTEN),
    "tied head": Trait((*HAND_WRITTEN, "torch encoder"), conflicts=("lazy head",)),
    "teacher in evaluation mode": Trait(),
    "attention on meta": Trait(shells=PLAIN, conflicts=("bf16 weights", *COMPILED)),
    "attention of one token": Trait(),
    "padding": Trait(),
    # how it is trained
    "bf16 autocast": Trait(conflicts=_PRECISIONS),
    "loss scale": Trait(shells=PLAIN, conflicts=_PRECISIONS),
    "bf16 weights": Trait(shells=PLAIN, conflicts=_PRECISIONS),
    "two optimizers": Trait(shells=(*PLAIN, "lightning, manual")),
    "accumulation": Trait(),
    "clipping": Trait(),
    "evaluation": Trait(),
    "rollout": Trait(),
    "rollout in training mode": Trait(),
    "two forwards": Trait(),
    "checkpointing": Trait((*HAND_WRITTEN, "torch encoder"), conflicts=_CHECKPOINTING),
    "reentrant checkpointing": Trait((*HAND_WRITTEN, "torch encoder"), conflicts=(*_CHECKPOINTING, *COMPILED)),
    "copied while training": Trait(),
    "saved whole while training": Trait(conflicts=(*_PARAMETRIZED, *COMPILED)),
    "anomaly detection": Trait(conflicts=COMPILED),
    "deterministic algorithms": Trait(),
    "resumed": Trait(conflicts=("lazy head", "lazy attention", "attention on meta", "tied head", "tied blocks")),
    "interrupted": Trait(),
    "another shape": Trait(),
    "compiled eager": Trait((*HAND_WRITTEN, "torch encoder"), (*PLAIN, *LIGHTNING), is_slow=True),
    "compiled aot_eager": Trait((*HAND_WRITTEN, "torch encoder"), (*PLAIN, *LIGHTNING), is_slow=True),
    # how it is watched
    "seldom read": Trait(),
}
_MOST = 7  # traits of one training

_QUICKLY_COMPILED = ("separate", "fused", "torch encoder")
_NOT_COMPILED = (  # each would break the graph at every layer, which takes its time and shows nothing more
    "draws of python", "draws of numpy", "draws of a generator", "global hooks", "lazy head", "lazy attention",
    "spectral norm by hook", "weight norm by hook", "parametrization that counts", "backward hooks", "another shape",
    "two forwards", "teacher in evaluation mode",
)  # fmt: skip


@dataclass(frozen=True)
class Training:
    """One training; its text says all that is needed to run it again.

    Attributes:
        family: what is trained.
        shell: who trains it.
        traits: what it has, by name.
        seed: of its numbers.
    """

    family: str = "separate"
    shell: str = "by hand"
    traits: frozenset[str] = field(default_factory=frozenset)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES or self.shell not in SHELLS or not self.traits <= set(TRAITS):
            unknown = sorted(self.traits - set(TRAITS))
            raise ValueError(f"No such training: {self.family!r} / {self.shell!r} / unknown traits {unknown}.")

    def __str__(self) -> str:
        return " / ".join([self.family, self.shell, ", ".join(sorted(self.traits)), str(self.seed)])

    def __contains__(self, trait: str) -> bool:
        assert trait in TRAITS, trait
        return trait in self.traits

    @property
    def is_compiled(self) -> bool:
        return bool(self.traits & set(COMPILED))

    @classmethod
    def parse(cls, text: str) -> Training:
        """Read what `str` gave."""
        family, shell, traits, seed = (part.strip() for part in text.split("/"))
        names = frozenset(name.strip() for name in traits.split(", ") if name.strip())
        return cls(family, shell, names, int(seed))


def fits(trait: str, family: str, shell: str, others: Collection[str]) -> bool:
    """Tell whether a training can have a trait."""
    one = TRAITS[trait]
    if family not in one.families or shell not in one.shells:
        return False
    if trait == "resumed" and (family, shell) == _NOT_SAVED:
        return False
    if any(trait != other and (trait in TRAITS[other].conflicts or other in one.conflicts) for other in others):
        return False
    compiled, uncompiled = {trait, *others} & set(COMPILED), {trait, *others} & set(_NOT_COMPILED)
    return len(compiled) < 2 and not (compiled and uncompiled)


def draw(seed: int, count: int) -> list[Training]:
    """Draw trainings; families, shells and traits are dealt like cards, so that a few dozen have nearly all of them."""
    chance = random.Random(seed)
    families, shells, traits = _Deck(FAMILIES, chance), _Deck(SHELLS, chance), _Deck(_quick(), chance)
    drawn = []
    for place in range(count):
        family, shell = families.deal(), shells.deal()
        chosen: list[str] = []
        if place % 12 == 11:  # a handful is compiled
            family, shell = chance.choice(_QUICKLY_COMPILED), chance.choice((*PLAIN, *PLAIN, *LIGHTNING))
            chosen.append(chance.choice(COMPILED))
        for _ in range(chance.randint(0, 3 if chosen else _MOST)):
            trait = traits.deal()
            if trait not in chosen and fits(trait, family, shell, chosen):
                chosen.append(trait)
        drawn.append(Training(family, shell, frozenset(chosen), chance.randrange(10**6)))
    return drawn


def _quick() -> list[str]:
    return [name for name, trait in TRAITS.items() if not trait.is_slow]


class _Deck:
    """Deals all cards in random order, then all of them again."""

    def __init__(self, cards: Collection[str], chance: random.Random) -> None:
        self._cards, self._chance, self._left = list(cards), chance, list[str]()

    def deal(self) -> str:
        if not self._left:
            self._left = self._chance.sample(self._cards, len(self._cards))
        return self._left.pop()
