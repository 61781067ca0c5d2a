"""On-policy distillation: who teaches a row, what teachers read, and how they are asked.

The loss is in `verl.workers.actor.distiller`, the mathematics in `verl.algos.distillation`.
"""

from verl.trainer.distillation.teaching import Teaching, refuse_other_tokenizer

__all__ = ["Teaching", "refuse_other_tokenizer"]
