"""What a run needs before it can be built is refused by name when it is not there."""

import pytest

from tests.toy import toy_run
from verl.trainer.task_runner import NoTokenizer


def test_a_folder_without_a_tokenizer_is_named_with_its_keys(toy, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NoTokenizer, match=r"empty.*actor_rollout_ref\.model\.path.*existing"):
        toy_run(toy, tmp_path, f"actor_rollout_ref.model.tokenizer_path={empty}")
