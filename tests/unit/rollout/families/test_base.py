import numpy as np
import pytest
import torch
from PIL import Image

from rollout.config import ModelConfig
from rollout.families.base import PolicyVelocity, to_uint8
from tests.fake_family import GaussianFamily


def family() -> GaussianFamily:
    return GaussianFamily.load(ModelConfig(path=""), torch.device("cpu"))


def test_to_uint8_rounds_as_diffusers_does() -> None:
    from diffusers.image_processor import VaeImageProcessor

    images = torch.rand(2, 5, 4, 3)
    images[0, 0] = torch.tensor([0.5 / 255, 1.5 / 255, 1.0])
    expected = VaeImageProcessor.numpy_to_pil(images.numpy())
    assert isinstance(expected[0], Image.Image)
    np.testing.assert_array_equal(to_uint8(images), np.stack([np.asarray(e) for e in expected]))


def test_guidance_is_the_line_through_both_velocities_and_counts_twice() -> None:
    model = family()
    x, t = torch.randn(3, *model.latent_shape), torch.tensor([1.0, 0.6, 0.1])
    prompts = model.encode_prompts(["a", "b", "c"])
    empty = model.encode_prompts([""])
    plain = PolicyVelocity(model, model.network, 1.0, None)
    guided = PolicyVelocity(model, model.network, 2.5, empty)
    v, v_empty = (
        plain(x, t, prompts),
        plain(x, t, {name: row.expand(3, -1) for name, row in empty.items()}),
    )
    torch.testing.assert_close(guided(x, t, prompts), v_empty + 2.5 * (v - v_empty))
    assert (plain.num_network_calls, guided.num_network_calls) == (6, 6)


def test_guidance_without_the_empty_prompt_is_refused() -> None:
    model = family()
    with pytest.raises(ValueError, match=r"guidance_scale = 2\.0 needs the empty prompt"):
        PolicyVelocity(model, model.network, 2.0, None)
