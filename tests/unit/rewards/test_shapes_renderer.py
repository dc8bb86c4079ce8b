import numpy as np
import pytest

from rewards.shapes.geometry import AREA_FRAC, CENTROID_Y_FRAC, coverage
from rewards.shapes.grammar import CATEGORIES, CLASSES, all_records
from rewards.shapes.renderer import GAP, RELATION_AXIS, SIDE, objects_of, place, render


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("side", [9.0, 11.3, 14.0])
def test_coverage_has_the_stated_area_and_centroid(name, side):
    y, x = np.mgrid[-12:12, -12:12] + 0.5
    alpha = coverage(name, x, y, side)
    area = alpha.sum()
    # Pixel coverage by distance rounds the corners: a triangle's tips lose most.
    assert area == pytest.approx(AREA_FRAC[name] * side**2, rel=0.05)
    assert (alpha * y).sum() / area == pytest.approx(CENTROID_Y_FRAC[name] * side, abs=0.15)
    assert (alpha * x).sum() / area == pytest.approx(0.0, abs=1e-9)


def test_coverage_names_an_unknown_class():
    with pytest.raises(ValueError, match="'star'"):
        coverage("star", np.zeros(1), np.zeros(1), 5.0)


@pytest.mark.parametrize("category", CATEGORIES)
def test_placed_objects_stay_inside_and_apart_and_in_relation(category):
    rng = np.random.default_rng(1)
    for record in all_records(category)[:40]:
        entries = objects_of(record, rng)
        sides, centers = place(entries, rng)
        assert len(entries) == sum(item["count"] for item in record["include"])
        assert (centers - sides[:, None] / 2 >= 1.0 - 1e-9).all()
        assert (centers + sides[:, None] / 2 <= 31.0 + 1e-9).all()
        assert (sides >= SIDE[len(entries)][0]).all()
        for i, entry in enumerate(entries):
            for j in range(i):
                apart = np.abs(centers[i] - centers[j]).max()
                assert apart >= (sides[i] + sides[j]) / 2 + GAP
            if entry["position"]:
                relation, target = entry["position"]
                axis, sign = RELATION_AXIS[relation]
                assert sign * (centers[target] - centers[i])[axis] > 10.0


def test_render_is_uint8_and_follows_the_generator():
    record = all_records("color_attr")[0]
    image = render(record, np.random.default_rng(3))
    assert image.shape == (32, 32, 3)
    assert image.dtype == np.uint8
    assert np.array_equal(image, render(record, np.random.default_rng(3)))
    assert not np.array_equal(image, render(record, np.random.default_rng(4)))


def test_too_many_objects_are_refused():
    record = {"include": [{"class": "circle", "count": 5}]}
    with pytest.raises(ValueError, match="got 5"):
        objects_of(record, np.random.default_rng(0))
