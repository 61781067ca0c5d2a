"""What a run is, beside its weights: where it stands in the data and what it has counted.

Together with the workers' own checkpoints this is all that a run needs to continue as if it had
never stopped. Random numbers need nothing here: their seeds follow from the step.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1


@dataclass(kw_only=True)
class RunState:
    """Plain data: everything here can be written as JSON."""

    global_steps: int
    dataloader: dict[str, Any]
    kl_coefficient: float | None = None
    """Of the KL in the reward, which an adaptive controller changes."""

    tripwires: dict[str, Any] = field(default_factory=dict)
    max_steps_duration: float = 0.0
    buffer: dict[str, Any] = field(default_factory=dict)
    """Prompts drawn and updates published so far."""

    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "RunState":
        if state.get("format") != FORMAT:
            raise ValueError(
                f"the run's state has format {state.get('format')}; this version reads {FORMAT}"
            )
        return cls(**state)
