"""The server as a program: it answers a file, or serves until it is told to end."""

import os
import re
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from tests.server.engines import byte_tokenizer, save_model
from tests.workers.rollout.helpers import request
from verl.config.faults import ConfigError
from verl.models.loading import load_causal_lm
from verl.trainer.main_generation_server import main
from verl.utils.dataset.prompts import as_prompt, encode_prompt
from verl.utils.dataset.tables import DataError
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.native.sequence import end_tokens

ROOT = Path(__file__).parents[2]
PROMPTS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 2 + 2?"}],
    [{"role": "user", "content": "again"}],
]
ROLLOUT = {"n": 2, "response_length": 12, "max_num_seqs": 8, "temperature": 0.8}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompt_file(tmp_path):
    table = pa.table({"prompt": PROMPTS, "extra": [1, 2, 3]})
    pq.write_table(table, tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def config_for(model_folder, prompt_file, output, **rollout):
    return OmegaConf.create(
        {
            "data": {
                "train_files": str(prompt_file),
                "output_path": str(output),
                "max_prompt_length": 200,
            },
            "actor_rollout_ref": {
                "model": {"path": str(model_folder)},
                "rollout": {**ROLLOUT, "server": {"port": 0}, "prompt_length": 200, **rollout},
            },
            "trainer": {"n_gpus_per_node": 1, "device": "cpu"},
        }
    )


def direct_responses(model_folder):
    """What the engine gives for each row with the row's number as seed."""
    tokenizer = byte_tokenizer()
    model = load_causal_lm(str(model_folder)).eval()
    limits = EngineLimits(max_num_seqs=8, max_prompt_tokens=200, max_response_tokens=12)
    engine = NativeEngine(model, limits, eos_token_ids=end_tokens(model, tokenizer))
    requests = [
        request(
            encode_prompt(as_prompt(prompt, tokenizer), tokenizer),
            SamplingParams(temperature=0.8, max_tokens=12, seed=row),
            num_samples=2,
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    return [
        [tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs]
        for outputs in engine.generate_batch(requests)
    ]


def test_a_file_of_prompts_comes_back_with_responses(
    model_folder, prompt_file, tmp_path, capsys, caplog
):
    caplog.set_level("DEBUG")
    output = tmp_path / "new" / "answers.parquet"
    main(config_for(model_folder, prompt_file, output))
    written = pq.read_table(output)
    assert written.column_names == ["prompt", "extra", "responses"]
    assert written["extra"].to_pylist() == [1, 2, 3]
    assert written["responses"].to_pylist() == direct_responses(model_folder)
    assert [path.name for path in output.parent.iterdir()] == ["answers.parquet"]
    said = capsys.readouterr().out
    assert said.count("token: ") == 1
    token = said.partition("token: ")[2].split()[0]
    assert re.search(rf"^chat in the browser: http://127.0.0.1:\d+/#token={token}$", said, re.M)
    assert token not in caplog.text
    assert "/v1" in said


def test_a_prompt_that_is_too_long_is_named_with_its_row(model_folder, prompt_file, tmp_path):
    config = config_for(model_folder, prompt_file, tmp_path / "answers.parquet")
    config.data.max_prompt_length = 40
    with pytest.raises(DataError, match=r"prompts\.parquet:2: .*40 tokens"):
        main(config)
    assert not (tmp_path / "answers.parquet").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("actor_rollout_ref.rollout.temperature=0", "would be equal"),
        ("trainer.nnodes=2", "one machine"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "must divide"),
        ("data.output_path=s3://bucket/file.parquet", "local file"),
        ("data.train_files=prompts.csv", "parquet"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_starts(
    model_folder, prompt_file, tmp_path, change, message
):
    config = config_for(model_folder, prompt_file, tmp_path / "answers.parquet")
    config.merge_with_dotlist([change])
    with pytest.raises(ConfigError, match=message):
        main(config)


@pytest.mark.slow
def test_an_address_that_is_taken_is_refused_and_no_engine_is_left(
    model_folder, prompt_file, tmp_path
):
    config = config_for(model_folder, prompt_file, tmp_path / "answers.parquet")
    before = set(psutil.Process().children())
    with socket.create_server(("127.0.0.1", 0)) as holder:
        config.actor_rollout_ref.rollout.server.port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=r"cannot listen on .*choose another port"):
            main(config)
    assert set(psutil.Process().children()) == before


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(model_folder, prompt_file):
    command = [
        sys.executable, "-m", "verl.trainer.main_generation_server",
        f"actor_rollout_ref.model.path={model_folder}", "actor_rollout_ref.rollout.server.port=0",
        "actor_rollout_ref.rollout.max_num_seqs=8", "trainer.n_gpus_per_node=2",
        "trainer.device=cpu", "hydra.run.dir=.", "hydra.output_subdir=null",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "VERL_SERVER_TOKEN": "token-for-this-test",
        "PYTHONPATH": str(ROOT),
    }
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=prompt_file.parent
    )
    try:
        where = next(line for line in program.stdout if line.startswith("serving"))
        url = next(word for word in where.split() if word.startswith("http"))
        assert program.stdout.readline() == "token: the one in VERL_SERVER_TOKEN\n"
        page = url.replace("/v1", "/")
        assert program.stdout.readline() == f"chat in the browser: {page}\n"
        openai = import_module("openai")  # takes seconds, so not while tests are collected
        with openai.OpenAI(base_url=url, api_key="token-for-this-test", max_retries=0) as client:
            (model,) = client.models.list().data
            answer = client.completions.create(model=model.id, prompt="hello", max_tokens=5)
        assert answer.usage.completion_tokens <= 5
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=60) == 0
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
        files = [path for path in prompt_file.parent.rglob("*") if path.is_file()]
        assert not [path for path in files if b"token-for-this-test" in path.read_bytes()]
    finally:
        program.kill()
        program.wait(timeout=10)
        program.stdout.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"path": "/nowhere/model"}}, r"model\.path is .*nowhere.*does not exist"),
        ({"rollout": {"name": "vllm"}}, r"vllm is not installed; use .*rollout\.name=native"),
        ({"rollout": {"python": "/nowhere/python"}}, r"rollout\.python is .*does not exist"),
    ],
)
def test_what_is_not_here_is_named_before_anything_starts(
    model_folder, prompt_file, tmp_path, change, message
):
    config = config_for(model_folder, prompt_file, tmp_path / "out.parquet")
    config = OmegaConf.merge(config, {"actor_rollout_ref": change})
    with pytest.raises(ConfigError, match=message):
        main(config)


def test_a_model_without_a_tokenizer_is_named(prompt_file, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"model\.path is .*empty.*no tokenizer is found"):
        main(config_for(empty, prompt_file, tmp_path / "out.parquet"))


def test_the_plan_of_a_server_is_printed_and_its_option_is_not_called_unused(model_folder, capsys):
    arguments = ["trainer.dry_run=True", "trainer.device=cpu", "trainer.n_gpus_per_node=1"]
    arguments += [f"actor_rollout_ref.model.path={model_folder}"]
    main(OmegaConf.from_dotlist(arguments))
    printed = capsys.readouterr()
    assert "plan: serve" in printed.out
    assert "no effect" not in printed.out + printed.err
