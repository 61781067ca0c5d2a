"""An update whose rows arrive bit by bit, while the rest of the batch is still generated.

    generation        tokens .............................................. last token
    rows that end     group A    group B       group C                      group D
    passes                       [A B]                  [C ...]             [... D]  optimizer step

Weights change at the optimizer step only, so passes over finished rows may run before the others
are there: nothing is stale. One thing is not known before the end, the count that losses divide by
(`agg_loss`). Passes divide by an estimate, all rows at full length, and the gradient and the losses
are multiplied by estimate / truth once, before the step. That is the same for every
`loss_agg_mode`, as each divides by a single count of the whole mini-batch.

On a GPU generation has a stream of its own (`verl.utils.streams`) and passes stay on the usual one,
for gradients are added up on the stream on which the model was built. Rows come in CPU memory, so
`add` never waits for the device. Which losses can be computed group by group is checked by the
configuration (`verl.config.validate_overlap`).
"""

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl.utils.metric.declared import is_sum_of_shares
from verl.utils.streams import on_stream, usual_stream
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.base import Columns
from verl.workers.engine.one_device import ROW_COLUMNS, OneDeviceEngine
from verl.workers.engine.shared_packing import prompt_groups
from verl.workers.mini_batch import merge_reports, summarise
from verl.workers.schedule import cut

LOSS_COLUMNS = (
    "response_mask",
    "advantages",
    "old_log_probs",
    "ref_log_prob",
    "rollout_is_weights",
)


class GradualUpdate:
    """One optimizer step on at most `num_rows` rows with `num_columns` response columns each."""

    def __init__(
        self,
        actor: DataParallelPPOActor,
        *,
        num_rows: int,
        num_columns: int,
        temperature: float,
    ) -> None:
        assert isinstance(actor.engine, OneDeviceEngine)
        if actor.engine.get_data_parallel_size() > 1:
            raise ValueError(
                "an update bit by bit runs on one rank, and this is one of "
                f"{actor.engine.get_data_parallel_size()}; set "
                "actor_rollout_ref.actor.update_while_generating=False"
            )
        self.num_rows_run = 0
        """Rows whose passes have been started."""

        self._actor, self._engine = actor, actor.engine
        self._temperature = temperature
        self._waiting: list[TensorDict] = []
        self._num_tokens = self._num_sequences = 0
        self._counts = {
            "dp_size": 1,
            "batch_num_tokens": num_rows * num_columns,
            "global_batch_size": num_rows,
            "loss_scale_factor": actor.config.loss_scale_factor or num_columns,
        }
        self._stream = usual_stream(self._engine.device)
        self._engine.begin_step()

    def add(self, rows: TensorDict) -> None:
        """Take the rows of a finished group, and run the micro-batches that are full by now."""
        names = [name for name in (*ROW_COLUMNS, *LOSS_COLUMNS) if name in rows.keys()]  # noqa: SIM118
        tokens = rows["response_mask"].sum(-1)
        self._num_tokens += int(tokens.sum())
        self._num_sequences += int((tokens > 0).sum())
        self._waiting.append(rows.select(*names))
        self._run_passes(keeps_last=True)

    def finish(self) -> dict[str, Any]:
        """Run what is left, make the optimizer step, and report it as `update_policy` does."""
        self._run_passes(keeps_last=False)
        factor = self._correction()
        with on_stream(self._stream, self._engine.device):
            result = self._engine.finish_step(factor)
            self._engine.lr_scheduler_step()
            reports = [
                {
                    name: value * factor if is_sum_of_shares(name) else value
                    for name, value in report.items()
                }
                for report in result.metrics
            ]
            return summarise([(result, merge_reports(reports))], "actor")

    def _run_passes(self, *, keeps_last: bool) -> None:
        """Cut what waits as an ordinary update is cut; the last micro-batch may wait for more."""
        if not self._waiting:
            return
        rows = TensorDict.cat(self._waiting)
        lengths = rows["attention_mask"].sum(-1).tolist()
        micro_batching = self._actor.micro_batching()
        passes = cut(lengths, micro_batching, prompt_groups(rows))
        is_full = len(passes[-1]) == micro_batching.rows
        left = [] if is_full or not keeps_last else passes.pop()
        for places in passes:
            self._run(rows[places])
        self._waiting = [rows[left]] if left else []

    def _run(self, rows: TensorDict) -> None:
        self._actor.config.global_batch_info = dict(self._counts)
        with on_stream(self._stream, self._engine.device):
            self._engine.add_to_step(
                rows,
                self._loss,
                micro_batching=[list(range(len(rows)))],
                temperature=self._temperature,
            )
        self.num_rows_run += len(rows)

    def _loss(self, columns: Columns, rows: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        return self._actor.loss(columns, rows, prepared=(), is_on_policy=True)

    def _correction(self) -> float:
        """From the loss over the estimated count to the loss over the true one."""
        mode = self._actor.config.loss_agg_mode
        if mode == "seq-mean-token-sum-norm":  # divides by a constant
            return 1.0
        if mode == "token-mean":
            return self._counts["batch_num_tokens"] / max(self._num_tokens, 1)
        return self._counts["global_batch_size"] / max(self._num_sequences, 1)
