import io
import os

import numpy as np
import pytest
from PIL import Image

from tests.tiny_vision import ID, tiny_processor
from verl.config.data import DataConfig
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.tables import DataError

PAD = ID["<|image_pad|>"]


def png(color, size=(24, 16)):
    octets = io.BytesIO()
    Image.new("RGB", size, color).save(octets, "PNG")
    return octets.getvalue()


def dataset(tmp_path, rows, *, sees=True, max_images=None, **options):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    processor = tiny_processor(tmp_path / "model")
    options = {"max_prompt_length": 100, "cache_dir": str(tmp_path), **options}
    return RLHFDataset(
        str(tmp_path / "a.parquet"),
        processor.tokenizer,
        DataConfig(**options),
        processor if sees else None,
        max_images=max_images,
    )


def question(text="what is <image> this?", images=1, size=(24, 16)):
    return {
        "prompt": [{"role": "user", "content": text}],
        "images": [{"bytes": png("red", size), "path": None} for _ in range(images)],
    }


def test_images_take_the_places_that_the_prompt_gives_them(tmp_path):
    row = dataset(tmp_path, [question()])[0]
    parts = row["raw_prompt"][0]["content"]
    assert [part["type"] for part in parts] == ["text", "image", "text"]
    assert (parts[0]["text"], parts[2]["text"]) == ("what is ", " this?")
    assert "images" not in row


def test_pixels_are_loaded_when_they_are_asked_for(tmp_path):
    row = dataset(tmp_path, [question(size=(16, 8))])[0]
    assert "multi_modal_inputs" not in dict(row)
    assert row["multi_modal_data"]["image"][0].getpixel((0, 0)) == (255, 0, 0)
    assert row["multi_modal_inputs"]["pixel_values"].shape == (8, 3 * 2 * 4 * 4)
    ids = row["input_ids"].tolist()
    assert ids.count(PAD) == 2


async def test_agent_loops_get_images_and_videos_of_messages(tmp_path):
    data = dataset(tmp_path, [question()])
    frames = [png("red"), png("green"), png("blue"), png("white")]
    video = {"role": "user", "content": [{"type": "video", "video": frames, "nframes": 2}]}
    messages = [*data[0]["raw_prompt"], video]
    images, videos = await RLHFDataset.process_vision_info(messages, 14, data.config)
    assert [image.size for image in images] == [(24, 16)]
    assert [frame.getpixel((0, 0)) for frame in videos[0]] == [(255, 0, 0), (0, 0, 255)]


def test_the_places_of_an_image_count_when_a_prompt_is_measured(tmp_path):
    rows = [question(), question("<image>" * 40, images=40, size=(16, 16))]
    assert len(dataset(tmp_path, rows, filter_overlong_prompts=True)) == 1


def test_images_for_a_model_that_does_not_see_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"a.parquet:1: has images, and the model has no processor"):
        dataset(tmp_path, [question()], sees=False)


def test_an_image_without_a_place_and_one_that_is_broken_are_bad_rows(tmp_path):
    with pytest.raises(DataError, match=r"a.parquet:1: has 2 images and 1 places for them"):
        dataset(tmp_path, [question(images=2)])
    broken = {**question(), "images": [{"bytes": b"no image", "path": None}]}
    with pytest.raises(DataError, match=r"a.parquet:1: an image cannot be read"):
        dataset(tmp_path, [broken])


def test_a_placeholder_that_somebody_wrote_is_a_word(tmp_path):
    row = dataset(tmp_path, [question("<image><|image_pad|></s>", size=(8, 8))])[0]
    ids = row["raw_prompt_ids"]
    assert ids.count(PAD) == 1  # one token for 8 x 8 pixels; the words are letters
    letters = [ID[letter] for letter in "<|image_pad|></s>"]
    assert letters in [ids[start : start + len(letters)] for start in range(len(ids))]


def test_a_prompt_with_images_is_never_cut(tmp_path):
    rows = [question("<image>" + "word " * 40)]
    with pytest.raises(DataError, match=r"prompts are too long.*never cut"):
        dataset(tmp_path, rows, truncation="left")
    assert len(dataset(tmp_path, [*rows, question()], filter_overlong_prompts=True)) == 1


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ({"path": "/nowhere/a.png"}, "No such file"),
        ({"path": "https://example.com/a.png"}, "address on a network"),
        ({"path": "data:image/png;base64,!"}, "not base64"),
        ({"path": "pipe"}, "it is not a file"),
        ({"bytes": b"\xff\xd8\xff\xe0 no JPEG"}, "cannot be read"),
        ({"bytes": png("red", (2000, 2))}, r"refuses an image of \(2000, 2\)"),
        # Pillow would start Ghostscript.
        ({"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}, "cannot identify"),
    ],
)
def test_an_image_that_cannot_be_had_is_a_fault_of_its_row(tmp_path, image, reason):
    os.mkfifo(tmp_path / "pipe")
    if image.get("path") == "pipe":
        image = {"path": str(tmp_path / "pipe")}
    rows = [{**question(), "images": [{"bytes": None, "path": None, **image}]}]
    with pytest.raises(DataError, match=rf"a.parquet:1: .*{reason}"):
        dataset(tmp_path, rows)


def test_an_image_of_a_hundred_megapixels_is_refused_before_it_is_decoded(tmp_path):
    huge = Image.fromarray(np.zeros((10_000, 10_000), dtype=np.uint8))
    file = io.BytesIO()
    huge.save(file, "PNG")
    rows = [{**question(), "images": [{"bytes": file.getvalue(), "path": None}]}]
    with pytest.raises(DataError, match=r"a.parquet:1: an image .*pixels"):
        dataset(tmp_path, rows)


def test_options_of_the_processor_change_the_number_of_tokens(tmp_path):
    small = {"size": {"shortest_edge": 64, "longest_edge": 64}}
    rows = [question(size=(32, 32))]
    counts = [
        dataset(tmp_path, rows, **options)[0]["raw_prompt_ids"].count(PAD)
        for options in ({}, {"mm_processor_kwargs": small})
    ]
    assert counts == [16, 1]


def test_more_images_than_a_conversation_may_have_are_a_fault_of_the_row(tmp_path):
    rows = [question(), question("<image><image>", images=2)]
    with pytest.raises(DataError, match=r"a.parquet:2: .* 2 images; rollout.limit_images allows 1"):
        dataset(tmp_path, rows, max_images=1)
    assert len(dataset(tmp_path, rows, max_images=2)) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sise": {"longest_edge": 64}}, "unexpected keyword argument 'sise'"),
        ({"size": {"edge": 64}}, "shortest_edge"),
        ({"do_resize": "maybe"}, "do_resize"),
    ],
)
def test_options_that_the_processor_refuses_are_no_fault_of_the_rows(tmp_path, options, reason):
    with pytest.raises(ValueError, match=rf"data.mm_processor_kwargs is .*refuses: .*{reason}"):
        dataset(tmp_path, [question()], mm_processor_kwargs=options)
    text = [{"prompt": [{"role": "user", "content": "Hi"}]}]
    assert len(dataset(tmp_path, text, sees=False, mm_processor_kwargs=options)) == 1


def test_a_video_is_its_frames_each_an_image_in_its_place(tmp_path):
    colors = ("red", "green", "blue")
    frames = [{"bytes": png(color), "path": None} for color in colors]
    text = "see <video> and say"
    row = {"prompt": [{"role": "user", "content": text}], "videos": [frames]}
    images = {
        "prompt": [{"role": "user", "content": text.replace("<video>", "<image>" * 3)}],
        "images": frames,
    }
    (tmp_path / "other").mkdir()
    video = dataset(tmp_path, [row])[0]
    expected = dataset(tmp_path / "other", [images])[0]
    assert video["input_ids"].tolist() == expected["input_ids"].tolist()
    found, wanted = (one["multi_modal_inputs"]["pixel_values"] for one in (video, expected))
    assert np.array_equal(found, wanted)


def test_a_video_file_is_refused_because_nothing_decodes_it(tmp_path):
    row = {"prompt": [{"role": "user", "content": "see <video>"}], "videos": ["clip.mp4"]}
    with pytest.raises(DataError, match=r"clip\.mp4.*no decoder for video files"):
        dataset(tmp_path, [row])
