"""What every model family must keep; see `rollout.families.base.Family`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rollout.config import ModelConfig
from rollout.families.base import Conditioning, Family, Part, PolicyVelocity
from rollout.families.registry import load_family
from rollout.families.trainable import (
    attach_lora,
    checksum,
    load_tensors,
    make_trainable_full,
    trainable_tensors,
)
from rollout.plan import ode_plan
from rollout.sampler import Path as Trajectories
from rollout.sampler import sample

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "two blue squares", ""]
TIMES = torch.tensor([1.0, 0.6, 0.05])


class FamilyContract:
    """Parameters: `name` and `model_config`; use a model small enough for the CPU."""

    name: str
    """Registry name or "my.module:Class"."""
    tolerance = 1e-5
    """Largest difference of one row between two batches, in units of the largest entry."""
    refusal: type[Exception] = ValueError
    """What a part that wasn't loaded raises."""

    @classmethod
    def model_config(cls, folder: Path) -> ModelConfig:
        """A float32 model of this family, written to the empty `folder` if it needs files."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
        return cls.model_config(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="class")
    @classmethod
    def family(cls, config: ModelConfig) -> Family:
        """All parts; don't change it."""
        return load_family(config, CPU)

    def states(self, family: Family) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(len(PROMPTS), *family.latent_shape, generator=generator)

    @torch.no_grad()
    def velocity(self, family: Family, network: nn.Module, conditioning: Conditioning) -> Tensor:
        return family.velocity(network, self.states(family), TIMES, conditioning)

    def assert_same(self, found: Tensor, expected: Tensor) -> None:
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, atol=self.tolerance * scale, rtol=0)

    @pytest.mark.parametrize("num_steps", [2, 4, 28])
    def test_times_fall_from_one_to_zero(self, family: Family, num_steps: int) -> None:
        times = family.times(num_steps)
        assert times.dtype == torch.float64
        assert times.shape == (num_steps + 1,)
        assert (times[0], times[-1]) == (1, 0)
        assert bool((times.diff() < 0).all())

    def test_a_loaded_network_is_frozen_and_in_eval_mode(self, family: Family) -> None:
        assert not family.network.training
        assert trainable_tensors(family.network) == {}

    def test_prompts_are_encoded_each_for_itself(self, family: Family) -> None:
        together = family.encode_prompts(PROMPTS)
        for i, prompt in enumerate(PROMPTS):
            alone = family.encode_prompts([prompt])
            assert alone.keys() == together.keys()
            for name, rows in together.items():
                assert len(rows) == len(PROMPTS), name
                assert not rows.requires_grad, name
                self.assert_same(alone[name][0], rows[i])

    def test_velocity_is_float32_and_depends_on_state_time_and_prompt(self, family: Family) -> None:
        x, conditioning = self.states(family), family.encode_prompts(PROMPTS)
        v = self.velocity(family, family.network, conditioning)
        assert v.dtype == torch.float32
        assert v.shape == x.shape
        assert v.isfinite().all()
        assert torch.equal(self.velocity(family, family.network, conditioning), v)
        turned = {name: rows.roll(1, 0) for name, rows in conditioning.items()}
        with torch.no_grad():
            for other in (
                family.velocity(family.network, -x, TIMES, conditioning),
                family.velocity(family.network, x, TIMES * 0.5, conditioning),
                family.velocity(family.network, x, TIMES, turned),
            ):
                differs = (other - v).flatten(1).abs().amax(dim=1)
                assert bool((differs > 1e-3).all())

    @torch.no_grad()
    def test_velocity_of_a_row_does_not_depend_on_the_others(self, family: Family) -> None:
        x, conditioning = self.states(family), family.encode_prompts(PROMPTS)
        together = family.velocity(family.network, x, TIMES, conditioning)
        for i in range(len(x)):
            row = slice(i, i + 1)
            own = {name: rows[row] for name, rows in conditioning.items()}
            alone = family.velocity(family.network, x[row], TIMES[row], own)
            self.assert_same(alone, together[row])

    def test_velocity_is_that_of_the_network_passed_in(
        self, family: Family, config: ModelConfig
    ) -> None:
        conditioning = family.encode_prompts(PROMPTS)
        other = load_family(config, CPU, ("network",))
        make_trainable_full(other.network)
        load_tensors(other.network, perturbed(other.network))
        v = self.velocity(family, other.network, conditioning)
        assert torch.equal(v, self.velocity(other, other.network, conditioning))
        assert not torch.allclose(v, self.velocity(family, family.network, conditioning))

    def test_decoded_images_are_in_range_each_for_itself(self, family: Family) -> None:
        sizes = (0.0, 1.0, 30.0)
        latents = torch.stack([f * x for f, x in zip(sizes, self.states(family), strict=True)])
        images = family.decode(latents)
        assert images.dtype == torch.float32
        assert images.ndim == 4
        assert images.shape[::3] == (len(latents), 3)
        assert 0 <= float(images.min()) < float(images.max()) <= 1
        for i in range(len(latents)):
            self.assert_same(family.decode(latents[i : i + 1])[0], images[i])

    @pytest.mark.parametrize("parts", [("network",), ("text",), ("decoder",)])
    def test_a_part_works_alone_and_the_others_refuse(
        self, family: Family, config: ModelConfig, parts: tuple[Part, ...]
    ) -> None:
        partial = load_family(config, CPU, parts)
        conditioning, latents = family.encode_prompts(PROMPTS), self.states(family)
        assert partial.latent_shape == family.latent_shape
        if "network" in parts:
            v = self.velocity(partial, partial.network, conditioning)
            assert torch.equal(v, self.velocity(family, family.network, conditioning))
        if "text" in parts:
            assert checksum(partial.encode_prompts(PROMPTS)) == checksum(conditioning)
        else:
            with pytest.raises(self.refusal, match="text"):
                partial.encode_prompts(PROMPTS)
        if "decoder" in parts:
            assert torch.equal(partial.decode(latents), family.decode(latents))
        else:
            with pytest.raises(self.refusal, match="decoder"):
                partial.decode(latents)

    def test_without_parts_the_network_has_its_names_and_shapes(
        self, family: Family, config: ModelConfig
    ) -> None:
        def shapes(one: Family) -> dict[str, torch.Size]:
            return {name: tensor.shape for name, tensor in one.network.named_parameters()}

        assert shapes(load_family(config, CPU, ())) == shapes(family)

    def test_lora_fits_its_targets_starts_without_effect_and_gets_gradients(
        self, family: Family, config: ModelConfig
    ) -> None:
        conditioning = family.encode_prompts(PROMPTS)
        network = self.with_lora(config, family.lora_targets)
        v = family.velocity(network, self.states(family), TIMES, conditioning)
        expected = self.velocity(family, family.network, conditioning)
        torch.testing.assert_close(v, expected, atol=0, rtol=0)
        v.square().sum().backward()
        gradients = {name: p.grad for name, p in trainable_tensors(network).items()}
        learns: set[str] = set()
        for name, gradient in gradients.items():
            assert gradient is not None, name
            assert gradient.isfinite().all(), name
            if gradient.any():
                learns.add(name.split(".lora_B.")[0])
        for target in family.lora_targets:  # in some block: the last one's text branch may end
            assert any(name.endswith(target) for name in learns), target

    def test_trained_tensors_carry_the_policy_to_another_network(
        self, family: Family, config: ModelConfig, tmp_path: Path
    ) -> None:
        conditioning = family.encode_prompts(PROMPTS)
        learner_side = self.with_lora(config, family.lora_targets)
        load_tensors(learner_side, perturbed(learner_side))
        trained = trainable_tensors(learner_side)
        worker_side = self.with_lora(config, family.lora_targets)
        load_tensors(worker_side, {name: tensor.clone() for name, tensor in trained.items()})
        assert checksum(trainable_tensors(worker_side)) == checksum(trained)
        v = self.velocity(family, worker_side, conditioning)
        assert torch.equal(v, self.velocity(family, learner_side, conditioning))
        assert not torch.allclose(v, self.velocity(family, family.network, conditioning))
        family.save_lora(tmp_path / "lora", trained, alpha=6.0)
        assert list((tmp_path / "lora").rglob("*.safetensors"))

    def test_the_whole_network_is_exported(
        self, family: Family, config: ModelConfig, tmp_path: Path
    ) -> None:
        """That the library opens what was written is for the family's own tests."""
        network = load_family(config, CPU, ("network",)).network
        make_trainable_full(network)
        family.save_full(tmp_path / "full", trainable_tensors(network))
        assert list((tmp_path / "full").rglob("*.safetensors"))

    def test_an_ode_rollout_ends_in_images_each_for_itself_and_repeats(
        self, family: Family
    ) -> None:
        together = self.roll_out(family, range(len(PROMPTS)))
        assert together.states.isfinite().all()
        assert torch.equal(self.roll_out(family, range(len(PROMPTS))).states, together.states)
        images = family.decode(together.states[-1])
        assert images.std() > 0
        for i in range(len(PROMPTS)):
            self.assert_same(self.roll_out(family, [i]).states[:, 0], together.states[:, i])

    def roll_out(self, family: Family, rows: range | list[int]) -> Trajectories:
        """Four Euler steps from the rows' own noise and prompts."""
        conditioning = family.encode_prompts([PROMPTS[i] for i in rows])
        policy = PolicyVelocity(family, family.network, 1.0, None)
        noise = self.states(family)[list(rows)]
        plan = ode_plan(family.times(4))
        return sample(lambda x, t: policy(x, t, conditioning), noise, plan, no_noise)

    def with_lora(self, config: ModelConfig, targets: tuple[str, ...]) -> nn.Module:
        """A network of its own with LoRA of rank 2 on every published target."""
        network = load_family(config, CPU, ("network",)).network
        attach_lora(network, rank=2, alpha=6.0, targets=targets, seed=0)
        return network


def perturbed(network: nn.Module) -> dict[str, Tensor]:
    tensors = trainable_tensors(network)
    return {name: t.detach() + 0.1 * torch.randn_like(t) for name, t in tensors.items()}


def no_noise(step: int) -> Tensor:
    raise AssertionError(f"step {step} of an ODE asks for noise")
