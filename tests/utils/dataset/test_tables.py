"""Two hundred malformed files: none crashes, every bad row is named with its file and row."""

import json
import random

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.data import DataConfig
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.tables import BadRow, DataError, JsonFile, ParquetFile, RowTable, open_table

ROWS = [{"number": number, "text": f"row {number}"} for number in range(3000)]


def parquet(path, rows=ROWS, **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def cached(folder):
    return sorted((folder / "arrow").glob("*.arrow"))


# ---- parquet -------------------------------------------------------------------------------------


def test_a_large_file_is_unpacked_once_and_gives_the_rows_of_a_small_one(tmp_path):
    path = parquet(tmp_path / "a.parquet", row_group_size=700)
    small = ParquetFile(path, str(tmp_path))
    assert cached(tmp_path) == [], "a small file stays in memory"
    large = ParquetFile(path, str(tmp_path), max_bytes_in_memory=1000)
    assert len(cached(tmp_path)) == 1
    assert list(small) == list(large) == ROWS
    order = np.random.default_rng(0).permutation(len(ROWS))[:200]
    assert [large.read(row) for row in order] == [ROWS[row] for row in order]
    written = cached(tmp_path)[0].stat().st_mtime_ns
    ParquetFile(path, str(tmp_path), max_bytes_in_memory=1000)
    assert cached(tmp_path)[0].stat().st_mtime_ns == written


def test_a_file_that_changed_is_unpacked_again_and_its_old_copy_is_removed(tmp_path):
    path = parquet(tmp_path / "a.parquet")
    ParquetFile(path, str(tmp_path), max_bytes_in_memory=0)
    parquet(tmp_path / "a.parquet", ROWS[:5])
    assert list(ParquetFile(path, str(tmp_path), max_bytes_in_memory=0)) == ROWS[:5]
    assert len(cached(tmp_path)) == 1


def test_a_damaged_copy_is_made_again(tmp_path, caplog):
    path = parquet(tmp_path / "a.parquet")
    ParquetFile(path, str(tmp_path), max_bytes_in_memory=0)
    copy = cached(tmp_path)[0]
    copy.write_bytes(copy.read_bytes()[:1000])
    assert list(ParquetFile(path, str(tmp_path), max_bytes_in_memory=0)) == ROWS
    assert "its copy is damaged" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet")
    (tmp_path / "arrow").mkdir()
    (tmp_path / "arrow" / ".arrow.lock").mkdir()
    with pytest.raises(DataError, match=r"a.parquet cannot be unpacked to .*arrow"):
        ParquetFile(path, str(tmp_path), max_bytes_in_memory=0)


def test_an_unpacked_copy_that_others_could_have_written_is_not_read(tmp_path):
    path = parquet(tmp_path / "a.parquet")
    ParquetFile(path, str(tmp_path), max_bytes_in_memory=0)
    (tmp_path / "arrow").chmod(0o777)
    with pytest.raises(DataError, match=r"a.parquet is not read from .* written by others"):
        ParquetFile(path, str(tmp_path), max_bytes_in_memory=0)


def test_scanning_leaves_out_columns_that_nobody_asked_for(tmp_path):
    file = ParquetFile(parquet(tmp_path / "a.parquet"), str(tmp_path))
    assert next(iter(file.scan(["text"]))) == {"text": "row 0"}


def test_a_column_that_python_may_not_be_able_to_read_is_always_looked_at(tmp_path):
    far = pa.array([0, 2**62, 0], pa.int64()).view(pa.timestamp("ms"))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "when": far}), tmp_path / "a.parquet")
    found = list(ParquetFile(str(tmp_path / "a.parquet"), str(tmp_path)).scan(["text"]))
    assert isinstance(found[1], BadRow)
    assert found[1].row == 2
    assert [found[0]["text"], found[2]["text"]] == ["a", "c"]


def test_text_that_is_not_utf8_is_found_in_columns_that_nobody_asked_for(tmp_path):
    note = pa.array([b"a", b"\xff", b"c"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": ["a", "b", "c"], "note": note}), tmp_path / "a.parquet")
    found = list(ParquetFile(str(tmp_path / "a.parquet"), str(tmp_path)).scan(["text"]))
    assert [isinstance(row, BadRow) for row in found] == [False, True, False]


# ---- JSON ----------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
rows = st.lists(st.dictionaries(texts, st.one_of(texts, st.integers(), st.none())), max_size=8)


@settings(max_examples=60, deadline=None)
@given(rows=rows, ascii_only=st.booleans(), blank=st.sampled_from(["", "\n", " \t\r\n"]))
def test_any_rows_come_back_from_lines_and_from_an_array(tmp_path_factory, rows, ascii_only, blank):
    folder = tmp_path_factory.mktemp("json")
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    (folder / "a.jsonl").write_bytes("".join(line + "\n" + blank for line in lines).encode())
    (folder / "a.json").write_bytes(f" [{','.join(lines)}]\n".encode())
    assert list(JsonFile(str(folder / "a.jsonl"))) == rows
    assert list(JsonFile(str(folder / "a.json"))) == rows


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n  \n{"a": \n{"a": 3}')
    file = JsonFile(str(tmp_path / "a.jsonl"))
    assert len(file) == 3
    assert str(file.read(1)).startswith(f"{tmp_path}/a.jsonl:4: is not readable JSON")
    assert file.read(2) == {"a": 3}


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf[{"a": "\xc3\xa9"}, {"a": 2}]')
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert list(JsonFile(str(tmp_path / "a.json"))) == [{"a": "é"}, {"a": 2}]
    assert list(JsonFile(str(tmp_path / "a.jsonl"))) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("text", ["[{}", "[{},]", "[{}] x", "[{} {}]", "[", "[,]"])
def test_an_array_that_is_broken_is_an_error(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match="not readable JSON"):
        JsonFile(str(tmp_path / "a.json"))


def test_an_empty_array_has_no_rows(tmp_path):
    (tmp_path / "a.json").write_text("[ ]")
    assert len(JsonFile(str(tmp_path / "a.json"))) == 0


# ---- tables --------------------------------------------------------------------------------------


def test_a_table_counts_through_files_and_knows_where_a_row_is_from(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"number": 9}\n')
    empty = parquet(tmp_path / "c.parquet", [{"number": 1}])
    table = open_table(
        [parquet(tmp_path / "a.parquet", ROWS[:2]), str(tmp_path / "b.jsonl"), empty]
    )
    assert [row["number"] for row in table] == [0, 1, 9, 1]
    assert table.location(2) == f"{tmp_path}/b.jsonl:1"
    chosen = table.select([3, 2]).select([1])
    assert (len(chosen), chosen[0], chosen.location(0)) == (
        1,
        {"number": 9},
        f"{tmp_path}/b.jsonl:1",
    )


def test_a_table_costs_eight_bytes_a_row(tmp_path):
    class Many:
        path = "many"

        def __len__(self):
            return 10**7

        def read(self, row):
            return {"row": row}

    table = RowTable([Many(), Many()])
    assert table.numbers.nbytes == 8 * 2 * 10**7
    assert table[10**7 + 5] == {"row": 5}


def test_files_come_from_any_file_system_that_is_known(tmp_path):
    parquet(tmp_path / "a.parquet", ROWS[:3])
    memory = fsspec.filesystem("memory")
    memory.pipe("/rows/a.jsonl", b'{"number": 7}\n')
    cache = str(tmp_path / "cache")
    table = open_table([f"file://{tmp_path}/a.parquet", "memory://rows/a.jsonl"], cache_dir=cache)
    assert [row["number"] for row in table] == [0, 1, 2, 7]
    with pytest.raises(DataError, match=r"there is no file 'memory://rows/none.jsonl'"):
        open_table("memory://rows/none.jsonl", cache_dir=cache)


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
