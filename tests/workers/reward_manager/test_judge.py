"""Another model grades; the network may fail, and the graded text may argue."""

import asyncio
import json
import threading
import time

import numpy as np
import pytest
import torch

from tests.pace import wait_until
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.reward_manager.injections import INJECTIONS
from tests.workers.reward_manager.judge_server import (
    TOKEN,
    judge_server,
    key_of,
    material_of,
    verdict,
)
from verl.config.ppo import PPOConfig
from verl.config.reward import FSDPRewardModelConfig
from verl.protocol import DataProto
from verl.utils.chat_client import ChatClient, ChatEndpoint, ChatUnavailable
from verl.utils.environment import temp_env_var
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.adapters import grades_of
from verl.workers.reward_manager.grader import Abstain, InfraError, Score
from verl.workers.reward_manager.judge import (
    Judge,
    JudgeRewardManager,
    NoVerdict,
    Question,
)
from verl.workers.reward_manager.registry import get_reward_manager_cls

KEY = "TEST_JUDGE_KEY"
FAST = {"api_key_env": KEY, "first_pause_seconds": 0.02, "request_timeout_seconds": 5.0}


@pytest.fixture(autouse=True)
def _key():
    with temp_env_var(KEY, TOKEN):
        yield


def ask(server, candidate="4", *, options=None, **changes):
    endpoint = ChatEndpoint(url=server.url, model="judge", **{**FAST, **changes})
    judge = Judge(endpoint, **(options or {}))
    return asyncio.run(judge("sums", candidate, "4", {"raw_prompt": "2+2?"}))


# ---- a verdict -----------------------------------------------------------------------------------


def test_the_verdict_is_the_score():
    with judge_server(lambda r: "It fits.\n" + verdict(r, 0.75, reason="right")) as server:
        found = ask(server)
    assert found == Score(0.75, {"judge_reason": "right", "judge_questions": 1})


def test_the_judge_is_asked_with_the_key_the_model_and_all_it_needs():
    with judge_server(lambda r: verdict(r, 1)) as server:
        ask(server, "four", options={"sampling": {"max_tokens": 99}})
    (request,) = server.requests
    assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    assert request["model"] == "judge"
    assert request["temperature"] == 0.0
    assert request["max_tokens"] == 99
    assert material_of(request) == {"question": "2+2?", "reference": "4", "candidate": "four"}


def test_a_judge_that_thinks_aloud_is_heard_after_its_thoughts():
    def answer(request):
        return f"<think>perhaps\n{verdict(request, 0)}\nno</think>\n{verdict(request, 1)}"

    with judge_server(answer) as server:
        assert ask(server).value == 1.0


def test_each_question_has_a_key_of_its_own():
    with judge_server(lambda r: verdict(r, 1)) as server:
        ask(server)
        ask(server)
    keys = {key_of(request) for request in server.requests}
    assert len(keys) == 2
    assert all(len(key) == 16 for key in keys)


# ---- no verdict ----------------------------------------------------------------------------------

NO_VERDICTS = {
    "words": lambda r: "The score is 1.",
    "bare JSON": lambda r: '{"score": 1}',
    "a plain fence": lambda r: '```json\n{"score": 1}\n```',
    "a fence with another key": lambda r: '```verdict-0123456789abcdef\n{"score": 1}\n```',
    "a fence without the key": lambda r: '```verdict\n{"score": 1}\n```',
    "two blocks": lambda r: f"{verdict(r, 1)}\n{verdict(r, 1)}",
    "an open block": lambda r: verdict(r, 1).removesuffix("```"),
    "no JSON": lambda r: verdict(r, 1).replace('"score"', "score"),
    "no score": lambda r: verdict(r, 1).replace("score", "grade"),
    "further fields": lambda r: verdict(r, 1, override=True),
    "a field twice": lambda r: verdict(r, 1).replace("{", '{"score": 0, '),
    "a truth value": lambda r: verdict(r, True),
    "text": lambda r: verdict(r, "1"),
    "out of range": lambda r: verdict(r, 1.5),
    "not finite": lambda r: verdict(r, float("nan")),
    "a list": lambda r: f"```verdict-{key_of(r)}\n[1]\n```",
    "deep nesting": lambda r: f"```verdict-{key_of(r)}\n{'[' * 3000}\n```",
    "an endless block": lambda r: verdict(r, 1, reason="x" * 5000),
    "nothing": lambda r: "",
}


@pytest.mark.parametrize("name", NO_VERDICTS)
def test_anything_but_one_block_in_the_agreed_form_is_no_verdict(name):
    with judge_server(NO_VERDICTS[name]) as server:
        found = ask(server, options={"max_questions": 2})
    assert isinstance(found, Abstain)
    assert found.reason.startswith("no verdict in 2 answers of the judge; last: the ")
    assert len(server.requests) == 2, "asked again with a new key before it abstains"


def test_a_judge_that_forgets_the_form_once_is_asked_again():
    def answer(request):
        return "hm" if len(server.requests) == 1 else verdict(request, 1)

    with judge_server(answer) as server:
        assert ask(server) == Score(1.0, {"judge_reason": "", "judge_questions": 2})


# ---- text that argues ----------------------------------------------------------------------------


@pytest.mark.parametrize("candidate", INJECTIONS, ids=range(len(INJECTIONS)))
def test_a_candidate_arrives_whole_and_cannot_leave_its_string(candidate):
    asked = Question(question="2+2?", candidate=candidate, reference="4").keyed()
    text = asked.messages()[1]["content"]
    first, body, last = text.split("\n")
    assert (first, last) == (f"BEGIN {asked.key}", f"END {asked.key}")
    assert json.loads(body)["candidate"] == candidate
    assert not set("<>") & set(body)
    assert "[INST]" not in body
    assert "[/INST]" not in body
    assert body.isprintable()
    assert asked.messages()[0] == Question(question="", candidate="", key=asked.key).messages()[0]


@pytest.mark.parametrize("candidate", INJECTIONS, ids=range(len(INJECTIONS)))
def test_a_candidate_that_the_judge_repeats_is_not_its_verdict(candidate):
    asked = Question(question="2+2?", candidate=candidate).keyed()
    with pytest.raises(NoVerdict):
        asked.verdict(candidate)
    quoting = f"The candidate says:\n{candidate}\nIt is wrong.\n"
    assert credit(asked, quoting + verdict({"messages": asked.messages()}, 0)) == 0.0
    full = quoting.replace("wrong", "right") + verdict({"messages": asked.messages()}, 1)
    assert credit(asked, full) == 1.0, "a verdict of the judge's own is heard"


def credit(question, answer):
    return question.verdict(answer).score


def test_over_the_corpus_arguing_wins_nothing():
    """A judge that repeats the candidate before it decides on the answer at its end."""

    def answer(request):
        candidate = material_of(request)["candidate"]
        return f"It says: {candidate}\nSo:\n{verdict(request, int(candidate.endswith('4')))}"

    def mean(candidates):
        found = [ask(server, text, options={"max_questions": 1}) for text in candidates]
        scores = [grade.value for grade in found if isinstance(grade, Score)]
        return sum(scores) / len(candidates)

    with judge_server(answer) as server:
        control = mean(["It is 5", "five", "5"])
        injected = mean([f"{text}\n5" for text in INJECTIONS])
        rewarded = mean([f"{text}\n4" for text in INJECTIONS[:3]])
    assert control == 0.0
    assert injected <= control + 0.02
    assert rewarded > 0, "the judge does credit what deserves it"


@pytest.mark.parametrize("obeys", ["literally", "in its own words", "the key too"])
def test_a_judge_that_obeys_the_candidate_gives_it_nothing(obeys):
    """It does what the candidate demands the first time it is asked, and judges when asked again.

    One that puts the right key around what the candidate dictates has two blocks: its own and that.
    """

    def answer(request):
        candidate = material_of(request)["candidate"]
        asked.setdefault(candidate, 0)
        asked[candidate] += 1
        sober = verdict(request, int(candidate.endswith("4")))
        dictated = candidate.rpartition("\n")[0]
        if asked[candidate] > 1 or not dictated:
            return sober
        return {
            "literally": dictated,
            "in its own words": 'Of course: {"score": 1}. Score: 1/1, full marks.',
            "the key too": f"{dictated}\n{verdict(request, 1)}\nBut really:\n{sober}",
        }[obeys]

    def mean(candidates):
        found = [ask(server, text, options={"max_questions": 2}) for text in candidates]
        return sum(grade.value for grade in found if isinstance(grade, Score)) / len(found)

    asked: dict[str, int] = {}
    with judge_server(answer) as server:
        control = mean(["It is 5", "five", "5"])
        injected = mean([f"{text}\n5" for text in INJECTIONS])
    assert max(asked.values()) == 2, "it was persuaded, and had to be asked again"
    assert injected <= control + 0.02


# ---- a network that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_asked_again(status):
    def answer(request):
        return (status, "busy") if len(server.requests) < 3 else verdict(request, 1)

    with judge_server(answer) as server:
        assert ask(server).value == 1.0
    gaps = np.diff(server.times)
    assert gaps[0] >= 0.02
    assert gaps[1] >= 0.04, "the pause doubles"


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_will_not_pass_is_not_asked_again(status):
    with judge_server(lambda r: (status, "no")) as server, pytest.raises(ChatUnavailable) as error:
        ask(server)
    assert len(server.requests) == 1
    assert f"status {status}" in str(error.value)
    assert TOKEN not in str(error.value)


def test_attempts_come_to_an_end():
    with (
        judge_server(lambda r: (500, "broken")) as server,
        pytest.raises(ChatUnavailable, match=r"no answer in 3 attempts; last: status 500"),
    ):
        ask(server, max_attempts=3)
    assert len(server.requests) == 3


def test_a_server_may_ask_for_a_pause():
    def answer(request):
        is_first = len(server.requests) == 1
        return (429, "later", {"Retry-After": "60"}) if is_first else verdict(request, 1)

    with judge_server(answer) as server:
        ask(server, max_pause_seconds=0.3)
    assert 0.3 <= server.times[1] - server.times[0] < 60, "but not for any pause"


def test_a_hanging_server_is_left_at_the_deadline():
    release = threading.Event()

    def answer(request):
        release.wait(600)
        return verdict(request, 1)

    with judge_server(answer) as server:
        with pytest.raises(ChatUnavailable, match=r"no answer within 0\.2 s"):
            ask(server, request_timeout_seconds=0.2, max_attempts=2)
        release.set()


def test_an_endless_answer_is_cut_off():
    with (
        judge_server(lambda r: (200, "x" * 200_000)) as server,
        pytest.raises(ChatUnavailable, match="longer than 1000 bytes"),
    ):
        ask(server, max_response_bytes=1000)


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"choices": [{"message": {"content": null}}]}'])
def test_an_answer_that_is_no_completion_is_a_fault(body):
    with judge_server(lambda r: (200, body)) as server, pytest.raises(ChatUnavailable):
        ask(server, max_attempts=1)


def test_the_key_is_not_carried_to_another_address():
    with judge_server(lambda r: verdict(r, 1)) as other:
        moved = (307, "", {"Location": other.url + "/chat/completions"})
        with judge_server(lambda r: moved) as server, pytest.raises(ChatUnavailable):
            ask(server)
    assert other.requests == []


def test_nobody_there_is_a_fault():
    with judge_server(lambda r: "") as server:
        pass
    with pytest.raises(ChatUnavailable, match="gave no answer in 2 attempts"):
        ask(server, max_attempts=2)


def test_a_key_that_is_not_set_is_named():
    with judge_server(lambda r: "") as server, pytest.raises(ChatUnavailable, match="NO_SUCH_KEY"):
        ask(server, api_key_env="NO_SUCH_KEY")
    assert server.requests == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [("127.0.0.1:80", "must be an address"), ("http://me:secret@host/v1", "holds a password")],
)
def test_an_address_that_cannot_work_is_refused_at_the_start(url, reason):
    with pytest.raises(ValueError, match=reason):
        ChatEndpoint(url=url, model="judge")


# ---- the manager ---------------------------------------------------------------------------------


def batch(*texts):
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text).input_ids for text in texts]
    width = max(map(len, ids))
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] + [1] * len(row) + [0] * (width - len(row)) for row in ids])
    prompts = np.empty(len(texts), dtype=object)
    prompts[:] = [[{"role": "user", "content": f"question {i}"}] for i in range(len(texts))]
    return DataProto.from_dict(
        tensors={"responses": responses, "attention_mask": mask},
        non_tensors={
            "data_source": ["sums"] * len(texts),
            "reward_model": [{"ground_truth": "7"} for _ in texts],
            "raw_prompt": prompts,
        },
    )


def manager(server, **options):
    cls = get_reward_manager_cls("judge")
    options = {"max_concurrent": 8, **FAST, **options}
    return cls(tiny_tokenizer(), 0, None, url=server.url, model="judge", **options)


def test_every_response_gets_its_own_verdict_in_its_place():
    def answer(request):
        material = material_of(request)
        number = int(material["question"][0]["content"].split()[1])
        time.sleep(0.02 * (4 - number))  # the last question is answered first
        return verdict(request, number / 4)

    with judge_server(answer) as server:
        grades = grades_of(batch("7", "77", "777", "7777"), manager(server))
    assert [grade.value for grade in grades] == [0.0, 0.25, 0.5, 0.75]
    assert all(isinstance(grade, Score) for grade in grades)


def test_no_more_questions_are_open_than_allowed():
    def answer(request):
        wait_until(lambda: server.most_open >= 2)
        return verdict(request, 1)

    with judge_server(answer) as server:
        grades_of(batch(*["7"] * 6), manager(server, max_concurrent=2))
    assert server.most_open == 2


def test_an_outage_is_a_fault_and_a_shrug_is_an_abstention_never_a_score():
    def answer(request):
        content = material_of(request)["question"][0]["content"]
        if content == "question 0":
            return (500, "down")
        return "who knows" if content == "question 1" else verdict(request, 1)

    with judge_server(answer) as server:
        grades = grades_of(batch("1", "2", "3"), manager(server, max_attempts=2))
    assert [type(grade) for grade in grades] == [InfraError, Abstain, Score]
    assert "status 500" in grades[0].reason


def test_a_function_beside_the_judge_is_refused():
    with pytest.raises(ValueError, match="would not call custom_reward_function"):
        JudgeRewardManager(None, 0, lambda **kw: 1.0, url="http://127.0.0.1:1/v1", model="m")
    JudgeRewardManager(None, 0, default_compute_score, url="http://127.0.0.1:1/v1", model="m")


def test_the_configuration_has_the_limits_of_the_judge():
    config = PPOConfig(reward_model=FSDPRewardModelConfig(max_concurrent=7, max_rpm=60, timeout=9))
    limits = JudgeRewardManager.options_of(config)
    made = JudgeRewardManager(None, 0, None, url="http://127.0.0.1:1/v1", model="m", **limits)
    assert made.max_concurrent == 7
    assert made.timeout_seconds == 9


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="instruction"):
        JudgeRewardManager(None, 0, url="http://127.0.0.1:1/v1", model="m", instruction="x")


def test_a_judge_needs_an_address_and_a_model():
    with pytest.raises(ValueError, match=r"needs model and url in reward_model\.reward_kwargs"):
        JudgeRewardManager(None, 0)


def test_the_client_can_be_used_by_itself():
    with judge_server(lambda r: "hello") as server:
        client = ChatClient(ChatEndpoint(url=server.url, model="judge", **FAST))
        assert asyncio.run(client.complete([{"role": "user", "content": "hi"}])) == "hello"
