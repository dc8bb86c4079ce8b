"""The only door to DeepSpeed: one network, one optimizer, any ZeRO stage, gradients that are sums.

What DeepSpeed would do by itself and is undone here, so that the gradient is that of the losses as
passed, whatever the number of ranks and micro-steps: its division by accumulation steps (off), its
mean over ranks (the loss is multiplied by their number), its own counting of micro-steps (the
caller says which backward is an update's last).
"""

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from learner.checkpoint import MOMENTS, OptimizerState
from learner.config import LearnerConfig
from rollout.families.trainable import trainable_tensors

# Read at DeepSpeed's import. A learner without GPU must not look for one, nor for a compiler.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
import deepspeed.ops
from deepspeed.utils import (
    logger,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

PERSISTENT_NUMEL = 100_000
"""ZeRO-3 leaves parameters of fewer elements whole on every rank (DeepSpeed's default)."""
MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
)
"""Where DeepSpeed's three ZeRO optimizers keep this rank's flat float32 parameters."""


def init_distributed(
    rank: int, world_size: int, master_addr: str = "127.0.0.1", master_port: int = 0, *, gpu: bool
) -> None:
    """Join the process group, NCCL on GPUs and gloo otherwise; a lone rank needs no port. Does
    nothing when joined.

    Raises ValueError when this process is already in a group of another shape.
    """
    logger.setLevel(logging.ERROR)
    # DeepSpeed calls torch functions by names that torch 2.13 has begun to rename.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
    # Joining the group would build this op, and fail on a machine without a C++ compiler; nothing
    # here uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["LOCAL_RANK"] = "0"  # Ray shows each rank its own GPU alone
    if distributed.is_initialized():
        joined = (distributed.get_rank(), distributed.get_world_size())
        if joined != (rank, world_size):
            raise ValueError(
                f"this process is rank {joined[0]} of {joined[1]} already, "
                f"not {rank} of {world_size}"
            )
    else:
        where: dict[str, Any] = {"init_method": f"tcp://{master_addr}:{master_port}"}
        if world_size == 1:
            # gloo opens a socket even for one rank: it has nobody to talk to beyond this machine.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            where = {"store": distributed.HashStore()}  # pyright: ignore[reportPrivateImportUsage]
        distributed.init_process_group(
            "nccl" if gpu else "gloo",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=30),
            **where,
        )
    deepspeed.init_distributed("nccl" if gpu else "gloo", auto_mpi_discovery=False)


def deepspeed_config(config: LearnerConfig, num_trainable: int) -> dict[str, Any]:
    """Translate our settings; `num_trainable` elements bound the communication buffers."""
    bf16 = config.precision == "bf16"
    bucket = min(max(num_trainable, 1), 500_000_000)
    table: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only multiplied into numbers that nobody reads
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "steps_per_print": 1_000_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            # DeepSpeed's own stage 0 steps bf16 weights wrongly (one dummy step at its start, state
            # out of reach); stage 1 keeps float32 masters that can be read and set.
            "stage": max(config.zero_stage, 1) if bf16 else config.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_param_persistence_threshold": PERSISTENT_NUMEL,
        },
    }
    if bf16:
        table["bf16"] = {"enabled": True, "check_grad_overflow": True}
        table["data_types"] = {"grad_accum_dtype": "fp32"}
    return table


class Engine:
    """A network's trainable tensors, and how they are stepped. Every method is collective: all
    ranks call it."""

    def __init__(
        self, network: nn.Module, config: LearnerConfig, rank: int, world_size: int
    ) -> None:
        """Wrap `network`, whose trainable parameters require grad already. `init_distributed` comes
        first.

        Raises ValueError when nothing is trainable.
        """
        names = list(trainable_tensors(network))
        if not names:
            raise ValueError(f"{type(network).__name__} has no trainable parameter")
        self.module, self.rank, self.world_size = network, rank, world_size
        live = dict(network.named_parameters())
        self._params: dict[str, nn.Parameter] = {name: live[name] for name in names}
        bf16 = config.precision == "bf16"
        self.dtypes = {n: torch.bfloat16 if bf16 else p.dtype for n, p in self._params.items()}
        """dtype of the live tensor by name."""
        optimizer = torch.optim.AdamW(
            list(self._params.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        table = deepspeed_config(config, sum(p.numel() for p in self._params.values()))
        self._stage = table["zero_optimization"]["stage"]
        self._masters_are_live = self._stage < 3 and not bf16
        self._engine: Any = deepspeed.initialize(
            model=network, optimizer=optimizer, config=table, dist_init_required=False
        )[0]

    @property
    def network(self) -> nn.Module:
        """What to call forward on, so that ZeRO-3's hooks fire."""
        return self._engine

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self._engine.device

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of the scalar `loss`, a SUM over transitions already divided by the
        global denominator.

        last: whether this is the update's last backward, after which gradients are summed over the
        ranks.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def step(self) -> float:
        """Clip, step, clear the gradients; return their norm over all ranks before clipping.

        When that norm isn't finite no weight changes, and the caller must not go on.
        """
        if self._stage == 0:
            norm = float(
                nn.utils.get_total_norm(
                    [p.grad for p in self._params.values() if p.grad is not None]
                )
            )
            if norm - norm != 0:
                self.discard_gradients()
                return norm
        self._engine.step()
        return norm if self._stage == 0 else float(self._engine.get_global_grad_norm())

    def discard_gradients(self) -> None:
        """Forget what backward has accumulated."""
        self._engine.optimizer.zero_grad(set_to_none=True)
        if self._stage in (1, 2):
            getattr(self._engine.optimizer, "averaged_gradients", {}).clear()

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradient between the update's last backward and its step: float32 on the
        CPU, rank 0's."""
        return self._gathered(safe_get_full_grad)

    def full_tensors(self) -> dict[str, Tensor]:
        """Return copies of all trainable tensors: whole, float32, on the CPU; {} on other ranks
        than 0.

        Names are those of `trainable_tensors`. bf16 weights come from their float32 masters.
        """
        return self._gathered((lambda p: p) if self._masters_are_live else safe_get_full_fp32_param)

    def load_full_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put `tensors` (whole, given on every rank) into weights and masters. ValueError when the
        names differ."""
        self._check_names(tensors)
        with torch.no_grad():
            if self._stage == 3:
                with deepspeed.zero.GatheredParameters(
                    list(self._params.values()), modifier_rank=0
                ):
                    if self.rank == 0:
                        for name, param in self._params.items():
                            param.copy_(tensors[name])
                for name, param in self._params.items():
                    safe_set_local_fp32_param(param, self._own_part(param, tensors[name]))
                return
            for name, param in self._params.items():
                param.copy_(tensors[name])
                if self._stage:
                    safe_set_full_fp32_param(param, tensors[name].to(param.device, torch.float32))

    def optimizer_state(self) -> OptimizerState:
        """Gather AdamW's state; zeros before the first step. Moments are empty on other ranks than
        0."""
        state = self._torch_state()
        self._link_state()
        get = self._stage_zero_state if self._stage == 0 else safe_get_full_optimizer_state
        exp_avg, exp_avg_sq = (self._gathered(lambda p, key=key: get(p, key)) for key in MOMENTS)
        return OptimizerState(int(next(iter(state.values()))["step"]), exp_avg, exp_avg_sq)

    def load_optimizer_state(self, saved: OptimizerState) -> None:
        """Put a state, given whole on every rank, in place of the present one. ValueError when the
        names differ."""
        for moments in (saved.exp_avg, saved.exp_avg_sq):
            self._check_names(moments)
        for state in self._torch_state().values():
            state["step"].fill_(saved.step)
        self._link_state()
        for key in MOMENTS:
            for name, param in self._params.items():
                value = getattr(saved, key)[name].to(param.device, torch.float32)
                if self._stage == 0:
                    self._stage_zero_state(param, key).copy_(value)
                elif self._stage == 3:
                    safe_set_local_optimizer_state(param, self._own_part(param, value), key)
                else:
                    safe_set_full_optimizer_state(param, value, key)

    def all_reduce(self, values: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """Combine a small tensor over the ranks."""
        if self.world_size > 1:
            values = values.to(self.device)
            distributed.all_reduce(
                values, distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX
            )
        return values.cpu()

    def _gathered(self, get: Callable[[nn.Parameter], Any]) -> dict[str, Tensor]:
        """Whole float32 CPU copies, one parameter after the other; kept on rank 0."""
        kept: dict[str, Tensor] = {}
        for name, param in self._params.items():
            whole = get(param)
            if self.rank == 0:
                kept[name] = whole.detach().to("cpu", torch.float32, copy=True)
        return kept

    def _torch_state(self) -> dict[Any, dict[str, Tensor]]:
        """torch's own AdamW state of this rank's (flat) parameters, made like its first step would
        if there is none."""
        if self._stage == 0:
            owned, optimizer = list(self._params.values()), self._engine.optimizer
        else:
            attribute = next(name for name in MASTERS if hasattr(self._engine.optimizer, name))
            owned, optimizer = (
                getattr(self._engine.optimizer, attribute),
                self._engine.optimizer.optimizer,
            )
        for param in owned:
            if not optimizer.state[param]:
                moments = {key: torch.zeros_like(param, requires_grad=False) for key in MOMENTS}
                optimizer.state[param].update(step=torch.tensor(0.0), **moments)
        return optimizer.state

    def _link_state(self) -> None:
        """ZeRO-1 and 2 find a parameter's moments only after their first step, or this."""
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _stage_zero_state(self, param: nn.Parameter, key: str) -> Tensor:
        return self._engine.optimizer.state[param][key]

    def _own_part(self, param: Any, whole: Tensor) -> Tensor:
        """This rank's part of a ZeRO-3 parameter, zeros behind its end (safe_set_full_* forget that
        padding)."""
        size = param.ds_tensor.numel()
        flat = torch.zeros(size * self.world_size, device=param.device)
        flat[: whole.numel()] = whole.flatten()
        return flat[self.rank * size : (self.rank + 1) * size]

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        different = sorted(tensors.keys() ^ self._params.keys())
        if different:
            raise ValueError(
                f"{len(different)} names differ from the network's trainable tensors: "
                f"{different[:5]}"
            )
