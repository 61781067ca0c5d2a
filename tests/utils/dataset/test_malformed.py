"""Two hundred malformed files: none crashes, every bad row is named with its file and row."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.data import DataConfig
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.tables import DataError

NUM_FILES = 200
NUM_ROWS = 120

# What a bad row of JSON Lines may be.
BAD_LINES = [
    b"{", b"null", b"[]", b"7", b'"text"', b'{"prompt": null}', b'{"prompt": ""}',
    b'{"prompt": 1.5}', b'{"prompt": []}', b'{"prompt": [[]]}', b'{"prompt": {"role": "user"}}',
    b'{"prompt": [{"role": "user"}]}', b'{"prompt": [{"content": "x"}]}', b"\xff\xfe{}",
    b'{"prompt": [{"role": null, "content": "x"}]}', b'{"prompt": [{"role": "a", "content": 3}]}',
    b'{"prompt": "a\\ud800"}', b'{"prompt": "x", "answer": NaN}', b'{"other": "x"}',
    b'{"prompt": "x", "reward_model": "y"}', b'{"prompt": "x", "extra_info": [1]}',
    b'{"prompt": "x", "note": "\\udfff"}', b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", b"{'prompt': 'x'}", b'{"prompt": "x"} {}',
    b'{"prompt": [{"role": "user", "content": ["x"]}]}',
]  # fmt: skip


def good_rows(count):
    return [{"prompt": f"{number}=", "answer": "1"} for number in range(count)]


def bad_json_lines(path, chance):
    """Good lines, and bad ones at random places; gives the line numbers of the bad ones."""
    lines = [json.dumps(row).encode() for row in good_rows(NUM_ROWS)]
    bad = set(chance.sample(range(NUM_ROWS), chance.randint(1, 12)))
    for line in bad:
        lines[line] = chance.choice(BAD_LINES)
    path.write_bytes(b"\n".join(lines))
    return {line + 1 for line in bad}


def bad_parquet(path, chance):
    """A prompt column with nulls, empty texts and text that is not UTF-8."""
    prompts = [row["prompt"].encode() for row in good_rows(NUM_ROWS)]
    bad = set(chance.sample(range(NUM_ROWS), chance.randint(1, 12)))
    for row in bad:
        prompts[row] = chance.choice([None, b"", b"\xff\xfe", b"ok\xc3"])
    column = pa.array(prompts, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": column}), path, row_group_size=chance.choice([7, 1000]))
    return {row + 1 for row in bad}


def bad_messages(path, chance):
    messages = [[{"role": "user", "content": "1="}] for _ in range(NUM_ROWS)]
    bad = set(chance.sample(range(NUM_ROWS), chance.randint(1, 12)))
    for row in bad:
        empty = [{"role": None, "content": "x"}], [{"role": "user", "content": None}], [], None
        messages[row] = chance.choice(empty)
    pq.write_table(pa.table({"prompt": messages}), path)
    return {row + 1 for row in bad}


def broken_parquet(path, chance):
    """Cut off, overwritten in places, or no parquet at all."""
    pq.write_table(pa.Table.from_pylist(good_rows(NUM_ROWS)), path)
    octets = bytearray(path.read_bytes())
    kind = chance.choice(["cut", "magic", "garbage", "footer"])
    if kind == "cut":
        del octets[chance.randint(0, len(octets) - 1) :]
    elif kind == "magic":
        octets[-4:] = b"XXXX"
    elif kind == "garbage":
        octets = bytearray(chance.randbytes(500))
    else:
        for place in range(len(octets) - 200, len(octets) - 8):
            octets[place] = chance.randrange(256)
    path.write_bytes(octets)


def dataset(path):
    config = DataConfig(truncation="left", cache_dir=str(path.parent / "cache"))
    return RLHFDataset(str(path), tiny_tokenizer(), config)


def report_of(path, error):
    """The rows that the error names, in itself or in the report it points to."""
    text = str(error)
    if "lists all of them" in text:
        text = next((path.parent / "cache" / "bad_rows").glob("*.txt")).read_text()
    named = (line.partition(f"{path}:")[2] for line in text.splitlines())
    return {int(line.partition(":")[0]) for line in named if line}


@pytest.mark.parametrize("kind", ["json", "parquet", "messages", "broken"])
def test_every_bad_row_is_named_and_no_file_crashes(tmp_path, kind, caplog):
    for number in range(NUM_FILES // 4):
        chance = random.Random(f"{kind} {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / ("a.jsonl" if kind == "json" else "a.parquet")
        if kind == "broken":
            broken_parquet(path, chance)
            with pytest.raises(DataError) as broken:
                dataset(path)
            assert str(path) in str(broken.value)
            continue
        make = {"json": bad_json_lines, "parquet": bad_parquet, "messages": bad_messages}[kind]
        bad = make(path, chance)
        caplog.clear()
        if len(bad) / NUM_ROWS < 0.01:
            assert len(dataset(path)) == NUM_ROWS - len(bad)
            assert report_of(path, caplog.text) == bad
            continue
        with pytest.raises(DataError, match=f"{len(bad)} of {NUM_ROWS} rows are bad") as stop:
            dataset(path)
        assert stop.value.exit_code == 65
        assert report_of(path, stop.value) == bad


def test_more_bad_rows_than_fit_a_message_are_all_in_the_report(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": null}\n' * 5_000)
    with pytest.raises(DataError, match=r"5000 of 5000 rows .*(.|\n)*and 4980 more") as stop:
        dataset(path)
    assert report_of(path, stop.value) == set(range(1, 5_001))
    assert len(list((tmp_path / "cache" / "bad_rows").iterdir())) == 1
