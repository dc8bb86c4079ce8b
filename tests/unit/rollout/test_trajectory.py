import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollout.config import SamplingConfig
from rollout.flow.schedule import shifted_times
from rollout.plan import make_plan
from rollout.records import GroupRequest, SliceRequest
from rollout.trajectory import (
    HEADER_KEY,
    VERSION_KEY,
    Header,
    read_group,
    read_header,
    read_ipc,
    read_previews,
    seal_group,
    slice_batch,
    write_ipc,
)

T, N, LATENT = 4, 6, (2, 3)
RNG = np.random.default_rng(0)
STATES = RNG.standard_normal((N, T + 1, *LATENT), dtype=np.float32)
LOG_PROBS = RNG.standard_normal((N, T), dtype=np.float32)
LOG_PROBS[:, T - 1] = np.nan
EMBEDDINGS = {
    "conditioning.prompt_embeds": RNG.standard_normal((5, 4), dtype=np.float32),
    "conditioning.pooled": RNG.standard_normal(3, dtype=np.float32),
}
TOTALS = RNG.standard_normal((N, T + 1))
TOTALS[:, 1] = np.nan
PARTS = {"shapes": TOTALS - 1, "jpeg": TOTALS + 1}


def header(**changes: Any) -> Header:
    sampling = SamplingConfig(num_steps=T, num_substeps=3)
    made = Header(
        plan=make_plan(sampling, shifted_times(T, 3.0), "all"),
        run_seed=2**62 + 1,
        latent_shape=LATENT,
        log_prob_reduction="mean",
        embedding_dtype="float32",
        embedding_shapes={name: value.shape for name, value in EMBEDDINGS.items()},
    )
    return dataclasses.replace(made, **changes)


def group(**changes: Any) -> GroupRequest:
    fields = {
        "group_id": 7,
        "prompt": "a red circle",
        "metadata": {"tag": "colors", "include": [{"class": "circle", "count": 1}]},
        "num_samples": N,
        "run_seed": 2**62 + 1,
        "policy_version": 3,
        "incarnation": 2,
    }
    return GroupRequest(**(fields | changes))


def one_slice(first: int, count: int, made: Header | None = None, **changes: Any) -> pa.RecordBatch:
    request = SliceRequest(group=group(**changes), first=first, count=count, score_initial=True)
    part = slice(first, first + count)
    previews = [[b"png", None, b"png", b"png", b"png"] if i == 0 else None for i in range(count)]
    return slice_batch(
        made or header(), request, STATES[part], LOG_PROBS[part], EMBEDDINGS, previews
    )


def sealed() -> pa.RecordBatch:
    return seal_group([one_slice(4, 2), one_slice(0, 3), one_slice(3, 1)], TOTALS, PARTS)


def test_a_group_comes_back_as_it_was() -> None:
    read = read_group(sealed())
    assert (read.group_id, read.policy_version, read.incarnation) == (7, 3, 2)
    assert (read.prompt, read.metadata) == ("a red circle", group().metadata)
    np.testing.assert_array_equal(read.states, STATES)
    np.testing.assert_array_equal(read.log_probs, LOG_PROBS)
    np.testing.assert_array_equal(read.rewards, TOTALS)
    assert (read.states.dtype, read.log_probs.dtype) == (np.float32, np.float32)
    assert read.rewards.dtype == np.float64
    assert list(read.parts) == ["shapes", "jpeg"]
    for name, values in PARTS.items():
        np.testing.assert_array_equal(read.parts[name], values)
    for name, value in EMBEDDINGS.items():
        np.testing.assert_array_equal(read.embeddings[name], value)
    assert read.header == header()


def test_the_header_survives_to_the_last_bit() -> None:
    made = read_header(one_slice(0, N))
    assert made == header()
    assert made.plan.times == tuple(shifted_times(T, 3.0).tolist())


def test_states_and_embeddings_are_views() -> None:
    batch = sealed()
    read = read_group(batch)
    buffer = batch.column("states").flatten().buffers()[1]
    assert read.states.__array_interface__["data"][0] == buffer.address
    assert not read.states.flags.writeable
    assert not read.embeddings["conditioning.pooled"].flags.owndata


def test_unscored_states_and_steps_without_noise_are_null() -> None:
    batch = sealed()
    assert batch.column("log_probs")[0].as_py()[T - 1] is None
    assert batch.column("reward")[2].as_py()[1] is None
    assert batch.column("reward.jpeg").type == pa.list_(pa.float64())
    assert batch.column("states").type == pa.list_(pa.float32(), (T + 1) * 6)


def test_embeddings_are_stored_once_a_group() -> None:
    column = sealed().column("conditioning.prompt_embeds")
    assert column.is_valid().to_pylist() == [True] + [False] * (N - 1)
    assert len(column.flatten()) == 20


def test_embeddings_may_be_half_precision() -> None:
    half = header(embedding_dtype="float16")
    batch = seal_group([one_slice(0, N, half)], TOTALS, {})
    found = read_group(batch).embeddings["conditioning.pooled"]
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, EMBEDDINGS["conditioning.pooled"].astype(np.float16))


def test_previews_ride_along_with_few_rows() -> None:
    previews = read_previews(sealed())
    assert [row is None for row in previews] == [False, True, True, False, False, True]
    assert previews[0] == [b"png", None, b"png", b"png", b"png"]


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "a group without slices"),
        ([(0, 3), (4, 2)], r"group 7 needs the samples 0 \.\. 5 once each, got \[0, 1, 2, 4, 5\]"),
        ([(0, 3), (2, 4)], r"once each, got \[0, 1, 2, 2, 3, 4, 5\]"),
        ([(1, 5)], r"once each, got \[1, 2, 3, 4, 5\]"),
    ],
)
def test_sealing_needs_every_sample_once(slices: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seal_group([one_slice(*part) for part in slices], TOTALS, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_id": 8}, r"differ in group_id: \[7, 8\]"),
        ({"incarnation": 3}, r"differ in incarnation: \[2, 3\]"),
        ({"policy_version": 4}, r"differ in policy_version: \[3, 4\]"),
        ({"prompt": "a blue circle"}, "differ in prompt"),
        ({"metadata": {}}, "differ in metadata"),
    ],
)
def test_sealing_refuses_slices_of_different_groups(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seal_group([one_slice(0, 3), one_slice(3, 3, **change)], TOTALS, {})


def test_sealing_refuses_slices_made_differently() -> None:
    with pytest.raises(ValueError, match="carry 2 different headers"):
        seal_group([one_slice(0, 3), one_slice(3, 3, header(run_seed=1))], TOTALS, {})


def test_sealing_refuses_rewards_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"reward\.x has shape \(6, 4\), not \(6, 5\)"):
        seal_group([one_slice(0, N)], TOTALS, {"x": TOTALS[:, 1:]})


def test_an_unsealed_slice_is_no_group() -> None:
    with pytest.raises(ValueError, match="a slice, not a sealed group"):
        read_group(one_slice(0, N))


def with_version(batch: pa.RecordBatch, version: bytes) -> pa.RecordBatch:
    return batch.replace_schema_metadata(batch.schema.metadata | {VERSION_KEY: version})


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    other = with_version(sealed(), b"999")
    message = "recorded with trajectory schema version 999, this code reads version 1"
    with pytest.raises(ValueError, match=message):
        read_group(other)
    write_ipc(tmp_path / "groups.arrow", [other])
    with pytest.raises(ValueError, match=message):
        read_ipc(tmp_path / "groups.arrow")


def test_foreign_arrow_data_is_refused() -> None:
    with pytest.raises(ValueError, match="not a recorded group"):
        read_group(pa.RecordBatch.from_pydict({"a": [1]}))


def test_ipc_files_open_with_plain_pyarrow_and_memory_map(tmp_path: Path) -> None:
    path = tmp_path / "groups.arrow"
    write_ipc(path, [sealed(), sealed()])
    assert os.listdir(tmp_path) == ["groups.arrow"]

    table = pa.ipc.open_file(path).read_all()
    assert table.num_rows == 2 * N
    assert table.column("reward.shapes")[0].as_py()[0] == pytest.approx(PARTS["shapes"][0, 0])
    assert HEADER_KEY in table.schema.metadata
    np.testing.assert_array_equal(read_group(read_ipc(path)[1]).states, STATES)


def test_reading_a_file_copies_no_states(tmp_path: Path) -> None:
    states = np.ones((N, T + 1, 100, 100), dtype=np.float32)
    request = SliceRequest(group=group(), first=0, count=N, score_initial=True)
    made = header(latent_shape=(100, 100))
    batch = slice_batch(made, request, states, LOG_PROBS, EMBEDDINGS, [None] * N)
    write_ipc(tmp_path / "big.arrow", [seal_group([batch], TOTALS, PARTS)])
    before = pa.total_allocated_bytes()
    read = read_group(read_ipc(tmp_path / "big.arrow")[0])
    assert pa.total_allocated_bytes() - before < states.nbytes / 10
    np.testing.assert_array_equal(read.states, states)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.arrow"
    write_ipc(path, [sealed()])
    other_columns = one_slice(0, N)
    with pytest.raises(pa.ArrowInvalid):
        write_ipc(path, [sealed(), other_columns])
    assert len(read_ipc(path)) == 1
    assert os.listdir(tmp_path) == ["groups.arrow"]
