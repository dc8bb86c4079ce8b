from pathlib import Path

import torch

from rollout.config import ModelConfig
from rollout.embeddings import PromptEmbeddings
from rollout.families.base import Conditioning
from rollout.families.sd3 import SD3Family
from tests.fake_family import GaussianFamily


class CountingFamily(GaussianFamily):
    """Remembers what it was asked to encode."""

    def encode_prompts(self, prompts: list[str]) -> Conditioning:
        self.asked = [*getattr(self, "asked", []), *prompts]
        return super().encode_prompts(prompts)


def counting() -> CountingFamily:
    return CountingFamily(torch.device("cpu"), ("network", "text", "decoder"))


def test_rows_follow_the_prompts_and_each_is_encoded_once() -> None:
    family = counting()
    embed = PromptEmbeddings(family, "float32")
    expected = family.encode_prompts(["b", "a", "b"])["embedding"]
    family.asked = []
    torch.testing.assert_close(embed(["b", "a", "b"])["embedding"], expected, rtol=0, atol=0)
    torch.testing.assert_close(embed(["a"])["embedding"], expected[1:2], rtol=0, atol=0)
    assert family.asked == ["b", "a"]


def test_the_least_recently_used_prompt_is_forgotten() -> None:
    family = counting()
    embed = PromptEmbeddings(family, "float32", capacity=2)
    for prompt in "abaca":
        embed([prompt])
    assert family.asked == ["a", "b", "c"]
    embed(["b"])
    assert family.asked == ["a", "b", "c", "b"]


def test_what_is_used_is_what_a_float16_record_can_hold() -> None:
    embed = PromptEmbeddings(counting(), "float16")
    value = embed(["a"])["embedding"]
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.half().float(), value, rtol=0, atol=0)


def test_an_embedding_does_not_depend_on_its_company(tiny_sd3: Path) -> None:
    config = ModelConfig(path=str(tiny_sd3))
    family = SD3Family.load(config, torch.device("cpu"), ("text",))
    alone = PromptEmbeddings(family, "float32")(["a red circle"])
    together = PromptEmbeddings(family, "float32")(["two", "a red circle", "three"])
    for name, value in alone.items():
        torch.testing.assert_close(together[name][1:2], value, rtol=0, atol=0)
