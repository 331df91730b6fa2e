from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hdi_callback.dashboards import pictures as module
from hdi_callback.dashboards.names import HEADS, MAP
from hdi_callback.dashboards.pictures import Pictures, draw_heads, draw_map, pixels
from tests.dashboards.synthetic import collapsing, facts_of


def yellow(picture) -> np.ndarray:
    """Where a picture has the colour of an alignment near 1."""
    red, green, blue = (picture[..., channel].astype(int) for channel in range(3))
    return (red > 215) & (green > 180) & (blue < 110)


class Clock:
    """A clock that each look at moves on."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize(("layers", "heads", "layer", "pair"), [(48, 32, 17, (3, 21)), (4, 6, 2, (1, 3))])
def test_the_collapsed_layer_is_seen_in_the_map_and_its_pair_among_the_heads(layers, heads, layer, pair):
    pictures = Pictures()
    for record in collapsing(layers, heads, 40, layer=layer, pair=pair):
        drawn = pictures.add(record)
    assert set(drawn) == {MAP, HEADS}, "the last reading is always drawn"
    found = yellow(drawn[MAP])
    width = found.shape[1]
    found = found[:, : int(0.7 * width)]  # without the colour scale
    rows = np.flatnonzero(found.sum(1) > 20)
    blue = drawn[MAP][..., 2].astype(int) > drawn[MAP][..., 0].astype(int) + 30
    inside = np.flatnonzero(blue[:, : int(0.7 * width)].sum(1) > 50)
    top, bottom = inside.min(), inside.max()
    assert (rows.mean() - top) / (bottom - top) == pytest.approx((layer + 0.5) / layers, abs=0.03)
    assert np.ptp(rows) + 1 <= 1.3 * (bottom - top) / layers + 2, "and in no other row"
    assert yellow(drawn[HEADS])[:, : int(0.7 * drawn[HEADS].shape[1])].sum() > 8


def test_a_picture_takes_a_share_of_the_run_however_often_readings_come(monkeypatch):
    # Half a second for a drawing, and as long from one reading to the next.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=Clock(0.5)))
    pictures = Pictures()
    drawn = [MAP in pictures.add(record) for record in collapsing(2, 4, 400, layer=1, pair=(1, 3))]
    assert drawn[0] is False, "one reading is no map"
    assert drawn[1] is True
    assert sum(drawn) == 2, "the next one is at the end"
    assert drawn[-1] is True


def test_the_map_of_a_resumed_run_begins_with_its_past():
    records = list(collapsing(2, 4, 20, layer=1, pair=(1, 3)))
    whole, resumed = Pictures(), Pictures(past=records[:10])
    for record in records:
        one = whole.add(record)
    for record in records[10:]:
        other = resumed.add(record)
    assert np.array_equal(one[MAP], other[MAP])


def test_a_layer_that_is_not_measured_has_the_colour_of_no_alignment():
    steps = range(64)
    picture = pixels(draw_map(steps, {"a": [step / 63 for step in steps], "b": [math.nan] * 64})).astype(int)
    top, bottom = (picture[at, 60:250] for at in (len(picture) // 4, 2 * len(picture) // 3))
    nearest = np.abs(bottom[:, None] - top[None]).sum(-1).min(1)
    assert np.quantile(nearest, 0.1) > 60, "paper and hatches, and cividis is neither"
    assert len(np.unique(bottom, axis=0)) > 1, "it is hatched"


def test_a_peak_of_one_reading_is_seen_among_five_thousand():
    row = [0.0] * 5000
    row[2500] = 1.0
    assert yellow(pixels(draw_map(range(5000), {"a": row})))[:, :300].any()


def test_two_heads_and_one_reading_can_be_drawn():
    (record,) = collapsing(1, 2, 1, layer=0, pair=(0, 1))
    (layer,) = record.layers.values()
    assert pixels(draw_heads("a", 0, layer.matrices["pair_alignment"], (0, 1))).shape[-1] == 3
    assert pixels(draw_map([0], {"a": [0.3]})).shape[-1] == 3


def test_of_a_layer_in_which_all_heads_are_alike_no_two_are_marked():
    def title(alignment, **words):
        return draw_heads("a", 0, alignment, (0, 5), **words).axes[0].get_title(loc="left")

    alike = torch.full((8, 8), 0.93)
    assert title(alike, unit="key heads").endswith("all 8 key heads: alignment of at least 0.93")
    alike[2, 3] = alike[3, 2] = 0.1
    assert title(alike).endswith("heads 0 and 5: 0.93")


def test_a_picture_says_key_heads_where_heads_share_their_keys(monkeypatch):
    units = []
    monkeypatch.setattr(
        "hdi_callback.dashboards.pictures.draw_heads",
        lambda *args, unit, **more: units.append(unit) or draw_heads(*args, unit=unit, **more),
    )
    pictures = Pictures(facts_of(1, 8, key_heads=4))
    for record in collapsing(1, 4, 2, layer=0, pair=(1, 3)):
        pictures.add(record)
    assert units
    assert set(units) == {"key heads"}
