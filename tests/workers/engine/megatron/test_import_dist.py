"""Weights that megatron-core has saved are read on any layout, and merged, without unpickling."""

import io
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from tests.tiny_models import tiny_model
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.engine.megatron.cases import SGD, megatron_engine, value_model
from verl.model_merger.__main__ import main
from verl.utils.checkpoint.dist_checkpoint import INDEX, DistTensor, read_index
from verl.workers.engine.megatron import leave_layout
from verl.workers.engine.megatron.cpu import on_this_device

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
FAMILIES = ("llama", "qwen2", "qwen3_moe")


def test_a_rank_whose_rows_of_the_vocabulary_are_all_padding_reads_none():
    from megatron.core.dist_checkpointing import ShardedTensor

    from verl.workers.engine.megatron.state import copy

    stored = DistTensor("embedding", (3, 2), chunks=[])  # of three tokens; read would raise
    padding = ShardedTensor.from_rank_offsets("embedding", torch.ones(4, 2), (0, 1, 2))
    copy(padding, stored, num_rows=3)
    assert torch.equal(padding.data, torch.ones(4, 2))
    real = ShardedTensor.from_rank_offsets("embedding", torch.ones(4, 2), (0, 0, 2))
    with pytest.raises(ValueError, match="its chunks do not cover"):
        copy(real, stored, num_rows=3)
    for shape in ((2, 2), (3, 5)):
        with pytest.raises(ValueError, match=r"for 3 tokens of 2 numbers: .* another model"):
            copy(real, DistTensor("embedding", shape, chunks=[]), num_rows=3)


def save_as_megatron(engine, folder, layers_apart=False):
    """What `dist_checkpointing.save` writes, without the process that writes it in the background:
    its tensors and names, in torch's own format."""
    from verl.workers.engine.megatron.state import parts

    with on_this_device():
        found = [part for chunk in engine.chunks for part in parts(chunk, "", layers_apart)]
    whole = {}
    for part in found:
        target = whole.setdefault(part.key, torch.zeros(part.global_shape))
        box = tuple(
            slice(start, start + size)
            for start, size in zip(
                part.global_offset,
                (1,) * part.prepend_axis_num + tuple(part.local_shape),
                strict=True,
            )
        )
        target[box] = part.data.view(target[box].shape)
    save_distributed(whole, checkpoint_id=folder, no_dist=True)


def weights(engine):
    return {name: weight.clone() for name, weight in engine.get_per_tensor_param()}


def imported(model_type, folder, **options):
    """An engine whose own model is another one, so that every weight must come from the folder."""
    changed = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(folder)}

    def blank():
        model = tiny_model(model_type)
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
        return model

    return megatron_engine(model_type, None, model=blank, section=changed, **options)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_weight_comes_back_to_the_bit(model_type, tmp_path, one_rank):
    engine = megatron_engine(model_type, None)
    expected = weights(engine)
    for apart in (False, True):
        save_as_megatron(engine, tmp_path / str(apart), apart)
        found = weights(imported(model_type, tmp_path / str(apart)))
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name


def test_a_critic_of_a_language_model_starts_with_a_head_of_zeros(tmp_path, one_rank):
    save_as_megatron(megatron_engine("llama", None), tmp_path)
    section = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(tmp_path)}
    options = {"is_value_model": True}
    engine = megatron_engine("llama", SGD, model=value_model, section=section, options=options)
    found = weights(engine)
    assert found["score.weight"].abs().max() == 0
    expected = tiny_model("llama").model.embed_tokens.weight
    assert torch.equal(found["model.embed_tokens.weight"], expected)


def test_another_model_is_refused(tmp_path, one_rank):
    save_as_megatron(megatron_engine("llama", None), tmp_path / "llama")
    with pytest.raises(
        ValueError, match=r"has no decoder\.layers\.self_attention\.linear_qkv\.bias"
    ):
        imported("qwen2", tmp_path / "llama")
    with pytest.raises(ValueError, match=r"has no \.metadata"):
        imported("llama", tmp_path)


def test_the_merger_writes_a_model_that_is_the_one_that_was_saved(tmp_path, capsys, one_rank):
    model = tiny_model("llama")
    engine = megatron_engine("llama", None)
    save_as_megatron(engine, tmp_path / "actor/dist_ckpt")
    model.config.save_pretrained(tmp_path / "actor/huggingface")
    config = tmp_path / "actor/huggingface/config.json"
    config.write_text(config.read_text().replace("{", '{"architectures": ["LlamaForCausalLM"],', 1))
    leave_layout()
    options = ["--backend", "megatron", "--local_dir", str(tmp_path / "actor")]
    assert main(["merge", *options, "--target_dir", str(tmp_path / "merged")]) == 0
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(merged[name], weight.bfloat16()), name


# ---- hostile files -------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.fixture
def saved(tmp_path):
    tensor = torch.arange(12.0).view(3, 4)
    save_distributed({"w": tensor, "text": "x"}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_tensors_are_read_by_boxes_and_the_rest_is_left_out(saved):
    index = read_index(saved)
    assert list(index) == ["w"]
    expected = torch.arange(12.0).view(3, 4)[1:3, 2:3]
    assert torch.equal(index["w"].read((1, 2), (2, 1)), expected)
    with pytest.raises(ValueError, match="do not cover"):
        index["w"].read((2, 0), (2, 4))


def edited(folder, change):
    file = folder / INDEX
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_a_pickle_that_would_run_code_runs_none(saved, tmp_path):
    (saved / INDEX).write_bytes(pickle.dumps(Bomb(tmp_path / "was here")))
    with pytest.raises(ValueError, match="no index of a distributed checkpoint"):
        read_index(saved)
    assert not (tmp_path / "was here").exists()


def place_of(metadata):
    return next(v for k, v in metadata.storage_data.items() if k.offset is not None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(place_of(m), "relative_path", "../x"), "is no file of its folder"),
        (lambda m: setattr(place_of(m), "length", 10**12), "ends at"),
        (lambda m: setattr(place_of(m), "offset", -4), "extents are whole numbers"),
        (lambda m: m.storage_data.clear(), "does not say where w"),
        (lambda m: m.state_dict_metadata.update(w=m), None),
    ],
)
def test_an_index_that_lies_is_refused(saved, change, reason):
    edited(saved, change)
    if reason is None:  # something else than a tensor is left out
        assert read_index(saved) == {}
        return
    with pytest.raises(ValueError, match=reason):
        read_index(saved)


def test_a_chunk_that_is_not_what_the_index_says_is_refused(saved):
    (place,) = [chunk.archive for chunk in read_index(saved)["w"].chunks]
    content = bytearray(place.path.read_bytes())
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(saved / "was here")))
    content[place.offset : place.offset + place.length] = other.getvalue().ljust(
        place.length, b"\0"
    )
    place.path.write_bytes(content[: place.offset + place.length])
    with pytest.raises(ValueError, match="is not a tensor"):
        read_index(saved)["w"].read((0, 0), (3, 4))
    assert not (saved / "was here").exists()


# ---- what the library itself writes, on other layouts --------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_what_two_tensor_ranks_have_saved_is_read_by_two_stages_and_by_one_rank(
    model_type, tmp_path, one_rank
):
    (tmp_path / "saved").mkdir()

    def save(rank):
        from megatron.core import dist_checkpointing

        engine = megatron_engine(model_type, None, tensor=2)
        with on_this_device():
            state = {}
            for chunk in engine.chunks:
                state |= chunk.sharded_state_dict()
            dist_checkpointing.save(state, str(tmp_path / "saved"))

    def load(rank):
        engine = imported(model_type, tmp_path / "saved", pipeline=2)
        return {name: weight.numpy() for name, weight in weights(engine).items()}

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    run_on_two_ranks(save, tmp_path / "first")
    found = [*run_on_two_ranks(load, tmp_path / "second")]
    found.append(weights(imported(model_type, tmp_path / "saved")))
    expected = dict(tiny_model(model_type).named_parameters())
    for own in found:
        assert own.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(torch.as_tensor(own[name]), weight), name
