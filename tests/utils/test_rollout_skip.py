import asyncio

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl.utils.rollout_skip import DataProto, RolloutSkip
from verl.utils.skip import SkipManager


class Manager:
    """Answers each prompt with a number that grows from call to call."""

    def __init__(self):
        self.num_calls = 0

    def generate_sequences(self, prompts):
        self.num_calls += 1
        return DataProto.from_dict(
            tensors={"responses": torch.full((len(prompts), 2), self.num_calls)},
            non_tensors={"uid": prompts.non_tensor_batch["uid"].copy()},
            meta_info={"timing": {"gen": 1.5}},
        )


class AsyncManager(Manager):
    async def generate_sequences(self, prompts):  # pyright: ignore
        await asyncio.sleep(0)
        return super().generate_sequences(prompts)


def config(tmp_path, **trainer):
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"skip_dump_dir": str(tmp_path), "n": 2}},
            "data": {"train_batch_size": 4},
            "trainer": {"experiment_name": "run", "project_name": "project", **trainer},
        }
    )


def prompts(text="a", step=1, uid="u", **meta) -> DataProto:
    messages = np.empty(2, dtype=object)
    messages[:] = [[{"role": "user", "content": text}], [{"role": "user", "content": "b"}]]
    return DataProto.from_dict(
        non_tensors={"raw_prompt": messages, "uid": np.array([uid, uid], dtype=object)},
        meta_info={"global_steps": step, **meta},
    )


def skipping(tmp_path, manager=None, **trainer):
    manager = manager or Manager()
    RolloutSkip(config(tmp_path, **trainer), manager).wrap_generate_sequences()
    return manager


def test_a_second_run_reads_what_the_first_generated(tmp_path):
    first = skipping(tmp_path)
    generated = first.generate_sequences(prompts(uid="first"))
    second = skipping(tmp_path)
    loaded = second.generate_sequences(prompts(uid="second"))
    assert (first.num_calls, second.num_calls) == (1, 0)
    assert torch.equal(loaded.batch["responses"], generated.batch["responses"])
    assert loaded.meta_info == {"timing": {"gen": 1.5}}
    assert loaded.non_tensor_batch["uid"].tolist() == ["second", "second"]


def test_a_dump_that_others_could_have_written_is_not_read(tmp_path):
    skipping(tmp_path).generate_sequences(prompts())
    (dumped,) = tmp_path.iterdir()
    dumped.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        skipping(tmp_path).generate_sequences(prompts())


def test_each_step_has_its_own_dump(tmp_path):
    manager = skipping(tmp_path)
    manager.generate_sequences(prompts("a", step=1))
    manager.generate_sequences(prompts("c", step=2))
    assert manager.num_calls == 2
    assert manager.generate_sequences(prompts("c", step=2)).batch["responses"].unique() == 2
    assert manager.num_calls == 2


def test_the_dump_lies_under_the_names_of_the_trainer(tmp_path):
    skipping(tmp_path).generate_sequences(prompts())
    assert [path.name for path in tmp_path.iterdir()] == ["run_project_GBS4__N2"]
    other = config(tmp_path)
    other.data.gen_batch_size = 8
    assert RolloutSkip(other, Manager()).dumped_dir.name == "run_project_GBS8__N2"


def test_another_experiment_generates_anew(tmp_path):
    skipping(tmp_path).generate_sequences(prompts())
    other = skipping(tmp_path, experiment_name="other")
    other.generate_sequences(prompts())
    assert other.num_calls == 1


def test_a_dump_of_other_prompts_is_refused(tmp_path):
    manager = skipping(tmp_path)
    manager.generate_sequences(prompts("a"))
    with pytest.raises(ValueError, match="were made for other prompts"):
        manager.generate_sequences(prompts("changed"))


def test_token_ids_tell_prompts_apart(tmp_path):
    def tokens(last):
        data = prompts()
        data.non_tensor_batch.pop("raw_prompt")
        ids = torch.tensor([[1, 2], [3, last]])
        return DataProto.from_dict(
            tensors={"input_ids": ids},
            non_tensors=data.non_tensor_batch,
            meta_info=data.meta_info,
        )

    manager = skipping(tmp_path)
    manager.generate_sequences(tokens(4))
    manager.generate_sequences(tokens(4))
    assert manager.num_calls == 1
    with pytest.raises(ValueError, match="were made for other prompts"):
        manager.generate_sequences(tokens(5))


def test_validation_always_generates(tmp_path):
    manager = skipping(tmp_path)
    for _ in range(2):
        manager.generate_sequences(prompts(validate=True))
    assert manager.num_calls == 2
    assert list(tmp_path.iterdir()) == []


def test_an_async_manager_is_wrapped_as_such(tmp_path):
    manager = skipping(tmp_path, AsyncManager())
    for _ in range(2):
        asyncio.run(manager.generate_sequences(prompts()))
    assert manager.num_calls == 1


def test_only_the_steps_that_are_named_are_dumped(tmp_path):
    named = config(tmp_path)
    named.actor_rollout_ref.rollout.skip_steps = [2]
    manager = Manager()
    RolloutSkip(named, manager).wrap_generate_sequences()
    for step in (1, 1, 2, 2, 3):
        manager.generate_sequences(prompts(step=step))
    assert manager.num_calls == 4
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["step_2"]


class Marked(Manager):
    """A manager of a user's, with the method marked."""

    def __init__(self, settings):
        super().__init__()
        self.config = settings

    @SkipManager.annotate(role="rollout")
    def generate_sequences(self, prompts):
        return super().generate_sequences(prompts)


class MarkedAsync(Marked):
    @SkipManager.annotate()
    async def generate_sequences(self, prompts):  # pyright: ignore
        await asyncio.sleep(0)
        return Manager.generate_sequences(self, prompts)


def of_verl_09(tmp_path, **section):
    settings = config(tmp_path / "unused")
    settings.skip = {"rollout": {"enable": True, "dump_dir": str(tmp_path), **section}}
    return settings


def test_a_marked_method_reads_what_it_generated_in_an_earlier_run(tmp_path):
    first, second = Marked(of_verl_09(tmp_path)), Marked(of_verl_09(tmp_path))
    generated = first.generate_sequences(prompts())
    loaded = second.generate_sequences(prompts())
    assert (first.num_calls, second.num_calls) == (1, 0)
    assert torch.equal(loaded.batch["responses"], generated.batch["responses"])
    third = MarkedAsync(of_verl_09(tmp_path))
    asyncio.run(third.generate_sequences(prompts()))
    assert third.num_calls == 0


def test_a_marked_method_generates_where_dumps_are_off_or_of_other_steps(tmp_path):
    manager = Marked(of_verl_09(tmp_path, enable=False))
    some = Marked(of_verl_09(tmp_path, steps=[2]))
    for one in (manager, some):
        for _ in range(2):
            one.generate_sequences(prompts(step=1))
        assert one.num_calls == 2
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        some.generate_sequences(prompts(step=2))
    assert some.num_calls == 3


def test_what_dumps_cannot_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a dump serves the step"):
        Marked(of_verl_09(tmp_path, action="repeat")).generate_sequences(prompts())
    with pytest.raises(ValueError, match=r"skip\.async_rollout is not there"):
        SkipManager.annotate(role="async_rollout")
