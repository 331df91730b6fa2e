"""The words of docs/glossary.md, and words of a language of our own that they have replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hdi_callback

REPLACED = {
    r"\bowed\b": "pending",
    r"\b(?:is|are|was|were) told\b(?! apart)": "warned of, notified",
    r"\btells? of\b": "reports",
    r"\blets? go of\b": "release, discard",
    r"\bpass(?:es|ed)? over\b": "skip",
    r"\bwhat came\b(?! back)": "the value",
    r"\bwhat is known of\b": "facts about",
    r"\bheld against\b": "compared with",
    r"\btakes? up where\b": "restore the state of",
    r"\bleaves? (?:nothing|no hook) behind\b": "remove all hooks",
    r"\bused up\b": "overwritten",
    r"\bcompany\b": "other callbacks",
    r"\bon the way\b": "pending, meanwhile",
    r"\basked of\b": "judges, decides",
}
"""What a reader had to read twice -> what the code says instead."""


ANY = re.compile("|".join(REPLACED))


def replaced_words(text: str) -> list[str]:
    """Find what was replaced, also where a sentence goes on in the next line of a comment or a string."""
    lines = (line.strip().strip("\"'#").removeprefix('f"').strip() for line in text.lower().split("\n"))
    return ANY.findall(" ".join(lines))


def sources(root: Path) -> list[Path]:
    return sorted((root / "hdi_callback").rglob("*.py"))


def test_words_that_were_replaced_do_not_return(root):
    others = [*(root / "examples").rglob("*.py"), *(root / "docs").rglob("*.md")]
    paths = [*sources(root), root / "README.md", *others]
    found = {path.relative_to(root).as_posix(): replaced_words(path.read_text()) for path in paths}
    assert {path: words for path, words in found.items() if words} == {}, "see REPLACED for what to write"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("# The user is told once.", 1),
        ("# heads that cannot be told apart", 0),
        ("# Let go\n    # of what was kept.", 1),
        ('message = "it is passed "\n    "over"', 1),
        ("# the rate is allowed", 0),
    ],
)
def test_replaced_words_are_found_across_lines_and_only_whole(text, count):
    assert len(replaced_words(text)) == count


@pytest.fixture
def glossary(root):
    rows = (root / "docs" / "glossary.md").read_text().split("|---|---|\n")[1].strip().split("\n")
    return dict(re.fullmatch(r"\| (.+?) \| (.+) \|", row).groups() for row in rows)


def test_the_glossary_has_twenty_words_each_with_one_meaning(glossary):
    assert len(glossary) == 20
    assert all(meaning[0].islower() or meaning[0].isdigit() or meaning[0] == "`" for meaning in glossary.values())


def test_the_names_in_the_glossary_are_public(glossary):
    named = {name for meaning in glossary.values() for name in re.findall(r"`([A-Z]\w{2,})`", meaning)}
    assert {"AttentionLayer", "HeadDiversityMonitor", "Session"} <= named
    public = {*hdi_callback.__all__, *hdi_callback.rules.__all__, *hdi_callback.interventions.__all__}
    assert named <= public


def test_each_word_of_the_glossary_is_used_in_the_code(glossary, root):
    code = " ".join(re.sub(r"\s+", " ", path.read_text()) for path in sources(root)).lower()
    for word in glossary:
        assert re.sub(r" \(.*\)", "", word).lower() in code, word


RIDDLES = re.compile(
    r"test_(?:what|where|of|such|so|it|whatever)_|_(?:said|told|ones_own|found_out|heeded|anew)(?:_|$)"
)
"""Names without a subject, and words that a reader of test output has to read twice."""


def test_names_of_tests_begin_with_a_subject_and_are_short(root):
    found = [
        name
        for path in sorted((root / "tests").rglob("test_*.py"))
        for name in re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)
        if RIDDLES.search(name.replace("told_apart", "distinguished")) or len(name) > 115
    ]
    assert found == [], "subject, behaviour, condition: test_a_dead_head_overlaps_with_nothing"
