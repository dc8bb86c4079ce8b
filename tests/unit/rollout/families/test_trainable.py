import copy

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from rollout.families.sd3 import SD3Family
from rollout.families.trainable import (
    attach_lora,
    checksum,
    load_tensors,
    lora_disabled,
    make_trainable_full,
    trainable_tensors,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"to_q": nn.Linear(6, 4), "other": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["other"](self.inner["to_q"](x))


def with_lora(seed: int = 3, alpha: float = 5.0) -> Small:
    torch.manual_seed(0)
    network = Small()
    attach_lora(network, rank=2, alpha=alpha, targets=["to_q"], seed=seed)
    return network


def trained(network: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in trainable_tensors(network).items()}


def test_only_the_targets_get_lora_and_only_lora_trains() -> None:
    network = with_lora()
    assert list(trainable_tensors(network)) == [
        "inner.to_q.lora_A.default.weight",
        "inner.to_q.lora_B.default.weight",
    ]


def test_lora_starts_at_zero_effect_with_gaussian_a_of_std_one_over_rank() -> None:
    network = nn.Sequential(nn.Linear(4000, 4))
    x = torch.randn(2, 4000)
    before = network(x)
    attach_lora(network, rank=4, alpha=8.0, targets=["0"], seed=0)
    torch.testing.assert_close(network(x), before, rtol=0, atol=0)
    a, b = trainable_tensors(network).values()
    assert abs(a.std().item() - 0.25) < 0.01
    assert not b.any()


def test_lora_depends_on_its_seed_alone_and_leaves_the_global_generator() -> None:
    first, again, other = with_lora(3), with_lora(3), with_lora(4)
    assert checksum(trainable_tensors(first)) == checksum(trainable_tensors(again))
    assert checksum(trainable_tensors(first)) != checksum(trainable_tensors(other))


def test_lora_is_float32_on_a_half_precision_network() -> None:
    network = Small().bfloat16()
    attach_lora(network, rank=2, alpha=2.0, targets=["to_q"], seed=0)
    assert {p.dtype for p in trainable_tensors(network).values()} == {torch.float32}
    load_tensors(network, trained(network))
    assert network(torch.randn(3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_every_published_target_exists_in_sd3(tiny_sd3) -> None:
    network = SD3Transformer2DModel.from_pretrained(tiny_sd3 / "transformer")
    attach_lora(network, rank=2, alpha=2.0, targets=SD3Family.lora_targets, seed=0)
    # to_add_out is missing in the last block, whose text branch ends
    assert len(trainable_tensors(network)) == 2 * (8 + 7)


@pytest.mark.parametrize("targets", [["to_q", "to_k"], []])
def test_targets_that_match_nothing_are_named(targets: list[str]) -> None:
    wrong = r"\['to_k'\]" if targets else r"\[\]"
    with pytest.raises(ValueError, match=f"lora_targets {wrong} match no module of Small"):
        attach_lora(Small(), rank=2, alpha=2.0, targets=targets, seed=0)


def test_full_training_names_every_parameter() -> None:
    network = Small()
    make_trainable_full(network)
    assert set(trainable_tensors(network)) == {name for name, _ in network.named_parameters()}


def test_load_copies_into_the_live_parameters() -> None:
    network = with_lora()
    live = trainable_tensors(network)
    tensors = trained(network)
    load_tensors(network, tensors)
    assert checksum(live) == checksum(tensors)
    assert (
        live["inner.to_q.lora_A.default.weight"]
        is trainable_tensors(network)["inner.to_q.lora_A.default.weight"]
    )


def test_load_lists_what_differs_and_copies_nothing() -> None:
    network = with_lora()
    before = checksum(trainable_tensors(network))
    tensors = trained(network)
    a = tensors.pop("inner.to_q.lora_A.default.weight")
    tensors |= {"stranger": a, "inner.to_q.lora_B.default.weight": torch.zeros(4, 3)}
    message = (
        r"3 differences to the network's 2 trainable tensors: "
        r"inner\.to_q\.lora_B\.default\.weight has shape \[4, 3\], not \[4, 2\]; "
        r"missing inner\.to_q\.lora_A\.default\.weight; unexpected stranger"
    )
    with pytest.raises(ValueError, match=message):
        load_tensors(network, tensors)
    assert checksum(trainable_tensors(network)) == before


def test_checksum_sees_names_dtypes_shapes_and_single_bits() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    flipped = copy.deepcopy(base)
    flipped["a"][1, 2] = -0.0
    variants = [
        base,
        flipped,
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"].bfloat16(), "b": base["b"]},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"]},
    ]
    assert len({checksum(v) for v in variants}) == len(variants)
    assert checksum(dict(reversed(base.items()))) == checksum(base)
    assert checksum({"a": torch.zeros(3, 2).T, "b": base["b"]}) == checksum(base)
    assert checksum({"scalar": torch.tensor(1.0)}) != checksum({"scalar": torch.tensor(2.0)})


def test_lora_disabled_is_the_network_without_it_exactly() -> None:
    network = with_lora()
    load_tensors(network, trained(network))
    torch.manual_seed(0)
    base, x = Small(), torch.randn(5, 6)
    adapted = network(x)
    with lora_disabled(network):
        torch.testing.assert_close(network(x), base(x), rtol=0, atol=0)
        assert all(p.requires_grad for p in trainable_tensors(network).values())
        assert len(trainable_tensors(network)) == 2
    torch.testing.assert_close(network(x), adapted, rtol=0, atol=0)


def test_lora_is_enabled_again_after_an_error() -> None:
    network = with_lora()
    load_tensors(network, trained(network))
    x = torch.randn(5, 6)
    adapted = network(x)
    with pytest.raises(ZeroDivisionError), lora_disabled(network):
        raise ZeroDivisionError
    torch.testing.assert_close(network(x), adapted, rtol=0, atol=0)


def test_a_network_without_lora_has_no_reference_in_it() -> None:
    with pytest.raises(ValueError, match="Small has no LoRA to disable"), lora_disabled(Small()):
        pass
