import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rollout.config import ModelConfig, RolloutConfig, SamplingConfig
from rollout.families.base import to_uint8
from rollout.families.sd3 import SD3Family
from rollout.families.trainable import attach_lora, checksum, trainable_tensors
from rollout.flow import noise
from rollout.flow.gaussian import log_prob
from rollout.flow.kernels import step, step_mean
from rollout.plan import network_calls_per_group, scored_images_per_group
from rollout.records import AdapterSpec, GroupRequest, SampleResult, SliceRequest
from rollout.trajectory import read_group, read_previews, seal_group
from rollout.worker import RolloutWorker
from tests.fake_family import DATA_STD, GaussianFamily

T, N, SEED = 4, 6, 11
GAUSSIAN = ModelConfig(family="tests.fake_family:GaussianFamily", path="")
LORA = AdapterSpec(rank=2, alpha=5.0)


def worker(
    model: ModelConfig = GAUSSIAN,
    adapter: AdapterSpec = LORA,
    credit: Any = "all",
    settings: RolloutConfig | None = None,
    **sampling: Any,
) -> RolloutWorker:
    """A worker with trained-looking weights of version 0."""
    made = RolloutWorker(
        model,
        SamplingConfig(**({"num_steps": T} | sampling)),
        settings or RolloutConfig(),
        adapter,
        SEED,
        credit,
    )
    made.load_weights(0, weights(made))
    return made


def weights(made: RolloutWorker, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    live = trainable_tensors(made.family.network)
    return {
        name: t.detach() + 0.3 * torch.randn(t.shape, generator=generator)
        for name, t in live.items()
    }


def group(group_id: int = 0, **changes: Any) -> GroupRequest:
    fields = {"group_id": group_id, "prompt": f"a circle {group_id}", "metadata": {"id": group_id}}
    fields |= {"num_samples": N, "run_seed": SEED, "policy_version": 0}
    return GroupRequest(**(fields | changes))


def part(of: GroupRequest, first: int = 0, count: int = N, **more: Any) -> SliceRequest:
    settings = {"score_initial": first == 0} | more
    return SliceRequest(group=of, first=first, count=count, **settings)


def states(result: SampleResult, index: int = 0) -> np.ndarray:
    """float32 [n, T + 1, D]"""
    batch = result.slices[index]
    return batch.column("states").flatten().to_numpy().reshape(batch.num_rows, T + 1, -1)


def sealed(result: SampleResult) -> Any:
    return read_group(seal_group(result.slices, np.zeros((N, T + 1)), {}))


@pytest.mark.parametrize("family", ["gaussian", "sd3"])
def test_any_transition_can_be_redrawn_from_its_record(family: str, tiny_sd3: Path) -> None:
    model = GAUSSIAN if family == "gaussian" else ModelConfig(path=str(tiny_sd3))
    made = worker(model)
    read = sealed(made.sample([part(group(5))]))
    plan, shape = read.header.plan, read.header.latent_shape
    conditioning = {
        name.removeprefix("conditioning."): torch.from_numpy(value.copy()).expand(N, *value.shape)
        for name, value in read.embeddings.items()
    }
    recorded = torch.from_numpy(read.states.copy())
    x_T = noise.initial_noise(shape, read.header.run_seed, 5, 3, plan.shared_initial_noise)
    assert torch.equal(recorded[3, 0], x_T)
    for i in range(1, T):  # at step 0 the rollout ran one row
        x_t, t = recorded[:, i], torch.full((N,), plan.times[i])
        with torch.no_grad():
            v = made.family.velocity(made.family.network, x_t, t, conditioning)
        mean = step_mean(x_t, v, plan.times[i], plan.times[i + 1], plan.noise_coefficient[i])
        drawn = [noise.step_noise(shape, read.header.run_seed, 5, n, i) for n in range(N)]
        x_next = step(mean, plan.std[i], torch.stack(drawn))
        assert torch.equal(x_next, recorded[:, i + 1])
        if plan.std[i] > 0:
            again = log_prob(x_next, mean, plan.std[i]).numpy()
            np.testing.assert_array_equal(again, read.log_probs[:, i])
        else:
            assert np.isnan(read.log_probs[:, i]).all()


@pytest.mark.parametrize("shared", [True, False])
def test_slices_sampled_apart_equal_the_group_sampled_whole(tiny_sd3: Path, shared: bool) -> None:
    made = worker(ModelConfig(path=str(tiny_sd3)), shared_initial_noise=shared)
    whole = made.sample([part(group(1))])
    apart = [made.sample([part(group(1), first, 2)]) for first in (0, 2, 4)]
    first, second = read_group(seal_group(whole.slices, np.zeros((N, T + 1)), {})), None
    second = read_group(
        seal_group([s for answer in apart for s in answer.slices], np.zeros((N, T + 1)), {})
    )
    np.testing.assert_array_equal(first.states[:, 0], second.states[:, 0])
    np.testing.assert_allclose(first.states, second.states, atol=2e-5)
    np.testing.assert_allclose(first.log_probs, second.log_probs, atol=2e-5)
    for name, value in first.embeddings.items():
        np.testing.assert_array_equal(value, second.embeddings[name])


def test_one_call_of_several_groups_equals_single_calls() -> None:
    made = worker()
    together = made.sample([part(group(1)), part(group(2), 2, 3), part(group(1), 0, 2)])
    for i, request in enumerate([part(group(1)), part(group(2), 2, 3), part(group(1), 0, 2)]):
        alone = made.sample([request])
        np.testing.assert_allclose(states(together, i), states(alone), atol=1e-5)
    np.testing.assert_allclose(states(together, 2), states(together, 0)[:2], atol=1e-5)


def test_results_do_not_depend_on_what_was_sampled_before() -> None:
    made, fresh = worker(), worker()
    made.sample([part(group(9))])
    np.testing.assert_array_equal(
        states(made.sample([part(group(1))])), states(fresh.sample([part(group(1))]))
    )


def test_a_group_shares_its_initial_noise_unless_told_otherwise() -> None:
    shared = states(worker().sample([part(group())]))
    assert (shared[:, 0] == shared[0, 0]).all()
    assert len(np.unique(shared[:, 1], axis=0)) == N
    own = states(worker(shared_initial_noise=False).sample([part(group())]))
    assert len(np.unique(own[:, 0], axis=0)) == N


def test_previews_are_the_decoded_clean_estimates_with_their_tags() -> None:
    made = worker(scored_states=[0, 2, T])
    result = made.sample([part(group(3), 2, 3, score_initial=True), part(group(4), 0, 2)])
    previews = result.previews
    assert previews.states.tolist() == [0, 0] + [2] * 5 + [T] * 5
    assert previews.group_ids.tolist() == [3, 4] + [3, 3, 3, 4, 4] * 2
    assert previews.samples.tolist() == [2, 0] + [2, 3, 4, 0, 1] * 2
    assert previews.prompts == [f"a circle {g}" for g in previews.group_ids]
    assert previews.metadata == [{"id": g} for g in previews.group_ids]
    assert previews.images.shape == (12, 4, 4, 3)
    assert previews.images.dtype == np.uint8
    final = np.concatenate([states(result, 0)[:, T], states(result, 1)[:, T]])
    decoded = made.family.decode(torch.from_numpy(final).reshape(5, 3, 4, 4))
    np.testing.assert_array_equal(previews.images[-5:], to_uint8(decoded))


def test_initial_noise_is_scored_only_where_the_request_says_so() -> None:
    made = worker()
    assert 0 not in made.sample([part(group(), 2, 2)]).previews.states
    own = worker(shared_initial_noise=False)
    assert (own.sample([part(group(), 2, 2, score_initial=True)]).previews.states == 0).sum() == 2


def test_refined_previews_are_nearer_to_where_the_ode_leads() -> None:
    """At x_T, T' = 1 gives the prompt's mean; the exact flow map of Gaussian data keeps the noise."""
    made = {substeps: worker(num_substeps=substeps, scored_states=[0, T]) for substeps in (1, 64)}
    images = {k: w.sample([part(group())]).previews.images[0] for k, w in made.items()}
    family = made[1].family
    assert isinstance(family, GaussianFamily)
    embedding = family.encode_prompts(["a circle 0"])["embedding"]
    x_T = noise.initial_noise(family.latent_shape, SEED, 0, 0, True)
    with torch.no_grad():
        centre = family.network.centre(embedding).reshape(1, 3, 4, 4)
    for substeps, spread, tolerance in ((1, 0.0, 1), (64, DATA_STD, 3)):
        expected = to_uint8(family.decode(centre + spread * x_T))[0]
        difference = np.abs(images[substeps].astype(int) - expected.astype(int))
        assert difference.max() <= tolerance


@pytest.mark.parametrize("substeps", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("scored", ["all", "final", [0, 2, T], [1, T]])
def test_the_plans_counts_are_the_workers_own(
    substeps: int, shared: bool, guidance: float, scored: Any
) -> None:
    made = worker(
        num_substeps=substeps,
        shared_initial_noise=shared,
        scored_states=scored,
        guidance_scale=guidance,
        cfg_mode="train",
        settings=RolloutConfig(estimate_batch=5),
    )
    for size in (N, 2):
        requests = [
            part(group(g), first, size, score_initial=first == 0 or not shared)
            for g in (0, 1)
            for first in range(0, N, size)
        ]
        stats = made.sample(requests).stats
        calls = network_calls_per_group(made.plan, N, N // size)
        assert stats.num_network_calls == 2 * calls
        assert stats.num_previews == 2 * scored_images_per_group(made.plan, N)
        assert (stats.num_images, stats.num_transitions) == (2 * N, 2 * N * T)
        assert min(stats.sample_s, stats.decode_s, stats.record_s) > 0


def test_guided_records_hold_the_empty_prompt() -> None:
    guided = sealed(worker(guidance_scale=2.0, cfg_mode="train").sample([part(group())]))
    assert list(guided.embeddings) == ["conditioning.embedding", "negative.embedding"]
    assert not guided.embeddings["negative.embedding"].any()
    plain = sealed(worker().sample([part(group())]))
    assert list(plain.embeddings) == ["conditioning.embedding"]


def test_embeddings_are_recorded_as_they_were_used() -> None:
    half = worker(settings=RolloutConfig(embedding_dtype="float16"))
    read = sealed(half.sample([part(group())]))
    assert read.embeddings["conditioning.embedding"].dtype == np.float16
    used = half._embed(["a circle 0"])["embedding"][0].numpy()
    np.testing.assert_array_equal(read.embeddings["conditioning.embedding"], used)


def test_kept_previews_are_pngs_of_the_previews() -> None:
    result = worker(scored_states=[0, 1, T]).sample([part(group(), 0, 3, keep_previews=2)])
    rows = read_previews(result.slices[0])
    assert rows[2] is None
    kept = [[state for state, png in enumerate(row or []) if png] for row in rows]
    assert kept == [[0, 1, T], [1, T], []], "the shared x_T belongs to the first trajectory"
    assert rows[1] is not None
    assert rows[1][T] is not None
    drawn = np.asarray(Image.open(io.BytesIO(rows[1][T])))
    final = result.previews.images[result.previews.states == T]
    np.testing.assert_array_equal(drawn, final[1])


def test_loading_reports_what_the_module_holds() -> None:
    made = worker()
    tensors = weights(made, seed=1)
    report = made.load_weights(7, tensors)
    assert report.version == made.version == 7
    assert (report.num_tensors, report.checksum) == (2, checksum(tensors))


def test_loaded_weights_change_what_is_sampled() -> None:
    made = worker()
    before = states(made.sample([part(group())]))
    made.load_weights(1, weights(made, seed=1))
    after = states(made.sample([part(group(policy_version=1))]))
    assert np.abs(before - after).max() > 0.05


def test_the_learners_lora_fits_the_worker(tiny_sd3: Path) -> None:
    model = ModelConfig(path=str(tiny_sd3))
    learner_side = SD3Family.load(model, torch.device("cpu"), ("network",))
    attach_lora(learner_side.network, 2, 5.0, SD3Family.lora_targets, seed=123)
    tensors = trainable_tensors(learner_side.network)
    made = RolloutWorker(model, SamplingConfig(num_steps=T), RolloutConfig(), LORA, SEED)
    assert made.load_weights(0, tensors).checksum == checksum(tensors)


def test_only_the_loaded_version_is_sampled() -> None:
    made = worker()
    with pytest.raises(ValueError, match="group 3 wants policy version 2, but version 0 is loaded"):
        made.sample([part(group(3, policy_version=2))])
    fresh = RolloutWorker(GAUSSIAN, SamplingConfig(), RolloutConfig(), LORA, SEED)
    with pytest.raises(ValueError, match="wants policy version 0, but none is loaded"):
        fresh.sample([part(group())])


def test_impossible_requests_are_refused() -> None:
    made = worker()
    with pytest.raises(ValueError, match="at least one slice request"):
        made.sample([])
    with pytest.raises(ValueError, match="group 0 has run_seed 1, but this worker 11"):
        made.sample([part(group(run_seed=1))])


def test_weights_that_are_not_finite_draw_no_black_images() -> None:
    """uint8 has no NaN: it would be 0."""
    made = worker()
    tensors = weights(made)
    tensors[min(tensors)].flatten()[0] = torch.nan
    made.load_weights(7, tensors)
    with pytest.raises(RuntimeError, match="policy version 7 gives latents that are not finite"):
        made.sample([part(group(policy_version=7))])
    with pytest.raises(RuntimeError, match="policy version 7 gives latents that are not finite"):
        made.evaluate(["a"], [0], num_steps=3)


def test_a_decoder_that_overflows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker()
    decode = made.family.decode
    monkeypatch.setattr(made.family, "decode", lambda latents: decode(latents) + torch.nan)
    with pytest.raises(RuntimeError, match="policy version 0 gives images that are not finite"):
        made.sample([part(group())])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_missed_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"gpus_per_worker = 1\.0, but this process sees no GPU"):
        worker(settings=RolloutConfig(gpus_per_worker=1))


@pytest.mark.parametrize("kind", ["lora", "full", "none"])
def test_the_adapter_decides_what_is_trainable(kind: Any) -> None:
    made = worker(adapter=AdapterSpec(adapter=kind, targets=("centre",)))
    expected = {"lora": 2, "full": 2, "none": 0}[kind]
    assert len(trainable_tensors(made.family.network)) == expected


def test_evaluation_depends_on_prompt_noise_and_weights_alone() -> None:
    made = worker()
    prompts, ids = [f"prompt {i}" for i in range(5)], [3, 1, 4, 1, 5]
    one = made.evaluate(prompts, ids, num_steps=3)
    alone = made.evaluate(prompts[2:3], ids[2:3], num_steps=3)
    np.testing.assert_array_equal(one.initial_latents[2], alone.initial_latents[0])
    np.testing.assert_array_equal(one.initial_latents[1], one.initial_latents[3])
    np.testing.assert_allclose(one.images[2].astype(int), alone.images[0].astype(int), atol=1)
    other = made.evaluate(prompts, ids, num_steps=3, noise_seed=1)
    assert (one.initial_latents != other.initial_latents).all()
    training = noise.initial_noise(made.family.latent_shape, 0, 1, 0, shared=True).numpy()
    assert (one.initial_latents[1] != training).all()


def test_evaluation_counts_and_batches() -> None:
    small = worker(settings=RolloutConfig(estimate_batch=2))
    prompts = [f"prompt {i}" for i in range(5)]
    found = small.evaluate(prompts, list(range(5)), num_steps=3, guidance_scale=2.0)
    assert found.images.shape == (5, 4, 4, 3)
    assert (found.stats.num_images, found.stats.num_transitions) == (5, 15)
    assert (found.stats.num_network_calls, found.stats.num_previews) == (30, 5)
    whole = worker().evaluate(prompts, list(range(5)), num_steps=3, guidance_scale=2.0)
    np.testing.assert_allclose(found.images.astype(int), whole.images.astype(int), atol=1)


def test_evaluation_needs_a_noise_id_for_each_prompt() -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 noise ids"):
        worker().evaluate(["a", "b"], [0], num_steps=3)
