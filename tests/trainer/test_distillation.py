"""Distillation through the command's own path: teachers in process, at an endpoint, the policy."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_tokenizer import save_tiny_model
from tests.toy import ACTOR, toy_run, weights
from verl.config.distillation import TeacherConfig
from verl.config.faults import ConfigError
from verl.trainer.distillation.replicas import Replicas
from verl.trainer.distillation.serve import TeacherService, Waiting, teacher_server
from verl.trainer.distillation.teaching import TooFewAnswers, read_answer
from verl.utils.dataset.tables import DataError
from verl.utils.environment import temp_env_var
from verl.utils.http_json import RequestFailed, post_json
from verl.utils.json_server import JsonServer, Refusal

LOSS = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model"
SCORE = "critic/score/mean"
LIMITS = {"timeout_seconds": 60.0, "max_response_bytes": 1 << 20}
ASKED = {"model": "t", "prompt": [4, 5, 6], "max_tokens": 1, "prompt_logprobs": 2}


@pytest.fixture(scope="module")
def teacher(toy, tmp_path_factory):
    """The toy's model after it has learnt to write sevens."""
    folder = tmp_path_factory.mktemp("teacher")
    save_tiny_model(folder / "model")
    steps, trainer = toy_run(toy, folder / "run", "trainer.total_training_steps=30")
    assert steps[-1][SCORE] > 0.6
    AutoModelForCausalLM.from_pretrained(folder / "model").save_pretrained(
        folder / "model", state_dict=weights(trainer)
    )
    return folder / "model"


def distilled(toy, output, *changes, mode="k3", path=None):
    paths = [] if path is None else [f"{TEACHER}.model_path={path}"]
    common = ["distillation.enabled=true", f"{LOSS}.loss_mode={mode}", *paths]
    return toy_run(toy, output, *common, *changes)


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk", "jsd"])
def test_a_teacher_that_is_the_student_changes_nothing_and_is_reported(mode, toy, tmp_path):
    steps, _ = distilled(toy, tmp_path, f"{ACTOR}.optim.lr=0", mode=mode, path=toy / "model")
    assert [abs(step["distillation/loss"]) < 1e-6 for step in steps] == [True, True]
    assert all("timing_s/teacher" in step for step in steps)


def test_distillation_alone_ignores_the_rewards(toy, tmp_path):
    once = (f"{ACTOR}.optim.lr=0", "trainer.total_training_steps=1")
    options = {"mode": "reverse_kl_full", "path": toy / "model"}
    (both,), _ = distilled(toy, tmp_path / "a", *once, **options)
    alone = f"{LOSS}.use_task_rewards=false"
    (without,), _ = distilled(toy, tmp_path / "b", alone, *once, **options)
    assert both["actor/pg_loss"] == without["actor/pg_loss"]
    assert both["actor/grad_norm"] > 0.1
    assert without["actor/grad_norm"] < 1e-5


def test_the_policy_teaches_itself_with_the_answer_in_its_prompt(toy, tmp_path):
    changes = (f"{TEACHER}.weights=current", f"{TEACHER}.privileged_prompt='{{prompt}}{{answer}}'")
    steps, trainer = distilled(toy, tmp_path, *changes, mode="forward_kl_full")
    assert steps[0]["distillation/loss"] > 1e-3
    ids = trainer.batch.batch["teacher_prompts"][0].tolist()
    text = trainer.tokenizer.decode([one for one in ids if one != trainer.tokenizer.pad_token_id])
    assert text.replace(" ", "").endswith("=7")
    teaching, batch = trainer.teaching, trainer.batch
    ids = batch.batch["prompts"][1]
    ids[-1] = ids[-2]  # a later row of the session, say, whose prompt has grown
    assert teaching is not None
    with pytest.raises(DataError, match="made another prompt of it"):
        teaching.annotate(batch, None)


def test_rows_have_the_teacher_of_their_key(toy, tmp_path):
    rows = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["data_source"] = ("odd", "even")[number % 2]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    several = [
        f"data.train_files={data}",
        f"{TEACHER}.key=odd",
        f"distillation.teacher_models.other.model_path={toy / 'model'}",
        "distillation.teacher_models.other.key=even",
    ]
    steps, trainer = distilled(toy, tmp_path / "a", *several, path=toy / "model")
    batch = trainer.batch
    expected = [("odd", "even").index(x) for x in batch.non_tensor_batch["data_source"]]
    assert batch.batch["teacher_index"].tolist() == expected
    assert steps[0]["distillation/teacher_kl"] == pytest.approx(0, abs=1e-5)
    with pytest.raises(DataError, match="data_source='even', for which there is no teacher"):
        distilled(toy, tmp_path / "b", *several[:2], path=toy / "model")


def test_an_endpoint_answers_as_a_teacher_in_process_does(toy, tmp_path):
    service = TeacherService(str(toy / "model"), "cpu")
    with temp_env_var("VERL_TEACHER_TOKEN", "t" * 24), teacher_server(service) as server:
        endpoint = f"{TEACHER}.endpoint={server.url}/v1"
        options = {"mode": "forward_kl_topk", "path": toy / "model"}
        once = (f"{ACTOR}.optim.lr=0", "trainer.total_training_steps=1")
        steps, served = distilled(toy, tmp_path / "a", endpoint, *once, **options)
    assert steps[0]["distillation/num_missing_answers"] == 0
    _, local = distilled(toy, tmp_path / "b", *once, **options)
    mask = local.batch.batch["response_mask"].bool()
    for name in ("teacher_log_probs", "teacher_topk_log_probs"):
        found, expected = (run.batch.batch[name][mask] for run in (served, local))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_teacher_answers_nobody_without_its_token(toy):
    service = TeacherService(str(toy / "model"), "cpu")
    with teacher_server(service) as server:
        ask = partial(post_json, f"{server.url}/v1/completions", ASKED, **LIMITS)
        assert ask(token=server.token)["choices"]
        for wrong in ("", "t" * 24):
            with pytest.raises(RequestFailed, match="401"):
                ask(token=wrong)


def test_replicas_that_the_run_starts_answer_as_a_teacher_in_process_does(toy, tmp_path):
    """Two processes share the rows; they have ended when the run has."""
    options = {"mode": "forward_kl_topk", "path": toy / "model"}
    once = (f"{ACTOR}.optim.lr=0", "trainer.total_training_steps=1")
    replicas = (f"{TEACHER}.num_replicas=2", f"{TEACHER}.inference.max_num_seqs=3")
    steps, served = distilled(toy, tmp_path / "a", *replicas, *once, **options)
    assert steps[0]["distillation/num_missing_answers"] == 0
    (started,) = served.teaching._replicas
    assert [replica.is_alive for replica in started._replicas] == [False, False]
    _, local = distilled(toy, tmp_path / "b", *once, **options)
    mask = local.batch.batch["response_mask"].bool()
    for name in ("teacher_log_probs", "teacher_topk_log_probs"):
        found, expected = (run.batch.batch[name][mask] for run in (served, local))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_replica_that_dies_is_started_again_and_one_that_cannot_start_is_named(toy):
    teacher = TeacherConfig(model_path=str(toy / "model"), num_replicas=1)
    replicas = Replicas("t", teacher, "cpu", ())
    try:
        (first,) = replicas._replicas
        url = replicas.urls()
        os.kill(first._process.pid, signal.SIGKILL)
        first._process.wait(timeout=30)
        assert replicas.urls() != url
        ask = partial(post_json, f"{replicas.urls()[0]}/completions", ASKED, **LIMITS)
        assert ask(token=replicas.token)["choices"]
        with pytest.raises(RequestFailed, match="401"):
            ask()
    finally:
        replicas.close()
    with pytest.raises(RuntimeError, match=r"replica t\.0 of a teacher does not serve"):
        Replicas("t", replace(teacher, model_path="/nowhere"), "cpu", ())


def test_requests_that_wait_are_computed_together_and_answered_as_alone(toy):
    service = TeacherService(str(toy / "model"), "cpu", max_num_seqs=3, max_num_batched_tokens=12)
    prompts = [[4, 5, 6], [7, 8, 9, 10, 11], [5, 4], [6, 6, 6, 6], [9] * 12]
    alone = [service._computed([Waiting(ids, 2, Future())])[0] for ids in prompts]
    rows = [
        Waiting(ids, top_k, Future()) for ids, top_k in zip(prompts, (2, 3, 2, 2, 2), strict=True)
    ]
    service._waiting.extend(rows)
    with service._changed:
        service._changed.notify()
    for row, expected in zip(rows, alone, strict=True):
        found = row.answer.result(timeout=60)
        assert found[0] is None
        for position, other in zip(found[1:], expected[1:], strict=True):
            assert other.keys() <= position.keys()
            for token, entry in other.items():
                assert position[token]["logprob"] == pytest.approx(entry["logprob"], abs=1e-5)


def test_passes_take_what_fits(toy):
    service = TeacherService(str(toy / "model"), "cpu", max_num_seqs=3, max_num_batched_tokens=12)
    with service._changed:  # its thread waits
        service._waiting.extend(Waiting([5] * length, 1, Future()) for length in (6, 6, 1, 20, 1))
        sizes = []
        while service._waiting:
            sizes.append([len(row.ids) for row in service._admitted()])
    assert sizes == [[6, 6], [1], [20], [1]]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((f"{TEACHER}.inference.name=vllm",), "Start the server of vllm yourself"),
        ((f"{TEACHER}.endpoint=http://127.0.0.1:1/v1",), "leave endpoint and weights out"),
        (("distillation.nnodes=2",), "replicas are processes on this machine"),
        ((f"{LOSS}.loss_mode=jsd",), "is behind a server"),
        (("actor_rollout_ref.rollout.temperature=0.5",), "at temperature 1, so set it to 1"),
    ],
)
def test_what_replicas_cannot_do_is_refused_by_name(changes, told, toy, tmp_path):
    with pytest.raises(ConfigError, match=told):
        distilled(toy, tmp_path, f"{TEACHER}.num_replicas=1", *changes, path=toy / "model")


def test_rows_without_an_answer_leave_the_step_and_too_many_end_the_run(toy, tmp_path):
    service = TeacherService(str(toy / "model"), "cpu")
    refused = []

    def complete(request):
        if tuple(request["prompt"]) in refused or (len(refused) < 2):
            refused.append(tuple(request["prompt"]))
            raise Refusal(500, "not now")
        return service.complete(request)

    routes = {("POST", "/v1/completions"): complete}
    with JsonServer(routes, token="") as server:
        endpoint = f"{TEACHER}.endpoint={server.url}/v1"
        many = "distillation.max_missing_ratio=0.9"
        steps, trainer = distilled(
            toy, tmp_path, endpoint, many, "trainer.total_training_steps=1", path=toy / "model"
        )
        missing = steps[0]["distillation/num_missing_answers"]
        assert missing > 0
        assert len(trainer.batch) == 16 - missing
        refused.clear()
        none = "distillation.max_missing_ratio=0"
        with pytest.raises(TooFewAnswers, match="have no answer of their teacher's endpoint"):
            distilled(toy, tmp_path, endpoint, none, path=toy / "model")


def test_an_answer_about_other_tokens_is_none():
    entries = [None, {"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}}]
    reply = {"choices": [{"prompt_logprobs": entries}]}
    assert read_answer(reply, [4, 5, 6], 2, 0) == ([-1.0, -2.0], [[], []], [[], []])
    with pytest.raises(ValueError, match="with 7 among them"):
        read_answer(reply, [4, 5, 7], 2, 1)
    with pytest.raises(ValueError, match="must have 4 entries"):
        read_answer(reply, [4, 5, 6, 7], 2, 1)
    with pytest.raises(ValueError, match=r"no choices\[0\]"):
        read_answer({}, [4], 1, 1)


BAD = {
    "no teacher": ([], "model_path is null"),
    "no gradient": ([f"{LOSS}.loss_mode=k1", f"{TEACHER}.model_path=x"], "use_policy_gradient"),
    "exact as reward": (
        [f"{LOSS}.loss_mode=jsd", f"{LOSS}.use_policy_gradient=true", f"{TEACHER}.model_path=x"],
        "exact gradient",
    ),
    "exact elsewhere": (
        [f"{LOSS}.loss_mode=jsd", f"{TEACHER}.model_path=x", "distillation.nnodes=1"],
        "on other ranks",
    ),
    "itself": ([f"{TEACHER}.weights=current"], "without a privileged_prompt"),
    "unknown mode": ([f"{LOSS}.loss_mode=k9", f"{TEACHER}.model_path=x"], "must be one of"),
    "two without keys": (
        [f"{TEACHER}.model_path=x", "distillation.teacher_models.b.model_path=y"],
        "needs a key of its own",
    ),
    "misspelled": (
        [f"{TEACHER}.model_path=x", "distillation.teacher_models.b.model_pth=y"],
        "has 'model_pth'",
    ),
    "warm": (
        [
            f"{TEACHER}.model_path=x",
            f"{TEACHER}.endpoint=http://a/v1",
            "actor_rollout_ref.rollout.temperature=0.7",
        ],
        "at temperature 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(case, toy, tmp_path):
    changes, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        toy_run(toy, tmp_path, "distillation.enabled=true", *changes)


def test_a_teacher_with_another_tokenizer_is_refused_by_name(toy, tmp_path):
    folder = save_tiny_model(tmp_path / "other")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    names = [name for name in vocabulary if name in "78"]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="both need one tokenizer"):
        distilled(toy, tmp_path / "run", path=folder)


def test_a_template_that_asks_for_a_missing_column_is_refused_before_the_run(toy, tmp_path):
    changes = (f"{TEACHER}.weights=start", f"{TEACHER}.privileged_prompt='{{prompt}}{{solution}}'")
    with pytest.raises(DataError, match=r"fails on a row \(KeyError\('solution'\)"):
        distilled(toy, tmp_path, *changes)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk", "reverse_kl_full"])
def test_a_student_takes_over_its_teachers_habit(mode, toy, teacher, tmp_path):
    alone = (f"{LOSS}.use_task_rewards=false", "trainer.total_training_steps=25")
    steps, _ = distilled(toy, tmp_path / "a", *alone, mode=mode, path=teacher)
    frozen, _ = distilled(
        toy, tmp_path / "b", *alone, f"{ACTOR}.optim.lr=0", mode=mode, path=teacher
    )
    assert steps[-1][SCORE] > 0.6
    assert frozen[-1][SCORE] < 0.2
    assert steps[-1]["distillation/divergence"] < 0.3 * frozen[-1]["distillation/divergence"]


@pytest.mark.slow
def test_teachers_on_ranks_of_their_own_say_the_same(toy, tmp_path):
    options = {"mode": "forward_kl_topk", "path": toy / "model"}
    once = (f"{ACTOR}.optim.lr=0", "trainer.total_training_steps=1", "trainer.controller=local")
    apart = ("distillation.nnodes=1", "distillation.n_gpus_per_node=2")
    (expected,), _ = distilled(toy, tmp_path / "a", *once, **options)
    (found,), _ = distilled(toy, tmp_path / "b", *once, *apart, **options)
    names = [name for name in expected if name.startswith("distillation/")]
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names])


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(toy, tmp_path):
    model = toy / "model"
    common = [f"{LOSS}.use_task_rewards=false", "trainer.total_training_steps=6"]
    (tmp_path / "demonstrations.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+1=", "response": "7 7"}) + "\n" for a in range(5))
    )
    common += [f"{ACTOR}.sft_replay.files={tmp_path / 'demonstrations.jsonl'}"]
    _, straight = distilled(toy, tmp_path / "a", *common, mode="reverse_kl_full", path=model)
    output = tmp_path / "b"
    saves = [*common, "trainer.save_freq=2"]
    script = (
        "import sys, pathlib\n"
        "from tests.trainer.test_distillation import distilled\n"
        "toy, output, path, *changes = sys.argv[1:]\n"
        "distilled(pathlib.Path(toy), pathlib.Path(output), *changes, mode='reverse_kl_full', "
        "path=path)\n"
    )
    command = [sys.executable, "-c", script, str(toy), str(output), str(model), *saves]
    output.mkdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "COMMITTED step=4" in line:
                os.kill(process.pid, signal.SIGKILL)
                break
        assert process.wait(60) == -signal.SIGKILL
    _, resumed = distilled(toy, output, *saves, mode="reverse_kl_full", path=model)
    assert resumed.global_steps == 6
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value), name
