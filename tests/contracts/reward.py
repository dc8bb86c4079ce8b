"""What every reward must keep; see `rewards.base.Reward`."""

from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from rewards.base import Reward
from rewards.config import RewardConfig
from rewards.registry import make_reward
from tests.fakes import judge_own_canaries

Columns = dict[str, NDArray[np.float64]]


class RewardContract:
    """Parameters: `name`, `options` where the constructor needs some, and `batch`."""

    name: str
    """Registry name or "my.module:Class"."""
    options: ClassVar[dict[str, Any]] = {}
    tolerance = 0.0
    """Largest difference between two scorings of one image. More than 0 costs bit-exact replays."""

    def reward(self) -> Reward:
        """The reward under test; asked for in each test, so keep a model that loads slowly."""
        return make_reward(RewardConfig(name=self.name, options=self.options))

    def batch(self) -> tuple[NDArray[np.uint8], list[str], list[dict[str, Any]]]:
        """At least 3 images [B, H, W, 3] with prompts and metadata, whose values aren't all the
        same."""
        raise NotImplementedError

    def score(self, images: NDArray[np.uint8], rows: list[int] | None = None) -> Columns:
        """Columns of read-only `images`, with prompts and metadata of these rows of the batch."""
        _, prompts, metadata = self.batch()
        rows = list(range(len(images))) if rows is None else rows
        images = images.view()
        images.flags.writeable = False
        return self.reward()(images, [prompts[i] for i in rows], [metadata[i] for i in rows])

    def assert_equal(self, found: Columns, expected: Columns) -> None:
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=self.tolerance)

    def test_columns_are_one_finite_float64_per_image_and_one_has_its_name(self) -> None:
        images, _, _ = self.batch()
        columns = self.score(images)
        for name, values in columns.items():
            assert isinstance(name, str)
            assert values.dtype == np.float64, name
            assert values.shape == (len(images),), name
            assert np.isfinite(values).all(), name
        own = columns[self.reward().name]
        assert np.ptp(own) > 2 * self.tolerance, "batch() gives images of one value: shows nothing"

    def test_permuted_inputs_give_permuted_values(self) -> None:
        images, _, _ = self.batch()
        order = [*range(1, len(images)), 0][::-1]
        expected = {name: values[order] for name, values in self.score(images).items()}
        self.assert_equal(self.score(images[order], order), expected)

    def test_an_image_s_value_does_not_depend_on_the_others(self) -> None:
        images, _, _ = self.batch()
        together = self.score(images)
        noise = np.random.default_rng(0).integers(0, 256, (2, *images.shape[1:]), dtype=np.uint8)
        for i in range(len(images)):
            expected = {name: values[[i]] for name, values in together.items()}
            self.assert_equal(self.score(images[[i]], [i]), expected)
            crowd = self.score(np.concatenate([noise, images[[i]]]), [0, 1, i])
            self.assert_equal({name: values[2:] for name, values in crowd.items()}, expected)

    def test_the_same_call_gives_the_same_values_in_any_instance(self) -> None:
        images, prompts, metadata = self.batch()
        images.flags.writeable = False
        reward = self.reward()
        first = reward(images, prompts, metadata)
        self.assert_equal(reward(images, prompts, metadata), first)
        self.assert_equal(self.score(images), first)

    def test_inputs_are_not_modified(self) -> None:
        images, prompts, metadata = self.batch()
        kept = deepcopy((images, prompts, metadata))
        view = images.view()
        view.flags.writeable = False  # which a reward could undo
        self.reward()(view, prompts, metadata)
        np.testing.assert_array_equal(images, kept[0])
        assert (prompts, metadata) == kept[1:]

    def test_its_canaries_pass(self) -> None:
        assert judge_own_canaries(self.reward()).problems == []

    def test_blank_grey_and_noise_images_are_scored(self) -> None:
        images, _, _ = self.batch()
        noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
        for strange in (*(np.full_like(images, level) for level in (0, 128, 255)), noise):
            for values in self.score(strange).values():
                assert np.isfinite(values).all()

    @pytest.mark.parametrize("size", [(1, 1), (8, 8), (24, 40), (64, 64)])
    def test_other_sizes_are_scored_or_refused_with_a_value_error(
        self, size: tuple[int, int]
    ) -> None:
        images = np.random.default_rng(0).integers(0, 256, (2, *size, 3), dtype=np.uint8)
        try:
            columns = self.score(images)
        except ValueError:
            return
        assert all(np.isfinite(v).all() and v.shape == (2,) for v in columns.values())
