"""Models of timm, where it is installed: what is read is right, and what is not what it looks like is refused."""

from __future__ import annotations

import pytest

from tests.attention.sweep import vision
from tests.skips import NEEDS_TORCHVISION

pytestmark = pytest.mark.skipif(not vision.is_here(), reason=NEEDS_TORCHVISION)

# model -> heads and widths as they were asked for
RIGHT = {
    "vit_tiny_patch16_224": (4, 16),
    "deit3_small_patch16_224": (4, 16),
    "vit_small_patch16_18x2_224": (4, 16),
}
# talking heads are refused; attention over channels is none over tokens
OTHERWISE = {"cait_xxs24_224": ("refused", "TalkingHeadAttn"), "xcit_nano_12_p8_224": ("right", "XCA")}


@pytest.fixture(autouse=True, scope="module")
def torchvision():
    if vision.is_here():
        vision.declare_operators()


@pytest.mark.parametrize("name", RIGHT)
def test_heads_of_timm_models_are_those_that_their_attention_computes_with(name):
    from tests.attention.sweep.examine import examine

    report = examine(f"timm.{name}")
    heads, width = RIGHT[name]
    assert report["verdict"] == "right", report["reason"]
    assert report["layers"]
    assert not report["unseen"]
    for facts in report["layers"].values():
        assert facts["claim"] == facts["heads"] == [heads, heads, width, width]


@pytest.mark.parametrize("name", OTHERWISE)
def test_layers_of_timm_other_than_softmax_attention_over_tokens_are_left_out(name):
    from tests.attention.sweep.examine import examine

    report = examine(f"timm.{name}")
    verdict, left_out = OTHERWISE[name]
    assert report["verdict"] == verdict, report["reason"]
    assert {*report["no_attention"], *(kind for kind, *_ in report["refused"].values())} == {left_out}
    assert {facts["class"] for facts in report["layers"].values()} == {"ClassAttn"}
