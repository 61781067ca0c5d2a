import _thread
import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.agent_loop.fakes import engine_loop
from tests.trainer.generation.cases import (
    CONTENT_ONLY,
    Starts,
    config_of,
    generated,
    native,
    responses_of,
    rows,
    saved_model,
    written,
)
from verl.trainer.generation.engines import GenerationFailed
from verl.trainer.generation.output import Parts
from verl.trainer.generation.run import MAX_ATTEMPTS, Stopped, generate
from verl.utils.dataset.tables import DataError
from verl.utils.environment import Misuse
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.native.engine import NativeEngine

NUM_ROWS = 8


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return written(tmp_path_factory.mktemp("prompts") / "prompts.parquet", rows(NUM_ROWS))


@pytest.fixture(scope="module")
def expected(model, source, tmp_path_factory):
    """What an undisturbed run gives."""
    return generated(config_of(model, source, tmp_path_factory.mktemp("whole") / "out.parquet"))


class Flawed(NativeEngine):
    """Fails with `error` as often as `fails` says for a row, counted from 1; with the `output` of
    the run, not before two batches are saved."""

    def __init__(self, error, fails, output=None):
        engine = native()
        super().__init__(engine.core.runner.module, engine.limits, eos_token_ids=[2])
        self.error, self.fails = error, dict(fails)
        self.parts = None if output is None else output.with_name(f"{output.name}.parts")

    def submit(self, request, on_end=None):
        row = int(request.request_id.removeprefix("row "))
        if not self.fails.get(row, 0):
            return super().submit(request, on_end)
        self.fails[row] -= 1
        return asyncio.run_coroutine_threadsafe(self.fail_in_time(), engine_loop(os.getpid()))

    async def fail_in_time(self):
        while self.parts and len(list(self.parts.glob("*.parquet"))) < 2:
            await asyncio.sleep(0.01)
        await self.fail()

    async def fail(self):
        raise self.error


# ---- the file ------------------------------------------------------------------------------------


def test_the_output_is_the_input_with_n_responses_per_row(model, source, expected, tmp_path):
    output = tmp_path / "deep" / "out.parquet"
    summary = generate(config_of(model, source, output), Starts())
    table, given = pq.read_table(output), pq.read_table(source)
    assert table.column_names == [*given.column_names, "responses"]
    assert table.drop_columns("responses").to_pylist() == given.to_pylist()
    assert table.schema.field("weights") == given.schema.field("weights")
    assert [len(responses) for responses in expected] == [2] * NUM_ROWS
    assert len({tuple(responses) for responses in expected}) == NUM_ROWS
    assert (summary.num_rows, summary.num_responses) == (NUM_ROWS, 2 * NUM_ROWS)
    assert sum(summary.stop_reasons.values()) == 2 * NUM_ROWS
    assert 2 * NUM_ROWS <= summary.num_tokens <= 2 * NUM_ROWS * 6
    assert [file.name for file in output.parent.iterdir()] == ["out.parquet"]


def test_messages_and_texts_that_say_the_same_get_the_same_responses(model, source, tmp_path):
    as_messages = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows(NUM_ROWS)
    ]
    path = written(tmp_path / "messages.parquet", as_messages)
    options = {"chat_template": CONTENT_ONLY}
    from_texts = generated(config_of(model, source, tmp_path / "a.parquet", **options))
    assert generated(config_of(model, path, tmp_path / "b.parquet", **options)) == from_texts


def test_responses_do_not_depend_on_the_batches_or_on_how_many_engines_share_them(
    model, source, expected, tmp_path
):
    bigger = config_of(model, source, tmp_path / "a.parquet", batch_size=5)
    assert generated(bigger) == expected
    shared = config_of(model, source, tmp_path / "b.parquet", batch_size=1)
    assert generated(shared, native(), native()) == expected


def test_equal_prompts_in_two_rows_and_the_samples_of_a_row_are_drawn_apart(model, tmp_path):
    path = written(tmp_path / "prompts.parquet", [{"prompt": "abc"}] * 3)
    found = generated(config_of(model, path, tmp_path / "out.parquet"))
    assert len({response for responses in found for response in responses}) == 6


def test_another_seed_gives_other_responses(model, source, expected, tmp_path):
    assert generated(config_of(model, source, tmp_path / "out.parquet", seed=1)) != expected


def test_a_column_responses_of_the_input_is_replaced(model, expected, tmp_path):
    old = [{**row, "responses": ["old"]} for row in rows(NUM_ROWS)]
    path = written(tmp_path / "old.parquet", old)
    output = tmp_path / "out.parquet"
    assert generated(config_of(model, path, output)) == expected
    assert pq.read_table(output).column_names.count("responses") == 1


# ---- going on ------------------------------------------------------------------------------------


def test_a_finished_file_is_not_made_again(model, source, tmp_path):
    config, starts = config_of(model, source, tmp_path / "out.parquet"), Starts()
    generate(config, starts)
    assert generate(config, starts).was_done
    assert starts.num_batches == [3]


def test_a_run_that_failed_goes_on_behind_its_last_batch(model, source, expected, tmp_path):
    config = config_of(model, source, tmp_path / "out.parquet")
    flawed = Starts(Flawed(RuntimeError("the disk is full"), {8: 1}, tmp_path / "out.parquet"))
    with pytest.raises(RuntimeError, match="the disk is full"):
        generate(config, flawed)
    assert flawed.num_closed == 1
    starts = Starts()
    generate(config, starts)
    assert starts.num_batches == [1]
    assert responses_of(tmp_path / "out.parquet") == expected


class Interrupted(Flawed):
    """Ctrl-C is pressed while the last batch is at work, which lasts until the run closes it."""

    starts = None

    async def fail(self):
        _thread.interrupt_main()
        deadline = time.monotonic() + 60
        while not self.starts.num_closed and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        raise EngineLostError("closed")


@pytest.fixture
def ctrl_c_is_heard():
    """A shell starts background jobs with SIGINT ignored; the tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_ends_the_run_and_says_how_to_go_on(model, source, expected, tmp_path):
    config = config_of(model, source, tmp_path / "out.parquet")
    interrupted = Starts(Interrupted(None, {8: 1}, tmp_path / "out.parquet"))
    interrupted.rollouts[0].starts = interrupted
    with pytest.raises(Stopped, match=r"finished batches are in .*, and the same command goes on"):
        generate(config, interrupted)
    assert (interrupted.num_closed, interrupted.num_restarts) == (1, 0)
    starts = Starts()
    generate(config, starts)
    assert starts.num_batches == [1]
    assert responses_of(tmp_path / "out.parquet") == expected


def test_a_damaged_part_is_made_again(model, source, expected, tmp_path, caplog):
    config = config_of(model, source, tmp_path / "out.parquet")
    with pytest.raises(RuntimeError):
        generate(config, Starts(Flawed(RuntimeError("stop"), {8: 1}, tmp_path / "out.parquet")))
    part = tmp_path / "out.parquet.parts" / "00000000.parquet"
    octets = bytearray(part.read_bytes())
    octets[len(octets) // 4] ^= 1
    part.write_bytes(octets)
    starts = Starts()
    generate(config, starts)
    assert starts.num_batches == [2]
    assert "is damaged and made again" in caplog.text
    assert responses_of(tmp_path / "out.parquet") == expected


def test_unfinished_results_of_other_settings_are_refused_with_what_differs(
    model, source, expected, tmp_path
):
    output = tmp_path / "out.parquet"
    with pytest.raises(RuntimeError):
        generate(
            config_of(model, source, output),
            Starts(Flawed(RuntimeError("stop"), {8: 1}, tmp_path / "out.parquet")),
        )
    changed = {"rollout": {"temperature": 0.5}}
    with pytest.raises(DataError, match=r"rollout.temperature was 1.0 and is 0.5"):
        generate(config_of(model, source, output, **changed), Starts())
    starts = Starts()
    generate(config_of(model, source, output, overwrite=True, **changed), starts)
    assert starts.num_batches == [3]
    assert responses_of(output) != expected


def test_an_output_of_other_settings_or_of_somebody_else_is_not_replaced_unasked(
    model, source, tmp_path
):
    output = tmp_path / "out.parquet"
    generate(config_of(model, source, output), Starts())
    with pytest.raises(DataError, match=r"data.n_samples was 2 and is 1"):
        generate(config_of(model, source, output, n_samples=1), Starts())
    generate(config_of(model, source, output, n_samples=1, overwrite=True), Starts())
    assert [len(one) for one in responses_of(output)] == [1] * NUM_ROWS
    foreign = tmp_path / "notes.parquet"
    foreign.write_text("mine")
    with pytest.raises(DataError, match="was not written by this command"):
        generate(config_of(model, source, foreign), Starts())
    assert foreign.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_generated(
    model, source, tmp_path
):
    (tmp_path / "file").touch()
    output, starts = tmp_path / "file" / "out.parquet", Starts()
    with pytest.raises(
        Misuse, match=r"data\.output_path is .*out\.parquet, which cannot be written"
    ):
        generate(config_of(model, source, output), starts)
    assert starts.num_batches == []


def test_a_changed_input_or_model_is_another_run(model, source, tmp_path):
    output = tmp_path / "out.parquet"
    generate(config_of(model, source, output), Starts())
    other = written(tmp_path / "prompts.parquet", rows(NUM_ROWS + 1))
    with pytest.raises(DataError, match=r"data: file 0 was 'prompts.parquet"):
        generate(config_of(model, other, output), Starts())
    copy = Path(saved_model(tmp_path))
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.1}))
    with pytest.raises(DataError, match=r"model: file 0 was 'config.json"):
        generate(config_of(str(copy), source, output), Starts())


def test_two_runs_do_not_write_one_file(model, source, tmp_path):
    output = tmp_path / "out.parquet"
    parts = Parts(output, {}, overwrite=False)
    with pytest.raises(DataError, match="another run is writing"):
        generate(config_of(model, source, output), Starts())
    parts.remove()


# ---- prompts that cannot be sent -----------------------------------------------------------------


def test_too_many_bad_prompts_are_named_by_row_before_an_engine_starts(model, tmp_path):
    bad = rows(NUM_ROWS)
    bad[2]["prompt"], bad[5]["prompt"] = "abcdefghi", None
    path, starts = written(tmp_path / "prompts.parquet", bad), Starts()
    with pytest.raises(DataError) as refusal:
        generate(config_of(model, path, tmp_path / "out.parquet"), starts)
    text = str(refusal.value)
    assert f"{path}:3: prompt has more than 8 tokens; raise rollout.prompt_length" in text
    assert f"{path}:6: prompt is null" in text
    assert starts.num_batches == []


def test_one_bad_prompt_among_many_gets_no_responses_and_the_others_theirs(model, tmp_path, caplog):
    many = rows(120)
    many[70]["prompt"] = "abcdefghi"
    path = written(tmp_path / "prompts.parquet", many)
    options = {"n_samples": 1, "batch_size": 60, "rollout": {"response_length": 1}}
    found = generated(config_of(model, path, tmp_path / "out.parquet", **options))
    assert [number for number, one in enumerate(found) if len(one) != 1] == [70]
    assert found[70] == []
    assert f"{path}:71: prompt has more than 8 tokens" in caplog.text


def test_messages_without_a_chat_template_are_told_the_way_out(model, tmp_path):
    path = written(tmp_path / "prompts.parquet", [{"prompt": [{"role": "user", "content": "ab"}]}])
    with pytest.raises(DataError, match=r"set data.chat_template=chatml"):
        generate(config_of(model, path, tmp_path / "out.parquet"), Starts())


def test_a_missing_column_is_named_with_the_one_that_was_meant(model, source, tmp_path):
    with pytest.raises(DataError, match=r"no column 'promt'.*did you mean 'prompt'"):
        generate(config_of(model, source, tmp_path / "out.parquet", prompt_key="promt"), Starts())


# ---- engines that fail ---------------------------------------------------------------------------


def test_a_lost_engine_is_restarted_and_its_rows_are_retried(model, source, expected, tmp_path):
    config = config_of(model, source, tmp_path / "out.parquet")
    starts = Starts(Flawed(EngineLostError("killed"), {1: 1, 8: 1}))
    summary = generate(config, starts)
    assert (summary.num_restarts, starts.num_restarts) == (2, 2)
    assert responses_of(tmp_path / "out.parquet") == expected
    assert "restarts   2 of engines that were lost" in list(summary.lines())


def test_a_batch_that_loses_every_engine_ends_the_run_and_names_its_rows(model, source, tmp_path):
    config = config_of(model, source, tmp_path / "out.parquet")
    engine = Flawed(EngineLostError("killed"), {5: 9})
    with pytest.raises(GenerationFailed, match=r"batch 1 \(rows 4 to 6\) is not generated: killed"):
        generate(config, Starts(engine))
    assert engine.fails == {5: 9 - MAX_ATTEMPTS}
    assert not (tmp_path / "out.parquet").exists()


def test_what_an_engine_refuses_ends_the_run_with_its_reason(model, source, tmp_path):
    config = config_of(model, source, tmp_path / "out.parquet")
    with pytest.raises(GenerationFailed, match=r"batch 0 .* refused by the engine: too long"):
        generate(config, Starts(Flawed(ValueError("too long"), {1: 1})))
