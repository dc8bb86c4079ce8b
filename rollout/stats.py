"""Counts and seconds of rollout work. Imports no torch."""

from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class RolloutStats:
    """What one or more calls of a rollout worker did; `+` adds calls up. All seconds are of one
    process's clock."""

    num_images: int = 0
    """Finished trajectories."""
    num_transitions: int = 0
    """Steps taken, T for each trajectory."""
    num_network_calls: int = 0
    """Latents that went through the network; a guided velocity counts two."""
    num_previews: int = 0
    """Clean estimates decoded, outcomes included."""
    encode_s: float = 0.0
    """Encoding prompts that the cache didn't hold."""
    sample_s: float = 0.0
    """Noise, velocities, kernels, log-probs."""
    estimate_s: float = 0.0
    """Clean estimates."""
    decode_s: float = 0.0
    """Decoding previews to uint8."""
    record_s: float = 0.0
    """Moving trajectories into Arrow, PNG previews included."""

    def __add__(self, other: "RolloutStats") -> "RolloutStats":
        return RolloutStats(
            **{
                item.name: getattr(self, item.name) + getattr(other, item.name)
                for item in fields(self)
            }
        )
