"""Groups of trajectories as Arrow record batches, and back. Needs pyarrow and numpy alone, no
torch.

One sealed group is one record batch, one row a trajectory. It holds facts only: no advantages,
which whoever reads it computes. The schema's metadata (`Header`) says how the trajectories were
made, so that a recorded file stands alone: any noise can be redrawn from run_seed, group_id, sample
and step (rollout.flow.noise).

    group_id int64, sample int32, incarnation int32, policy_version int64
    prompt string, metadata string (JSON)
    states               fixed_size_list<float32>[(T + 1) D]  states 0 .. T, D numbers each, flat
    log_probs            list<float32>[T]                     null where std is 0
    conditioning.<name>  list<float32 or float16>             prompt embedding; row of sample 0 only
    negative.<name>      the same of the empty prompt         only with guidance
    preview_png          list<binary>[T + 1]                  null for most rows, and where unscored
    reward               list<float64>[T + 1]                 the total, null where unscored
    reward.<component>   list<float64>[T + 1]

The reward columns come with sealing; a slice has none.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import RecordBatch

from rollout.plan import StepPlan
from rollout.records import SliceRequest

SCHEMA_VERSION = 1
VERSION_KEY, HEADER_KEY = b"flowcredit.schema_version", b"flowcredit.header"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """How a file's trajectories were made; equal in every record batch of a run."""

    plan: StepPlan
    run_seed: int
    latent_shape: tuple[int, ...]
    log_prob_reduction: str
    """How log-probs reduce latent dimensions (rollout.flow.gaussian.LOG_PROB_REDUCTION)."""
    embedding_dtype: Literal["float32", "float16"]
    """Storage type of the prompt embeddings; the rollout sampled with embeddings rounded to it."""
    embedding_shapes: dict[str, tuple[int, ...]]
    """Shape of one prompt's embedding by name ("conditioning.<name>", "negative.<name>")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTrajectories:
    """A sealed group as numpy arrays; N trajectories. `states` and `embeddings` are views of the
    Arrow memory."""

    header: Header
    group_id: int
    incarnation: int
    policy_version: int
    prompt: str
    metadata: dict[str, Any]
    states: np.ndarray
    """float32 [N, T + 1, *latent_shape]."""
    log_probs: np.ndarray
    """float32 [N, T]; NaN where std is 0."""
    rewards: np.ndarray
    """float64 [N, T + 1], the totals; NaN where unscored."""
    parts: dict[str, np.ndarray]
    """Reward components by name, like `rewards`."""
    embeddings: dict[str, np.ndarray]
    """The group's prompt: "conditioning.<name>" and, with guidance, "negative.<name>"; one array
    each, no batch axis."""


def slice_batch(
    header: Header,
    request: SliceRequest,
    states: np.ndarray,
    log_probs: np.ndarray,
    embeddings: Mapping[str, np.ndarray],
    previews: Sequence[list[bytes | None] | None],
) -> RecordBatch:
    """Build the record batch of one slice of n trajectories, without rewards.

    states float32 [n, T + 1, *latent_shape]; log_probs float32 [n, T] with NaN where std is 0;
    embeddings by the names and shapes of header.embedding_shapes, kept if the slice holds sample 0;
    previews n entries, PNG by state.
    """
    group, n = request.group, request.count
    width = int(np.prod(states.shape[1:]))
    columns: dict[str, Any] = {
        "group_id": pa.array([group.group_id] * n, pa.int64()),
        "sample": pa.array(range(request.first, request.first + n), pa.int32()),
        "incarnation": pa.array([group.incarnation] * n, pa.int32()),
        "policy_version": pa.array([group.policy_version] * n, pa.int64()),
        "prompt": pa.array([group.prompt] * n, pa.string()),
        "metadata": pa.array([json.dumps(group.metadata)] * n, pa.string()),
        "states": pa.FixedSizeListArray.from_arrays(pa.array(states.reshape(-1)), width),
        "log_probs": _nullable_lists(log_probs, pa.float32()),
    }
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(header.embedding_dtype)))
    for name in header.embedding_shapes:
        first = (
            [embeddings[name].astype(header.embedding_dtype).reshape(-1)]
            if request.first == 0
            else [None]
        )
        columns[name] = pa.array(first + [None] * (n - 1), kind)
    columns["preview_png"] = pa.array(list(previews), pa.list_(pa.binary()))
    batch = pa.RecordBatch.from_pydict(columns)
    return batch.replace_schema_metadata(
        {VERSION_KEY: str(SCHEMA_VERSION), HEADER_KEY: json.dumps(asdict(header))}
    )


def seal_group(
    slices: Sequence[RecordBatch], totals: np.ndarray, parts: Mapping[str, np.ndarray]
) -> RecordBatch:
    """Join a group's slices, in any order, and add its rewards: float64 [N, T + 1] each, NaN where
    unscored.

    Row i of `totals` and of every part is sample i. Raises ValueError unless the slices hold the
    samples 0 .. N - 1 exactly once, agree in group, incarnation, policy version, prompt and header,
    and the rewards have their shape.
    """
    if not slices:
        raise ValueError("a group without slices can't be sealed")
    headers = {batch.schema.metadata[HEADER_KEY] for batch in slices}
    if len(headers) != 1:
        raise ValueError(f"slices of one group carry {len(headers)} different headers")
    ordered = sorted(slices, key=lambda batch: batch.column("sample")[0].as_py())
    joined = pa.concat_batches(ordered)
    for name in ("group_id", "incarnation", "policy_version", "prompt", "metadata"):
        values = joined.column(name).unique().to_pylist()
        if len(values) != 1:
            raise ValueError(f"slices of one group differ in {name}: {values}")
    samples, num_samples = joined.column("sample").to_pylist(), len(totals)
    if samples != list(range(num_samples)):
        raise ValueError(
            f"group {joined.column('group_id')[0]} needs the samples 0 .. {num_samples - 1} "
            f"once each, got {samples}"
        )
    num_states = len(read_header(joined).plan.times)
    columns = {"reward": totals} | {f"reward.{name}": values for name, values in parts.items()}
    for name, values in columns.items():
        if values.shape != (num_samples, num_states):
            raise ValueError(f"{name} has shape {values.shape}, not {(num_samples, num_states)}")
        joined = joined.append_column(name, _nullable_lists(values, pa.float64()))
    return joined


def read_header(batch: RecordBatch) -> Header:
    """Return how the batch was made; ValueError when it isn't ours or of another schema version."""
    metadata = batch.schema.metadata or {}
    if VERSION_KEY not in metadata:
        raise ValueError("this Arrow data has no flowcredit schema version: not a recorded group")
    version = int(metadata[VERSION_KEY])
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"recorded with trajectory schema version {version}, this code reads version "
            f"{SCHEMA_VERSION}; read it with the flowcredit release that wrote it"
        )
    fields = json.loads(metadata[HEADER_KEY])
    plan: dict[str, Any] = fields.pop("plan")
    plan = {name: tuple(v) if isinstance(v, list) else v for name, v in plan.items()}
    shapes = {name: tuple(shape) for name, shape in fields.pop("embedding_shapes").items()}
    latent_shape = tuple(fields.pop("latent_shape"))
    return Header(
        plan=StepPlan(**plan), latent_shape=latent_shape, embedding_shapes=shapes, **fields
    )


def read_group(batch: RecordBatch) -> GroupTrajectories:
    """Return a sealed group's arrays; ValueError when the batch isn't sealed or of another schema
    version."""
    header = read_header(batch)
    if "reward" not in batch.schema.names:
        raise ValueError("this record batch has no rewards: a slice, not a sealed group")
    n, num_states = batch.num_rows, len(header.plan.times)
    states = batch.column("states").flatten().to_numpy(zero_copy_only=True)
    totals = _dense(batch.column("reward"), n)
    names = [name for name in batch.schema.names if name.startswith("reward.")]
    return GroupTrajectories(
        header=header,
        group_id=batch.column("group_id")[0].as_py(),
        incarnation=batch.column("incarnation")[0].as_py(),
        policy_version=batch.column("policy_version")[0].as_py(),
        prompt=batch.column("prompt")[0].as_py(),
        metadata=json.loads(batch.column("metadata")[0].as_py()),
        states=states.reshape(n, num_states, *header.latent_shape),
        log_probs=_dense(batch.column("log_probs"), n),
        rewards=totals,
        parts={name.removeprefix("reward."): _dense(batch.column(name), n) for name in names},
        embeddings={
            name: batch.column(name)[0].values.to_numpy(zero_copy_only=True).reshape(shape)
            for name, shape in header.embedding_shapes.items()
        },
    )


def read_previews(batch: RecordBatch) -> list[list[bytes | None] | None]:
    """Return each row's PNG previews by state, None for rows that keep none."""
    return batch.column("preview_png").to_pylist()


def write_ipc(path: str | os.PathLike[str], batches: Sequence[RecordBatch]) -> None:
    """Write sealed groups to an Arrow IPC file that pandas and DuckDB open; it appears whole or not
    at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with pa.OSFile(str(partial), "wb") as sink:
            with pa.ipc.new_file(sink, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_ipc(path: str | os.PathLike[str]) -> list[RecordBatch]:
    """Map the groups of an IPC file into memory; ValueError when it is of another schema
    version."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    for batch in batches[:1]:
        read_header(batch)
    return batches


def _nullable_lists(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Lists of one row each, [N, K], null where NaN."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), kind, from_pandas=True)
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def _dense(column: pa.Array, num_rows: int) -> np.ndarray:
    """The inverse of `_nullable_lists`."""
    return column.flatten().to_numpy(zero_copy_only=False).reshape(num_rows, -1)
