"""Helpers that programs with a training loop of their own import, under the paths they know."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn

from tests.tiny_models import tiny_config
from tests.utils.one_rank import group_of_one
from tests.utils.two_ranks import run_on_two_ranks
from verl.models.transformers.qwen2_vl import get_rope_index
from verl.utils import ulysses
from verl.utils.activation_offload import enable_activation_offloading
from verl.utils.attention_utils import pad_input, rearrange, unpad_input
from verl.utils.dataset.vision_utils import process_image, process_video
from verl.utils.fsdp_utils import (
    apply_fsdp2,
    fsdp2_clip_grad_norm_,
    fsdp2_load_full_state_dict,
    fsdp_version,
    get_fsdp_wrap_policy,
    get_init_weight_context_manager,
    get_shard_placement_fn,
    load_fsdp_optimizer,
    offload_fsdp_optimizer,
    replace_lora_wrapper,
)
from verl.utils.net_utils import get_free_port, is_valid_ipv6_address
from verl.utils.profiler.performance import reduce_timing, topk_reduce_ratio_min_max
from verl.utils.recipe_helpers import create_device_mesh, get_sharding_strategy
from verl.utils.transferqueue_utils import tqbridge
from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

MASK = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def test_unpadded_tokens_come_back_where_they_were():
    rows = torch.arange(10.0).reshape(2, 5, 1) + 1
    tokens, indices, boundaries, longest, used = unpad_input(rows, MASK)
    assert tokens.flatten().tolist() == [2, 3, 4, 6, 7, 8, 9, 10]
    assert (boundaries.tolist(), longest, used.tolist()) == ([0, 3, 8], 5, [3, 5])
    assert torch.equal(pad_input(tokens, indices, 2, 5), rows * MASK[..., None])
    assert torch.equal(rearrange(rows, "b s ... -> (b s) ..."), rows.flatten(0, 1))


def test_a_padded_batch_becomes_ragged_and_values_of_responses_come_back():
    batch = TensorDict(
        {
            "input_ids": torch.arange(10).reshape(2, 5),
            "position_ids": torch.tensor([[0, 0, 1, 2, 2], [0, 1, 2, 3, 4]]),
            "attention_mask": MASK,
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
            "responses": torch.arange(10).reshape(2, 5)[:, 2:],
        },
        batch_size=2,
    )
    ragged = left_right_2_no_padding(batch)
    assert [row.tolist() for row in ragged["input_ids"].unbind()] == [[1, 2, 3], [5, 6, 7, 8, 9]]
    assert [row.tolist() for row in ragged["loss_mask"].unbind()] == [[0, 1, 1], [0, 0, 1, 0, 1]]
    about_next = torch.nested.as_nested_tensor(
        [torch.tensor([2.0, 3.0, -1.0]), torch.tensor([6.0, 7.0, 8.0, 9.0, -1.0])],
        layout=torch.jagged,
    )
    padded = no_padding_2_padding(about_next, batch)
    assert padded.tolist() == [[2, 3, 0], [7, 8, 9]]


def test_tokens_are_sliced_by_rank_and_outputs_gathered(tmp_path):
    def work(rank):
        ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
        ids, positions = torch.arange(5)[None], torch.arange(5)[None]
        own, own_positions, padding = ulysses.ulysses_pad_and_slice_inputs(ids, positions, 2)
        weight = torch.tensor(2.0, requires_grad=True)
        whole = ulysses.gather_outputs_and_unpad(own[0] * weight, 0, 0, padding)
        whole.sum().backward()
        timing = reduce_timing({"step": float(rank)})
        spread = topk_reduce_ratio_min_max(float(rank + 1), k=1)
        return own.tolist(), own_positions.tolist(), whole.tolist(), float(weight.grad), (
            timing["step"], spread,
        )  # fmt: skip

    first, second = run_on_two_ranks(work, tmp_path)
    assert (first[0], second[0]) == ([[0, 1, 2]], [[3, 4, 0]])
    assert second[1] == [[3, 4, 0]]
    assert first[2] == second[2] == [0, 2, 4, 6, 8]
    assert (first[3], second[3]) == (6.0, 14.0)  # its own tokens' gradient, times the ranks
    assert first[4] == second[4] == (0.5, (2.0, 1.0, 2.0))


def test_a_model_is_sharded_loaded_and_clipped(tmp_path):
    transformers = pytest.importorskip("transformers")
    plain = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    sharded = copy.deepcopy(plain)
    with group_of_one("gloo", tmp_path):
        mesh = create_device_mesh(1, -1)
        assert get_sharding_strategy(mesh).name == "FULL_SHARD"
        apply_fsdp2(sharded, {"mesh": mesh}, {})
        assert (fsdp_version(plain), fsdp_version(sharded)) == (0, 2)
        fsdp2_load_full_state_dict(sharded, plain.state_dict())
        ids = torch.arange(8)[None]
        for model in (plain, sharded):
            F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert torch.isclose(fsdp2_clip_grad_norm_(sharded.parameters(), 0.1), expected)
        grads = [one.grad.full_tensor() for one in sharded.parameters()]
        for found, wanted in zip(grads, plain.parameters(), strict=True):
            assert torch.allclose(found, wanted.grad, atol=1e-6)
        with get_init_weight_context_manager(use_meta_tensor=True)():
            assert nn.Linear(2, 2).weight.device.type == "cpu"  # rank 0 reads the values
    layer = next(one for one in plain.modules() if type(one).__name__ == "LlamaDecoderLayer")
    policy = get_fsdp_wrap_policy(plain)
    assert policy(module=layer, recurse=False, nonwrapped_numel=1)
    assert not policy(module=layer.mlp, recurse=False, nonwrapped_numel=1)
    assert get_fsdp_wrap_policy(plain, {"disable": True}) is None


def test_what_an_optimizer_remembers_is_moved():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    load_fsdp_optimizer(optimizer, "meta")
    assert {s["exp_avg"].device.type for s in optimizer.state.values()} == {"meta"}
    optimizer.state.clear()
    offload_fsdp_optimizer(optimizer)
    assert get_shard_placement_fn(3)(torch.empty(4, 6)).dim == 1


@pytest.mark.parametrize(("targets", "is_inside"), [(["q_proj"], True), (["v_proj"], False)])
def test_base_weights_are_named_inside_their_adapter(targets, is_inside):
    config = type("Config", (), {"target_modules": targets})
    name = replace_lora_wrapper("model.layers.0.self_attn.q_proj.weight", config)
    assert ("base_layer" in name) is is_inside


def test_saved_activations_leave_the_device_and_gradients_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))

    def gradient():
        model.zero_grad()
        first, second = model[0]
        second(torch.tanh(first(torch.ones(2, 4)))).square().sum().backward()
        return first.weight.grad.clone()

    expected = gradient()
    enable_activation_offloading(model)
    assert torch.equal(gradient(), expected)


def test_ports_addresses_and_queues():
    port, holder = get_free_port("127.0.0.1")
    with holder:
        assert holder.getsockname() == ("127.0.0.1", port)
    assert is_valid_ipv6_address("::1")
    assert not is_valid_ipv6_address("127.0.0.1")
    assert tqbridge(put_data=False)(max)(1, 2) == 2  # nothing is stored: it is the function


# ---- images --------------------------------------------------------------------------------------


class Qwen:
    """What `get_rope_index` asks a processor for."""

    class image_processor:
        merge_size = 2

    class tokenizer:
        convert_tokens_to_ids = {"<|image_pad|>": 9}.__getitem__


def test_positions_of_text_go_on_behind_the_larger_side_of_an_image():
    ids, grids = torch.tensor([0, 0, 5, 9, 9, 9, 9, 9, 9, 6, 7]), torch.tensor([[1, 4, 6]])
    mask = (torch.arange(11) > 1).long()
    found = get_rope_index(Qwen, ids, grids, attention_mask=mask)
    assert found.tolist() == [
        [1, 1, 0, 1, 1, 1, 1, 1, 1, 4, 5],
        [1, 1, 0, 1, 1, 1, 2, 2, 2, 4, 5],
        [1, 1, 0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    assert get_rope_index(Qwen, torch.tensor([5, 6])).tolist() == [[0, 1]] * 3
    with pytest.raises(ValueError, match="has 6 image tokens and image_grid_thw stands for 0"):
        get_rope_index(Qwen, ids)
    with pytest.raises(ValueError, match="the frames of a video as images"):
        get_rope_index(Qwen, ids, grids, video_grid_thw=grids)


def test_images_and_frames_are_read_from_what_rows_have():
    Image = pytest.importorskip("PIL.Image")
    frames = [Image.new("L", (4, 6), shade) for shade in (0, 10, 20, 30)]
    assert process_image({"image": frames[1]}).getpixel((0, 0)) == (10, 10, 10)
    video = process_video(frames, nframes=2)
    assert video.shape == (2, 3, 6, 4)
    assert video[:, 0, 0, 0].tolist() == [0, 20]
    with pytest.raises(ValueError, match=r"fps is 2\.0; frames have no times here"):
        process_video(frames, fps=2.0)
    with pytest.raises(ValueError, match="it must be a list of frames"):
        process_video({"video": "film.mp4"})


# ---- engines -------------------------------------------------------------------------------------


def test_expert_weights_that_lost_their_loader_get_that_of_their_layer():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w13_weight, self.w2_weight = (nn.Parameter(torch.zeros(2)) for _ in range(2))
            self.w2_weight.weight_loader = print

        def weight_loader(self, weight, loaded):
            weight.data.copy_(loaded)

    model = nn.Sequential(nn.Linear(2, 2), Experts())
    patch_vllm_moe_model_weight_loader(model)
    model[1].w13_weight.weight_loader(model[1].w13_weight, torch.tensor([1.0, 2.0]))
    assert model[1].w13_weight.tolist() == [1.0, 2.0]
    assert model[1].w2_weight.weight_loader is print
    assert "weight_loader" not in vars(model[0].weight)
