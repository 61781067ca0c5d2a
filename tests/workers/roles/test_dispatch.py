"""Rows are dispatched to ranks by tokens, and results come back as if there had been one rank."""

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base.backend import Backend, Outcome
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.base.worker_group import WorkerGroup
from verl.utils.environment import temp_env_var
from verl.utils.media import MEDIA, Media, content_hash
from verl.workers.engine.inputs import ModelInputs, prompt_owners
from verl.workers.roles.dispatch import (
    UpdateSettings,
    dispatch_inference,
    dispatch_update,
    model_rows,
    planned_passes,
    row_column,
    update_plan,
    with_prompt_index,
)
from verl.workers.schedule import MicroBatching

COLUMNS = ("attention_mask", "input_ids", "responses")


def test_prompts_equal_in_ids_and_different_in_images_are_not_shared():
    pixels = [torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(2, 1)]
    images = [
        Media("image", content_hash({"pixels": x}), {"pixels": x}, np.array([0])) for x in pixels
    ]
    data = DataProto.from_dict(
        tensors={
            "input_ids": torch.tensor([[3, 4, 5]] * 4),
            "attention_mask": torch.ones(4, 3, dtype=torch.long),
            "position_ids": torch.arange(3).repeat(4, 1),
            "responses": torch.full((4, 1), 5),
        },
        non_tensors={
            "uid": np.array(["a"] * 4, dtype=object),
            MEDIA: [[image.as_plain()] for image in images],
        },
    )
    assert prompt_owners(model_rows(data), 2) == [0, 1, 0, 2]
    shared = ModelInputs.of(model_rows(data), prefix_sharing=True).parts
    assert (shared.prompts, shared.owners) == ([2, 2, 2], [0, 0, 1, 2])


class Lengths(Worker):
    """Answers with the length of each row that is in one of its passes."""

    def __init__(self, ranks_per_sequence):
        super().__init__()
        self.seen = []
        self._register_dispatch_collect_info(
            "mesh",
            dp_rank=self.rank // ranks_per_sequence,
            is_collect=self.rank % ranks_per_sequence == 0,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def inference_settings(self, model):
        return {"small": MicroBatching(rows=1), "large": MicroBatching(tokens=8)}[model]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_settings(self):
        return UpdateSettings(rows_per_step=4, micro_batching=MicroBatching(rows=1), epochs=2)

    @register(dispatch_mode=dispatch_inference("mesh", "small"), columns=COLUMNS)
    def measure(self, data):
        return self._measure(data)

    @register(dispatch_mode=dispatch_inference("mesh", "large"))
    def measure_in_large_passes(self, data):
        return self._measure(data)

    def _measure(self, data):
        self.seen.append(data)
        lengths = torch.zeros(len(data), dtype=torch.long)
        for rows in planned_passes(data) or [list(range(len(data)))]:
            lengths[rows] = data.batch["attention_mask"][rows].sum(-1)
        return DataProto.from_dict({"lengths": lengths, **row_column(data)})

    @register(dispatch_mode=dispatch_update("mesh"))
    def train(self, data):
        self.seen.append(data)
        return DataProto(meta_info={"metrics": {"rows": len(data)}})


class HereBackend(Backend):
    """Several ranks as objects of this process, each called at once."""

    reference_type = Outcome

    def __init__(self, world_size, make):
        super().__init__()
        self.workers = []
        for rank in range(world_size):
            with temp_env_var("RANK", str(rank)), temp_env_var("WORLD_SIZE", str(world_size)):
                self.workers.append(make())

    def submit(self, call, method, shares):
        return [
            Outcome(getattr(self.workers[rank], method)(*args, **kwargs))
            for rank, args, kwargs in shares
        ]

    def wait(self, references, timeout_seconds):
        return list(range(len(references)))

    def outcomes(self, references):
        return list(references)

    def stopped_ranks(self, ranks):
        return []

    def stack_of(self, rank):
        return ""

    def deaths(self):
        return {}

    def label(self, rank):
        return f"rank {rank}"

    def shutdown(self):
        self.is_closed.set()


def group(world_size, ranks_per_sequence=1):
    backend = HereBackend(world_size, lambda: Lengths(ranks_per_sequence))
    return WorkerGroup(None, backend=backend, worker_class=Lengths, name="lengths")


def batch(*lengths, prompts=None):
    mask = torch.zeros(len(lengths), 8, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    columns = {"name": np.array([f"row {row}" for row in range(len(lengths))], dtype=object)}
    ids = torch.arange(len(lengths)) if prompts is None else torch.tensor(prompts)
    return DataProto.from_dict(
        {
            "attention_mask": mask,
            "response_mask": mask[:, 2:],
            "input_ids": ids[:, None] * mask,
            "responses": mask[:, 2:],
            "row": torch.arange(len(lengths)),
        },
        non_tensors=columns,
        meta_info={"temperature": 0.5},
    )


LENGTHS = (5, 3, 8, 3, 4, 7, 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("method", ["measure", "measure_in_large_passes"])
def test_answers_come_back_in_the_order_of_the_rows_whatever_the_number_of_ranks(
    world_size, method
):
    workers = group(world_size)
    found = getattr(workers, method)(batch(*LENGTHS))
    assert found.batch["lengths"].tolist() == list(LENGTHS)
    assert list(found.batch.keys()) == ["lengths"]


def test_every_rank_makes_equally_many_passes_over_about_as_many_tokens():
    workers = group(2)
    workers.measure_in_large_passes(batch(8, 8, 1, 1, 1, 1))
    parts = [worker.seen[0] for worker in workers.workers]
    assert [len(planned_passes(part)) for part in parts] == [2, 2]
    assert [part.batch["attention_mask"].sum().item() for part in parts] == [10, 10]


def test_only_the_columns_that_a_method_reads_travel():
    workers = group(2)
    workers.measure(batch(*LENGTHS))
    part = workers.workers[0].seen[0]
    assert set(part.batch.keys()) == {*COLUMNS, "row_of_batch", "prompt_index"}
    assert part.non_tensor_batch == {}
    assert part.meta_info["temperature"] == 0.5


def test_an_update_has_the_same_rows_in_each_step_as_on_one_rank():
    workers = group(2)
    metrics = workers.train(batch(*LENGTHS)).meta_info["metrics"]
    assert metrics == {"rows": [4, 4]}, "seven rows and one that fills up"
    parts = [worker.seen[0] for worker in workers.workers]
    plan = update_plan(parts[0])
    steps = [
        sorted(
            parts[rank].batch["row"][place].item()
            for rank in range(2)
            for place in step.rows_of(rank)
        )
        for step in plan.steps
    ]
    assert steps == [[0, 1, 2, 3], [4, 5, 6]] * 2
    assert plan.steps[0].batch_num_tokens == (5 + 3 + 8 + 3) - 4 * 2
    assert parts[0].non_tensor_batch == {}


def test_ranks_that_share_a_sequence_get_the_same_rows_and_one_of_them_answers():
    workers = group(4, ranks_per_sequence=2)
    assert workers.measure(batch(*LENGTHS)).batch["lengths"].tolist() == list(LENGTHS)
    rows = [worker.seen[0].batch["row_of_batch"].tolist() for worker in workers.workers]
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    assert not set(rows[0]) & set(rows[2]) - {-1}


def test_one_rank_gets_the_batch_as_it_is_and_plans_for_itself():
    workers = group(1)
    given = batch(*LENGTHS)
    workers.train(given)
    seen = workers.workers[0].seen[0]
    assert update_plan(seen) is None
    assert seen.batch["row"].data_ptr() == given.batch["row"].data_ptr()


def test_responses_to_one_prompt_go_to_one_rank_where_there_are_enough_prompts():
    workers = group(2)
    workers.measure(batch(5, 5, 6, 6, prompts=[7, 8, 7, 8]))
    rows = [set(worker.seen[-1].batch["row_of_batch"].tolist()) for worker in workers.workers]
    assert rows in ([{0, 2}, {1, 3}], [{1, 3}, {0, 2}])
    workers.measure(batch(5, 5, 6, 6, prompts=[7, 7, 7, 7]))
    assert [len(worker.seen[-1]) for worker in workers.workers] == [2, 2], "nobody is idle"


def test_rows_of_one_uid_are_dispatched_as_one_prompt_and_the_callers_batch_stays_as_it_was():
    batch = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[3, 4]] * 4),
            "attention_mask": torch.ones(4, 2, dtype=torch.long),
            "responses": torch.tensor([[4]] * 4),
        },
        non_tensors={"uid": np.array(["b", "a", "b", "a"], dtype=object)},
    )
    indexed = with_prompt_index(batch)
    assert indexed.batch["prompt_index"].tolist() == [0, 1, 0, 1]
    assert "prompt_index" not in batch.batch.keys()  # noqa: SIM118
    assert indexed.non_tensor_batch == {}
    alone = batch.select(non_tensor_batch_keys=[])
    assert with_prompt_index(alone).batch["prompt_index"].tolist() == [0] * 4, "the same tokens"
