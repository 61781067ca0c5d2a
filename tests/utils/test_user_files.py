"""A file that cannot be read is named in one sentence, whatever is wrong with it."""

import os

import pytest

from tests.tiny_tokenizer import save_tiny_model
from verl.environments.pool import EnvironmentSpec
from verl.models.lora import LoraOptions, stored_config
from verl.utils.environment import EndsTheRun
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.user_files import BrokenFile, read_json, read_json_object, read_yaml
from verl.workers.rollout.engine_options import end_tokens


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"a": ', "is no JSON"),
        (b"", "is no JSON"),
        (b"[" * 200_000, "is no JSON"),
        (b"[1]", r"holds \[1\]; it must hold a JSON object"),
        (b"null", "holds None; it must hold a JSON object"),
        (b'\xff\xfe{"a": 1}', "is no text in UTF-8"),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_holds_no_object_is_refused_by_name(tmp_path, content, text):
    file = tmp_path / "some.json"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(BrokenFile, match=rf"some\.json {text}") as refusal:
        read_json_object(file)
    assert isinstance(refusal.value, EndsTheRun)
    assert refusal.value.exit_code == 2


def test_absent_and_forbidden_files_are_named(tmp_path):
    with pytest.raises(BrokenFile, match=r"none\.json cannot be read: No such file"):
        read_json(tmp_path / "none.json")
    file = tmp_path / "closed.json"
    file.write_text("{}")
    file.chmod(0)
    if os.geteuid() != 0:  # who may read everything
        with pytest.raises(BrokenFile, match=r"closed\.json cannot be read: Permission denied"):
            read_json(file)


def test_yaml_is_read_or_named(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text("a: [1]")
    assert read_yaml(file) == {"a": [1]}
    file.write_text("a: [")
    with pytest.raises(BrokenFile, match=r"some\.yaml is no YAML"):
        read_yaml(file)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_of_a_tokenizer_is_named(tmp_path, name):
    save_tiny_model(tmp_path)
    (tmp_path / name).write_text('{"a": ')
    with pytest.raises(BrokenFile, match=rf"{name} is no JSON"):
        hf_tokenizer(tmp_path)


def test_the_end_tokens_of_a_broken_file_are_not_guessed(tmp_path):
    save_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("[2]")
    with pytest.raises(BrokenFile, match=r"generation_config\.json holds \[2\]"):
        end_tokens(tmp_path, trust_remote_code=False)


def test_a_broken_description_of_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text('{"r": ')
    with pytest.raises(BrokenFile, match=r"adapter_config\.json is no JSON"):
        stored_config(tmp_path, LoraOptions(rank=0, adapter_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("kwargs", "text"), [('{"n": ', "is no JSON"), ("[1]", "no mapping"), ([1], "no mapping")]
)
def test_broken_arguments_of_an_environment_are_named_with_it(kwargs, text):
    with pytest.raises(ValueError, match=rf"env 'a:B': kwargs are .*{text}"):
        EnvironmentSpec.of({"name": "a:B", "kwargs": kwargs})
