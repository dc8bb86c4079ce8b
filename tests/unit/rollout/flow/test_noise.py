from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scipy import stats

from rollout.flow.noise import draw, initial_noise, step_noise, stream_seed

SHAPE = (4, 8, 8)
PINNED_SEED = 3971908886106479936
PINNED_NOISE = [1.750702977180481, -0.4162124991416931, -1.0885905027389526, 0.6697526574134827]


def test_the_same_counters_give_the_same_bits_in_any_order_and_beside_other_draws() -> None:
    first = step_noise(SHAPE, 0, 7, 3, 5)
    torch.manual_seed(99)
    initial_noise(SHAPE, 0, 7, 3, shared=False)
    again = step_noise(SHAPE, 0, 7, 3, 5)
    assert torch.equal(first, again)
    assert first.dtype == torch.float32
    assert first.shape == SHAPE
    assert first.device.type == "cpu"


def test_drawing_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    draw(SHAPE, 1)
    assert torch.equal(torch.randn(3), expected)


def test_any_number_of_threads_in_any_order_draws_the_same_bits() -> None:
    counters = [(group, sample, i) for group in range(3) for sample in range(4) for i in range(5)]
    expected = {c: step_noise(SHAPE, 3, *c) for c in counters}
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda c: step_noise(SHAPE, 3, *c), reversed(counters)))
    for c, noise in zip(reversed(counters), drawn, strict=True):
        assert torch.equal(noise, expected[c])


def test_the_stream_is_pinned() -> None:
    """Recorded trajectories name their noise by these counters: a change breaks redrawing them."""
    assert stream_seed(0, "step", 7, 3, 5) == PINNED_SEED
    assert step_noise((4,), 0, 7, 3, 5).tolist() == pytest.approx(PINNED_NOISE, abs=1e-7)


def test_each_purpose_draws_from_the_stream_of_its_name() -> None:
    drawn = {
        (1, "initial", 2): initial_noise(SHAPE, 1, 2, 3, shared=True),
        (1, "initial", 2, 3): initial_noise(SHAPE, 1, 2, 3, shared=False),
        (1, "step", 2, 3, 4): step_noise(SHAPE, 1, 2, 3, 4),
    }
    for counters, noise in drawn.items():
        assert torch.equal(noise, draw(SHAPE, stream_seed(*counters)))


def test_no_two_purposes_or_counters_share_a_stream() -> None:
    seeds = [stream_seed(run, "initial", group) for run in range(3) for group in range(3)]
    seeds += [
        stream_seed(run, "initial", group, sample)
        for run in range(3) for group in range(12) for sample in range(12)
    ]  # fmt: skip
    seeds += [
        stream_seed(run, "step", group, sample, i)
        for run in range(3) for group in range(12) for sample in range(12) for i in range(10)
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 23), (12, 3)),
        ((1, "1"), (1, 1)),
        ((0, "a", "b"), (0, "ab")),
        ((0, "a"), (0, "a", 0)),
        ((0, "i1:1"), (0, 1)),
        ((0, -1), (0, 1)),
        ((0,), (0, "")),
    ],
)
def test_the_encoding_is_unambiguous(one, other) -> None:
    assert stream_seed(*one) != stream_seed(*other)


def test_all_bits_of_the_seed_count() -> None:
    assert not torch.equal(draw((8,), 5), draw((8,), 5 + 2**32))
    assert not torch.equal(draw((8,), 5), draw((8,), 5 + 2**62))
    with pytest.raises(ValueError, match="seed = -1"):
        draw((8,), -1)


def test_shared_initial_noise_is_one_per_group() -> None:
    one, other = (initial_noise(SHAPE, 0, 7, sample, shared=True) for sample in (0, 1))
    assert torch.equal(one, other)
    assert not torch.equal(one, initial_noise(SHAPE, 0, 8, 0, shared=True))
    apart = [initial_noise(SHAPE, 0, 7, sample, shared=False) for sample in (0, 1)]
    assert not torch.equal(*apart)
    assert not torch.equal(one, apart[0])


def test_neighbouring_streams_are_independent_standard_normals() -> None:
    rows = torch.stack([step_noise((1000,), 0, 0, sample, 0) for sample in range(100)])
    assert stats.kstest(rows.flatten().numpy(), "norm").pvalue > 0.01
    correlation = torch.corrcoef(rows) - torch.eye(100)
    assert float(correlation.abs().max()) < 5 / 1000**0.5
