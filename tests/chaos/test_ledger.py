"""What the ledger finds: lost, doubled and foreign groups, other numbers, other bits."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.buffer import REPLACEMENT_STRIDE
from learner.checkpoint import Checkpoint, OptimizerState
from tests.chaos.ledger import Ledger, check_counts, check_ledger, check_weights

N, B = 4, 2


def rows(lag: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "iteration": i + 1,
            "incarnation": i // 2,
            "group_ids": [B * i, B * i + 1],
            "policy_version": max(0, i - lag),
            "counts": {"images": 8},
            "reward": {"mean": 0.25},
            "loss": 0.5,
            "grad_norm": 2.0,
        }
        for i in range(N)
    ]


def check(found: list[dict[str, Any]], lag: int = 0) -> Ledger:
    return check_ledger(found, rows(lag), groups_per_batch=B, max_policy_lag=lag, num_iterations=N)


@pytest.mark.parametrize("lag", [0, 1])
def test_right_books_are_right(lag: int) -> None:
    assert check(rows(lag), lag).is_exact


def test_a_lost_group_is_found() -> None:
    found = rows()
    found[1]["group_ids"] = [2]
    books = check(found)
    assert (books.lost, books.doubled) == ([3], [])
    assert not books.is_exact


def test_a_doubled_group_is_found() -> None:
    found = rows()
    found[2]["group_ids"] = [4, 5, 3]
    books = check(found)
    assert (books.lost, books.doubled) == ([], [3])
    assert not books.is_exact


def test_a_replacement_counts_for_its_position_and_is_a_difference() -> None:
    found = rows()
    found[0]["group_ids"] = [0, 1 + REPLACEMENT_STRIDE]
    books = check(found)
    assert (books.lost, books.doubled) == ([], [])
    assert books.wrong == [f"iteration 1: group_ids is [0, {1 + REPLACEMENT_STRIDE}], not [0, 1]"]


def test_a_missing_iteration_and_what_it_held_are_found() -> None:
    books = check(rows()[:2] + rows()[3:])
    assert books.lost == [4, 5]
    assert "iterations [1, 2, 4]" in books.wrong


def test_groups_beyond_the_end_are_found() -> None:
    found = rows()
    found[3]["group_ids"] = [6, 7, 8]
    assert "groups [8] are beyond the run's end" in check(found).wrong


def test_incarnations_that_go_back_are_found() -> None:
    found = rows()
    found[3]["incarnation"] = 0
    assert check(found).wrong == ["incarnations go back: [0, 0, 1, 0]"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("counts", {"images": 9}),
        ("reward", {"mean": 0.25000000000000006}),
        ("loss", 0.5000000000000001),
        ("grad_norm", 2.0000000000000004),
    ],
)
def test_another_number_is_found(key: str, value: Any) -> None:
    found = rows()
    found[2][key] = value
    (text,) = check(found).wrong
    assert text.startswith(f"iteration 3: {key} is ")


def test_a_version_that_the_rule_does_not_give_is_found_in_both_runs_alike() -> None:
    found = rows(lag=1)
    books = check_ledger(found, found, groups_per_batch=B, max_policy_lag=0, num_iterations=N)
    assert books.wrong[0] == "iteration 2: sampled with version 0, not 1"


def kept() -> Checkpoint:
    tensor = torch.arange(6.0).reshape(2, 3)
    return Checkpoint(
        weights={"a": tensor, "b": tensor + 1},
        optimizer=OptimizerState(3, {"a": tensor + 2}, {"a": tensor + 3}),
        ema={"a": tensor + 4},
        policy_version=3,
        identity={},
        config_digest="",
        state={"consumed": 3},
    )


def test_equal_weights_are_equal() -> None:
    assert check_weights(kept(), kept()) == []


@pytest.mark.parametrize("name", ["weights", "ema", "exp_avg", "exp_avg_sq"])
def test_one_other_bit_is_found(name: str) -> None:
    found = deepcopy(kept())
    part = found.optimizer if name.startswith("exp") else found
    tensor = getattr(part, name)["a"]
    tensor[1, 2] = torch.nextafter(tensor[1, 2], torch.tensor(100.0))
    assert check_weights(found, kept()) == [f"{name}: a differs"]


def test_missing_tensors_and_other_steps_are_found() -> None:
    found = replace(kept(), weights={"a": kept().weights["a"]}, ema=None, policy_version=4)
    assert check_weights(found, kept()) == [
        "version, optimizer step, iterations are (4, 3, 3), not (3, 3, 3)",
        "weights: other tensors ['b']",
        "ema: other tensors ['a']",
    ]


def test_other_totals_are_found() -> None:
    keys = ("status", "iterations", "counts", "evaluation_counts", "evaluation")
    calm = {key: {"images": 1} for key in keys}
    assert check_counts(calm, calm) == []
    assert check_counts(calm | {"counts": {"images": 2}}, calm) == [
        "summary: counts is {'images': 2}, not {'images': 1}"
    ]
