from rollout.stats import RolloutStats


def test_calls_add_up() -> None:
    total = RolloutStats(num_images=4, sample_s=0.5) + RolloutStats(num_images=2, decode_s=0.25)
    assert total == RolloutStats(num_images=6, sample_s=0.5, decode_s=0.25)
