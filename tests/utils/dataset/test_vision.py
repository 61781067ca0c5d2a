import io

import pytest
from PIL import Image
from tokenizers import AddedToken
from transformers import BatchFeature, Qwen2VLImageProcessorPil

from examples.quickstart.build_model import build_tokenizer
from verl.config.data import DataConfig
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.tables import DataError

PAD = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}<|user|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|image_pad|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<|assistant|>"
)


class SmallProcessor:
    """A real image processor; a place in the text per four patches, as Qwen2-VL has it."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.image_processor = Qwen2VLImageProcessorPil(
            patch_size=14, min_pixels=28 * 28, max_pixels=56 * 56
        )

    def __call__(self, text, images=()):
        pixels = self.image_processor(images=images, return_tensors="pt")
        places = [PAD * (int(grid.prod()) // 4) for grid in pixels["image_grid_thw"]]
        filled = text[0].replace(PAD, "{}").format(*places)
        return BatchFeature({**self.tokenizer([filled]), **pixels})


def seeing_tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", AddedToken(PAD)]}
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def png(color, size=(28, 28)):
    octets = io.BytesIO()
    Image.new("RGB", size, color).save(octets, "PNG")
    return octets.getvalue()


def dataset(tmp_path, rows, *, sees=True, **options):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    tokenizer = seeing_tokenizer()
    config = DataConfig(max_prompt_length=64, cache_dir=str(tmp_path), **options)
    processor = SmallProcessor(tokenizer) if sees else None
    return RLHFDataset(str(tmp_path / "a.parquet"), tokenizer, config, processor)


def question(text="what is <image> this?", images=1, size=(28, 28)):
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
    row = dataset(tmp_path, [question(size=(56, 28))])[0]
    assert "multi_modal_inputs" not in dict(row)
    assert row["multi_modal_data"]["image"][0].getpixel((0, 0)) == (255, 0, 0)
    assert row["multi_modal_inputs"]["pixel_values"].shape == (8, 3 * 2 * 14 * 14)
    ids = row["input_ids"].tolist()
    assert ids.count(seeing_tokenizer().convert_tokens_to_ids(PAD)) == 2


async def test_agent_loops_get_images_and_videos_of_messages(tmp_path):
    data = dataset(tmp_path, [question()])
    frames = [png("red"), png("green"), png("blue"), png("white")]
    video = {"role": "user", "content": [{"type": "video", "video": frames, "nframes": 2}]}
    messages = [*data[0]["raw_prompt"], video]
    images, videos = await RLHFDataset.process_vision_info(messages, 14, data.config)
    assert [image.size for image in images] == [(28, 28)]
    assert [frame.getpixel((0, 0)) for frame in videos[0]] == [(255, 0, 0), (0, 0, 255)]


def test_the_places_of_an_image_count_when_a_prompt_is_measured(tmp_path):
    rows = [question(), question("<image>" * 40, images=40, size=(56, 56))]
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


def test_special_tokens_beside_an_image_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"a.parquet:1: its words hold the special tokens.*</s>"):
        dataset(tmp_path, [question("<image></s>")])
