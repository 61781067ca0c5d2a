"""A run whose rewards come from a model, alone or together with a function."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_models import plain_twin, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.toy import toy_run
from tests.workers.reward_model.models import TEMPLATE, character_tokenizer, reward_model, save
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.validate import reward_model_faults
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import refuse_unsuited_reward_model, score_batch
from verl.trainer.ppo.trainer import PPOTrainer
from verl.workers.reward_manager import NaiveRewardManager

NO_FUNCTION = "custom_reward_function.path=null"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save(reward_model("llama"), tmp_path_factory.mktemp("rm"), tiny_tokenizer())


class KeepsBatch(PPOTrainer):
    """Lets a test see the batch of the last step."""

    def update(self, batch, step):
        self.seen = batch
        return super().update(batch, step)


def run(toy, output, model_path, *changes):
    return toy_run(
        toy,
        output,
        "reward_model.enable=true",
        f"reward_model.model.path={model_path}",
        "reward_model.model.input_tokenizer=null",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        *changes,
        trainer_class=KeepsBatch,
    )


def model_scores(trainer):
    """What the model says about the rows of the last step, asked again."""
    rows = trainer.seen.select(
        batch_keys=["input_ids", "attention_mask", "responses"],
        non_tensor_batch_keys=["raw_prompt"],
    )
    return trainer.rm_wg.workers[0].compute_rm_score(rows).batch["rm_scores"]


def test_the_models_score_is_the_reward(toy, tmp_path, model_path):
    two_steps = "trainer.total_training_steps=2"
    metrics, trainer = run(toy, tmp_path, model_path, NO_FUNCTION, two_steps)
    seen = trainer.seen.batch
    torch.testing.assert_close(seen["token_level_scores"], model_scores(trainer))
    assert [step["step"] for step in metrics] == [1, 2]
    totals = seen["token_level_scores"].sum(-1)
    assert metrics[-1]["critic/score/mean"] == pytest.approx(totals.mean().item())
    assert totals.std() > 0
    assert metrics[-1]["reward_model/num_truncated"] == 0
    assert metrics[-1]["reward_model/input_length/max"] > 4


@pytest.mark.slow
def test_the_policy_may_generate_with_an_engine_in_a_process_of_its_own(toy, tmp_path, model_path):
    engine = "actor_rollout_ref.rollout.name=native_process"
    _, trainer = run(toy, tmp_path, model_path, NO_FUNCTION, engine)
    torch.testing.assert_close(trainer.seen.batch["token_level_scores"], model_scores(trainer))


@pytest.mark.slow
def test_a_model_in_processes_of_its_own_gives_the_same_scores(toy, tmp_path, model_path):
    pool = ["enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=3"]  # 16 rows: uneven
    options = [f"reward_model.{setting}" for setting in pool]
    _, apart = run(toy, tmp_path / "apart", model_path, NO_FUNCTION, *options)
    _, beside = run(toy, tmp_path / "beside", model_path, NO_FUNCTION)
    assert apart.rm_wg.world_size == 3
    for name in ("responses", "token_level_scores"):
        torch.testing.assert_close(apart.seen.batch[name], beside.seen.batch[name])


def test_the_model_may_have_a_tokenizer_and_a_template_of_its_own(toy, tmp_path):
    tokenizer = character_tokenizer(first="A", template=TEMPLATE)
    path = save(reward_model("qwen2"), tmp_path / "rm", tokenizer)
    _, trainer = run(
        toy, tmp_path, path, NO_FUNCTION, f"reward_model.model.input_tokenizer={toy / 'model'}"
    )
    seen = trainer.seen
    torch.testing.assert_close(seen.batch["token_level_scores"], model_scores(trainer))
    text = tokenizer.decode(trainer.rm_wg.workers[0]._sequences(seen)[0])
    assert text.startswith(f"<s><turn>u:{seen.non_tensor_batch['raw_prompt'][0]}</turn><turn>a:")


def test_a_greedy_baseline_is_scored_by_the_same_model(toy, tmp_path, model_path):
    _, trainer = run(toy, tmp_path, model_path, NO_FUNCTION, "algorithm.adv_estimator=remax")
    baselines = trainer.seen.batch["reward_baselines"]
    assert len(set(baselines.tolist())) == 4, "one for each prompt"
    assert baselines.abs().min() > 0


COMBINED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    rule = float(len(solution_str) % 2)
    return {"score": extra_info["rm_score"] + 10 * rule, "rule": rule, "rm": extra_info["rm_score"]}
"""


def test_a_function_per_response_sees_the_models_score_and_decides(toy, tmp_path, model_path):
    (tmp_path / "combined.py").write_text(COMBINED)
    function = f"custom_reward_function.path={tmp_path / 'combined.py'}"
    metrics, trainer = run(toy, tmp_path, model_path, function)
    columns = trainer.seen.non_tensor_batch
    model = model_scores(trainer).sum(-1)
    rules = torch.tensor(columns["rule"].tolist())
    torch.testing.assert_close(torch.tensor(columns["rm"].tolist()), model)
    found = trainer.seen.batch["token_level_scores"].sum(-1)
    torch.testing.assert_close(found, model + 10 * rules)
    assert any(name.startswith("val-core/sevens") for name in metrics[-1])


WHOLE = """
from verl import DataProto

def compute_score(data: DataProto):
    return data.batch["rm_scores"] * 2
"""


def test_a_function_over_the_batch_finds_the_models_scores_in_it(toy, tmp_path, model_path):
    (tmp_path / "whole.py").write_text(WHOLE)
    function = f"custom_reward_function.path={tmp_path / 'whole.py'}"
    metrics, trainer = run(toy, tmp_path, model_path, function)
    found = trainer.seen.batch["token_level_scores"]
    torch.testing.assert_close(found, 2 * model_scores(trainer))
    assert "val-core/sevens/reward/mean@1" in metrics[-1]


ASKING = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info=None,
                  reward_router_address=None, reward_model_tokenizer=None):
    text = extra_info["question"] + solution_str.replace(" ", "") + reward_model_tokenizer.eos_token
    request = urllib.request.Request(
        f"http://{reward_router_address}/classify", json.dumps({"input": text}).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        score = json.load(answer)["data"][0]["probs"][0]
    return {"score": score, "text": text}
"""


def test_a_function_may_ask_the_model_over_http(toy, tmp_path, model_path):
    (tmp_path / "asking.py").write_text(ASKING)
    rows = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["extra_info"]["question"] = row["prompt"]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, trainer = run(
        toy,
        tmp_path,
        model_path,
        f"custom_reward_function.path={tmp_path / 'asking.py'}",
        f"data.train_files={tmp_path / 'train.jsonl'}",
        "data.val_files=[]",
    )
    tokenizer, model = tiny_tokenizer(), reward_model("llama")
    for row, text in enumerate(trainer.seen.non_tensor_batch["text"][:4]):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        expected = model(input_ids=ids).logits[0, 0].item()
        found = trainer.seen.batch["token_level_scores"][row].sum().item()
        assert found == pytest.approx(expected, abs=1e-5)


# ---- rewards for every token ---------------------------------------------------------------------

PROCESS = Path(__file__).parents[2] / "examples" / "reward_model" / "implicit_process_reward.py"


def log_probs(model, batch):
    """Of the response tokens, by an unmodified transformers model on one row after the other."""
    found = torch.zeros(batch["responses"].shape)
    for row, ids in enumerate(batch["input_ids"]):
        tokens = ids[batch["attention_mask"][row].bool()]
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        all_tokens = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        length = int(batch["response_mask"][row].sum())
        found[row, :length] = all_tokens[-length:]
    return found


def process_run(toy, output, *changes):
    favouring = tiny_model("llama", scale=0.3)
    save(favouring, output / "favouring", tiny_tokenizer())
    _, trainer = toy_run(
        toy,
        output,
        NO_FUNCTION,
        "reward_manager.source=importlib",
        f"reward_manager.module.path={PROCESS}",
        "reward_manager.name=ImplicitProcessReward",
        f"reward_model.reward_kwargs.model_path={output / 'favouring'}",
        f"reward_model.reward_kwargs.reference_path={toy / 'model'}",
        "reward_model.reward_kwargs.beta=0.5",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "data.val_files=[]",
        "trainer.total_training_steps=1",
        *changes,
        trainer_class=KeepsBatch,
    )
    seen = trainer.seen.batch
    models = plain_twin(favouring), plain_twin(tiny_model("llama"))
    process = 0.5 * (log_probs(models[0], seen) - log_probs(models[1], seen))
    return trainer, process


def test_a_manager_may_reward_every_token(toy, tmp_path):
    trainer, process = process_run(toy, tmp_path)
    seen = trainer.seen.batch
    torch.testing.assert_close(seen["token_level_scores"], process, rtol=0, atol=1e-5)
    to_go = process.flip(-1).cumsum(-1).flip(-1) * seen["response_mask"]
    torch.testing.assert_close(seen["returns"], to_go, rtol=0, atol=1e-4)
    totals = torch.tensor(trainer.seen.non_tensor_batch["process_reward"].tolist())
    torch.testing.assert_close(totals, process.sum(-1), rtol=0, atol=1e-4)


def test_process_rewards_and_a_reward_model_add_up(toy, tmp_path, model_path):
    trainer, process = process_run(
        toy,
        tmp_path,
        "reward_model.enable=true",
        f"reward_model.model.path={model_path}",
        "reward_model.model.input_tokenizer=null",
    )
    found = trainer.seen.batch["token_level_scores"]
    torch.testing.assert_close(found, process + model_scores(trainer), rtol=0, atol=1e-5)


def test_scores_of_every_token_that_are_in_the_batch_are_taken_as_they_are():
    scores = torch.tensor([[0.1, -0.2, 0.3], [0.5, 0.0, 0.0]])
    data = DataProto.from_dict(
        tensors={"responses": torch.ones(2, 3, dtype=torch.long), "rm_scores": scores},
        non_tensors={"uid": ["a", "b"]},
    )
    scored = score_batch(data, NaiveRewardManager(tiny_tokenizer(), 0))
    assert torch.equal(scored.batch.batch["token_level_scores"], scores)


# ---- validation ----------------------------------------------------------------------------------


def rows_for_the_model(path):
    rows = [
        {"prompt": f"{n}+{n}=", "data_source": "talk", "reward_model": {"style": "model"}}
        for n in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_held_out_prompts_without_an_answer_are_scored_by_the_model(toy, tmp_path, model_path):
    rows = rows_for_the_model(tmp_path / "val.jsonl")
    metrics, trainer = run(toy, tmp_path, model_path, NO_FUNCTION, f"data.val_files={rows}")
    assert "val-core/talk/reward/mean@1" in metrics[-1]
    trained_on = trainer.seen.batch["attention_mask"].sum(1).max()
    assert metrics[-1]["reward_model/input_length/max"] == trained_on, "not those of validation"


def test_the_model_manager_takes_the_models_score_in_validation_too(toy, tmp_path, model_path):
    manager = "reward_manager.name=model"
    metrics, trainer = run(toy, tmp_path, model_path, NO_FUNCTION, manager)
    rewards = trainer.seen.batch["token_level_scores"]
    torch.testing.assert_close(rewards, model_scores(trainer))
    scores = [value for name, value in metrics[-1].items() if "reward/mean@1" in name]
    assert scores
    assert not any(score in (0.0, 1.0) for score in scores), "a model's score, not a verdict"


def test_the_model_manager_asks_no_function(toy, tmp_path, model_path):
    with pytest.raises(ValueError, match="asks no function"):
        run(toy, tmp_path, model_path, "reward_manager.name=model")


def test_held_out_prompts_with_an_answer_are_graded_by_rule(toy, tmp_path, model_path):
    rows = [
        {"prompt": "1+1=", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}
    ]
    (tmp_path / "val.jsonl").write_text(json.dumps(rows[0]))
    val_files = f"data.val_files={tmp_path / 'val.jsonl'}"
    metrics, _ = run(toy, tmp_path, model_path, NO_FUNCTION, val_files)
    assert metrics[-1]["val-core/openai/gsm8k/acc/mean@1"] == 0.0, "a wrong answer, not a score"


# ---- what is refused -----------------------------------------------------------------------------


def faults_of(**sections):
    loaded = load_config({"reward_model": {"enable": True}, **sections}, PPOConfig)
    return [fault.text for fault in reward_model_faults(loaded.config)]


@pytest.mark.parametrize("manager", ["dapo", "judge"])
def test_a_manager_that_would_do_nothing_is_refused_by_name(manager):
    (fault,) = faults_of(reward_manager={"name": manager})
    assert f"reward_manager.name is '{manager}' and reward_model.enable is True" in fault
    assert faults_of() == []


def test_a_function_that_nobody_would_ask_is_refused():
    (fault,) = faults_of(
        reward_manager={"name": "model"}, custom_reward_function={"path": "reward.py"}
    )
    assert "that manager asks no function" in fault


@pytest.mark.parametrize("engine", ["native_process", "vllm", "sglang"])
def test_the_engine_of_the_policy_says_nothing_about_the_reward_model(engine):
    rollout = {"actor_rollout_ref": {"rollout": {"name": engine}}}
    loaded = load_config({"reward_model": {"enable": True}, **rollout}, PPOConfig)
    refuse_unsuited_reward_model(loaded.config)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ["reward_model.enable_resource_pool=true", "reward_model.nnodes=1"],
            "served from the trainer's process only",
        ),
        (
            [
                "actor_rollout_ref.actor.strategy=megatron",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            ],
            "score a batch together",
        ),
    ],
)
def test_a_model_of_several_processes_is_not_served(toy, tmp_path, model_path, options, reason):
    (tmp_path / "ask.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, "
        "reward_router_address, **kwargs):\n    return 1.0\n"
    )
    function = f"custom_reward_function.path={tmp_path / 'ask.py'}"
    with pytest.raises(ValueError, match=reason):
        run(toy, tmp_path, model_path, function, *options)


def test_a_run_refuses_before_it_loads_a_model(toy, tmp_path):
    with pytest.raises(ValueError, match=r"reward_manager\.name is 'dapo'"):
        run(toy, tmp_path, tmp_path, NO_FUNCTION, "reward_manager.name=dapo")
