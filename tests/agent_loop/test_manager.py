import asyncio

import numpy as np
import pytest

from tests.agent_loop.fakes import FakeRollout, loop_config
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput, register
from verl.agent_loop.manager import SEED_COLUMN, get_trajectory_info
from verl.agent_loop.rollouter import MIN_ROWS_AHEAD
from verl.config.rollout import AgentLoopConfig
from verl.protocol import DataProto
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.native.sequence import EngineLimits


@register("echo_for_tests")
class EchoLoop(AgentLoopBase):
    """Answers with what it was given, without asking a model."""

    num_prepared = 0

    def __init__(self, *, ending=2, **kwargs):
        super().__init__(**kwargs)
        self.ending = ending

    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        cls.num_prepared += 1

    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        answer = [*ids, self.ending]
        return AgentLoopOutput(
            prompt_ids=ids, response_ids=answer, response_mask=[1] * len(answer), num_turns=1
        )


def prompts(*texts, meta_info=None, **columns):
    return DataProto.from_dict(
        non_tensors={"raw_prompt": list(texts), **columns}, meta_info=meta_info or {}
    )


def manager(engine=None, config=None):
    return AgentLoopManager(
        config or loop_config(), rollouts=[engine or FakeRollout()], tokenizer=tiny_tokenizer()
    )


def test_results_stand_in_the_order_of_the_rows_whichever_finishes_first():
    a, b, c = (ids[0] for ids in tiny_tokenizer()(["a", "b", "c"]).input_ids)
    engine = FakeRollout(delay_of={a: 30, b: 0, c: 10})
    batch = manager(engine).generate_sequences(prompts("a", "b", "c"))
    assert batch.batch["responses"][:, 0].tolist() == [a, b, c]


@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_any_number_of_rows_will_do(num_rows):
    batch = manager().generate_sequences(prompts(*"abcdefg"[:num_rows]))
    assert len(batch) == num_rows
    assert batch.meta_info["metrics"]["rollout/truncated_ratio"] == 0.0


def test_repeated_rows_become_one_request_with_the_seeds_of_the_rows():
    engine = FakeRollout()
    seeds = np.array([3, 4, 5], dtype=object)
    manager(engine).generate_sequences(prompts("ab", "ab", "c", **{SEED_COLUMN: seeds}))
    assert [(r.num_samples, r.seeds) for r in engine.requests] == [(2, (3, 4)), (1, (5,))]


def test_training_and_validation_sample_with_their_own_settings():
    made = manager()
    training = made.sampling_params({})
    assert (training["temperature"], training["top_p"], training["top_k"]) == (0.7, 0.9, -1)
    validation = made.sampling_params({"validate": True})
    assert (validation["temperature"], validation["top_p"], validation["top_k"]) == (0.3, 1.0, 5)


def test_a_greedy_rollout_is_greedy():
    assert manager().sampling_params({"do_sample": False})["temperature"] == 0.0
    assert manager(config=loop_config(do_sample=False)).sampling_params({})["temperature"] == 0.0


def test_a_row_names_the_loop_that_runs_it():
    names = np.array(["echo_for_tests", None], dtype=object)
    batch = manager().generate_sequences(prompts("ab", "ab", agent_name=names))
    assert batch.non_tensor_batch["__num_turns__"].tolist() == [1, 2]


def test_an_unknown_loop_is_refused_with_the_known_ones():
    names = np.array(["echo_for_test"], dtype=object)
    with pytest.raises(ValueError, match="Did you mean 'echo_for_tests'"):
        manager().generate_sequences(prompts("ab", agent_name=names))


def test_loops_come_from_a_file_with_arguments_of_their_own(tmp_path):
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: mine\n  _target_: {EchoLoop.__module__}.EchoLoop\n  ending: 9\n")
    agent = AgentLoopConfig(default_agent_loop="mine", agent_loop_config_path=str(path))
    made = manager(config=loop_config(agent=agent))
    before = EchoLoop.num_prepared
    batch = made.generate_sequences(prompts("a", "b"))
    assert batch.batch["responses"][:, 1].tolist() == [9, 9]
    made.generate_sequences(prompts("a"))
    assert EchoLoop.num_prepared == before + 1, "a class is prepared once, not once per row"


def test_a_listed_loop_without_a_class_is_refused(tmp_path):
    path = tmp_path / "loops.yaml"
    path.write_text("- name: mine\n")
    with pytest.raises(ValueError, match="needs a name and a _target_"):
        manager(config=loop_config(agent=AgentLoopConfig(agent_loop_config_path=str(path))))


def test_an_error_in_one_row_ends_the_batch_with_that_error():
    with pytest.raises(RuntimeError, match="gone"):
        manager(FakeRollout(error=OSError("gone"))).generate_sequences(prompts("a", "b"))


def test_a_sample_draws_the_same_alone_and_with_others():
    engine = NativeEngine(
        tiny_model("llama"),
        EngineLimits(max_num_seqs=8, max_prompt_tokens=6, max_response_tokens=4),
        eos_token_ids=[2],
    )
    made = manager(engine)

    def responses(*rows):
        seeds = np.array([seed for _, seed in rows], dtype=object)
        batch = prompts(*(text for text, _ in rows), **{SEED_COLUMN: seeds})
        return made.generate_sequences(batch).batch["responses"].tolist()

    together = responses(("ab", 1), ("ab", 2), ("c", 3))
    assert together[0] != together[1]
    assert [responses(("ab", 1)), responses(("ab", 2)), responses(("c", 3))] == [
        [row] for row in together
    ]
    assert responses(("c", 3), ("ab", 2), ("ab", 1)) == together[::-1]


def test_trajectories_are_numbered_within_their_row():
    infos = asyncio.run(get_trajectory_info(3, [7, 7, 8], validate=True))
    assert [(info["sample_index"], info["rollout_n"]) for info in infos] == [(7, 0), (7, 1), (8, 0)]
    assert infos[0]["step"] == 3
    assert infos[0]["validate"]


def test_prompts_encoded_ahead_reach_the_engine_in_the_order_of_the_rows():
    texts = [f"{a}{b}" for a in "abcdef" for b in "12345"]
    assert len(texts) > MIN_ROWS_AHEAD
    engine = FakeRollout()
    made = AgentLoopManager(loop_config(), rollouts=[engine], tokenizer=tiny_tokenizer())
    rows = DataProto.from_dict(non_tensors={"raw_prompt": texts, "uid": texts})
    made.generate_sequences(rows)
    expected = [tiny_tokenizer().encode(text, add_special_tokens=False) for text in texts]
    seen = [list(request.prompt_ids)[-2:] for request in engine.requests]
    assert seen == expected


def test_a_prompt_that_cannot_be_encoded_ahead_is_the_error_of_its_loop():
    texts = ["a"] * MIN_ROWS_AHEAD + ["b" * 1000]
    made = AgentLoopManager(loop_config(), rollouts=[FakeRollout()], tokenizer=tiny_tokenizer())
    rows = DataProto.from_dict(non_tensors={"raw_prompt": texts, "uid": range(len(texts))})
    with pytest.raises(ValueError, match="1000"):
        made.generate_sequences(rows)
