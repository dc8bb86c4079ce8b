"""Prompt embeddings, encoded once and kept."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch

from rollout.families.base import Conditioning, Family


class PromptEmbeddings:
    """A family's prompt encoder behind a cache of the most recently used prompts.

    Each prompt is encoded alone, so that its embedding doesn't depend on what else was asked for: a
    resumed worker, whose cache is empty, gets the same bits. Embeddings are float32 on the family's
    device, rounded to the storage type, so that what is recorded is what was sampled with.
    """

    def __init__(
        self, family: Family, storage_dtype: Literal["float32", "float16"], capacity: int = 4096
    ) -> None:
        self._family, self._capacity = family, capacity
        self._dtype: torch.dtype = getattr(torch, storage_dtype)
        self._kept: OrderedDict[str, Conditioning] = OrderedDict()

    def __call__(self, prompts: Sequence[str]) -> Conditioning:
        """Return the embeddings of `prompts`, named tensors with one row each."""
        rows = [self._one(prompt) for prompt in prompts]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _one(self, prompt: str) -> Conditioning:
        if prompt not in self._kept:
            encoded = self._family.encode_prompts([prompt])
            self._kept[prompt] = {
                name: row.to(self._dtype).float() for name, row in encoded.items()
            }
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        self._kept.move_to_end(prompt)
        return self._kept[prompt]
