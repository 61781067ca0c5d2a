"""Expert routes that a real vLLM returns are those of the training pass, and are replayed there.

On a CPU Triton interprets the kernels of vLLM's model runner that returns them, so few tokens are
drawn here.
"""

import json
import subprocess

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_model
from tests.toy import ACTOR, ROLLOUT, make_toy, toy_run
from tests.workers.rollout.test_routes import training_routes
from tests.workers.rollout.vllm.helpers import (
    SHAPE,
    assert_greedy_as,
    generate,
    needs_vllm,
    reference_log_probs,
    rollout_config,
    saved_model,
    train_a_little,
    vllm_process,
    weights_of,
)
from verl.utils.environment import vllm_python
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.engine_options import vllm_options

pytestmark = [*needs_vllm, pytest.mark.slow]
EXPERTS = {"qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 64}, "mixtral": {}}
LONG = [5 + n % 80 for n in range(40)]
"""More than a block of 32 tokens."""

ASKED_TWICE = """
import json, sys
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.vllm_rollout.hosted import build

given = json.load(sys.stdin)
engine = build(given["options"])
step = engine._engine.step
for number in range(2):
    params = SamplingParams(max_tokens=4, seed=number, ignore_eos=True)
    engine.submit(number, GenerationRequest(request_id="r", prompt_ids=given["ids"], params=params))
    ids, cached = list(given["ids"]), []
    engine._engine.step = lambda: [cached.append(o.num_cached_tokens) or o for o in step()]
    while engine.has_work():
        for _, delta in engine.step():
            ids += delta.token_ids
    print("SAID", json.dumps([ids, cached[-1], delta.routed_experts.tolist()]))
"""


def assert_routes_of_training(model, ids, routes):
    """Experts of a token are a set: vLLM gives them in another order."""
    assert routes.shape == (len(ids) - 1, 2, 2), "all tokens but the last, of both layers"
    expected = training_routes(model, ids)[:-1].numpy()
    assert np.array_equal(np.sort(routes, -1), np.sort(expected, -1))


def model_of_training(model_type, plain):
    model = tiny_model(model_type, **{**SHAPE, **EXPERTS[model_type]})
    model.load_state_dict(plain.state_dict())
    return model


@pytest.mark.parametrize("model_type", EXPERTS)
def test_routes_are_those_of_the_training_pass_after_an_update_too(tmp_path, model_type):
    plain = saved_model(tmp_path, model_type, **EXPERTS[model_type])
    engine = vllm_process(tmp_path, enable_rollout_routing_replay=True, has_weights=True)
    engine.start()
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    try:
        for version in (0, 1):
            if version:
                train_a_little(plain)
                engine.update_weights(weights_of(plain), version)
            trained = model_of_training(model_type, plain)
            assert_greedy_as(plain, engine)
            for output in generate(engine, params, LONG, num_samples=3):
                assert_routes_of_training(trained, LONG + output.token_ids, output.routed_experts)
        for filters in ({"top_k": 5}, {"top_p": 0.7}):
            filtered = SamplingParams(max_tokens=6, seed=3, ignore_eos=True, **filters)
            (output,) = generate(engine, filtered)
            whole = reference_log_probs(plain, output).sort(-1, descending=True).values
            kept = (whole.exp().cumsum(-1) - whole.exp() < 0.7).sum(-1).tolist()
            kept = [5] * 6 if "top_k" in filters else kept
            mass = [row[:num].logsumexp(0) for row, num in zip(whole, kept, strict=True)]
            drawn = reference_log_probs(plain, output)[torch.arange(6), output.token_ids]
            expected = drawn - torch.stack(mass)
            torch.testing.assert_close(
                torch.tensor(output.log_probs), expected, rtol=0, atol=1e-4, msg=str(filters)
            )
        ends_at_text = SamplingParams(max_tokens=6, stop=("7",))
        with pytest.raises(ValueError, match="use stop_token_ids"):
            generate(engine, ends_at_text)
    finally:
        engine.close()


def test_tokens_that_the_prefix_cache_knows_have_their_routes(tmp_path):
    plain = saved_model(tmp_path, "qwen3_moe", **EXPERTS["qwen3_moe"])
    config = rollout_config(enable_rollout_routing_replay=True, dtype="float32")
    options = vllm_options(config, str(tmp_path), device="cpu", has_weights=True)
    said = subprocess.run(
        [str(vllm_python()), "-c", ASKED_TWICE],
        input=json.dumps({"options": options, "ids": LONG}),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    first, second = (
        json.loads(line.removeprefix("SAID "))
        for line in said.splitlines()
        if line.startswith("SAID")
    )
    assert (first[1], second[1]) == (0, 32)
    trained = model_of_training("qwen3_moe", plain)
    for ids, _, routes in (first, second):
        assert_routes_of_training(trained, ids, np.array(routes))


def test_a_run_replays_the_routes_of_conversations(tmp_path):
    """The loop is a user's own and returns ids alone."""
    toy = make_toy(tmp_path)
    saved_model(toy / "model", "qwen3_moe", **EXPERTS["qwen3_moe"])
    entry = {"name": "asking", "_target_": "tests.e2e.asking.AskingLoop", "num_tokens": 20}
    files = {name: str(tmp_path / name) for name in ("asked", "die_at")}
    (tmp_path / "loops.yaml").write_text(json.dumps([entry | files]))
    steps, trainer = toy_run(
        toy,
        tmp_path / "run",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.python={vllm_python()}",
        f"{ROLLOUT}.calculate_log_probs=true",
        f"{ROLLOUT}.enable_rollout_routing_replay=true",
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=asking",
        f"{ACTOR}.router_replay.mode=R3",
        f"{ACTOR}.ppo_mini_batch_size=2",
        "data.max_response_length=64",
    )
    batch = trainer.batch.batch
    assert batch["routed_experts"].shape[2:] == (2, 2)
    assert batch["routed_experts"].dtype == torch.uint8
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 1e-4
    # The second mini-batch meets a policy that has moved, and still takes the engine's experts.
    assert all(0 < step["actor/router_mismatch"] < 0.5 for step in steps)
