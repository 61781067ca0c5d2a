"""Packed sequences give what each sequence gives alone in an unmodified model."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import ARCHITECTURES, VOCABULARY, plain_twin, tiny_model
from verl.models.forward import hidden_states, packed_positions
from verl.models.head import OutputHead, scaled_logits, token_log_probs
from verl.models.packed import PackedLayout, similar_lengths, window_mask

LENGTHS = [7, 1, 12, 3, 9]


def random_ids(lengths):
    return torch.randint(3, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(3))


def packed_logits(model, ids, lengths):
    layout = PackedLayout(lengths)
    hidden = hidden_states(model, ids, packed_positions(layout.lengths), layout)
    return scaled_logits(hidden, OutputHead.of(model), temperature=1.0)


def padded_logits(twin, ids, lengths):
    """Left-padded, as `generate` batches prompts; logits of the real tokens, in packed order."""
    width = max(lengths)
    rows = [
        torch.cat([torch.zeros(width - n, dtype=torch.long), part])
        for n, part in zip(lengths, ids.split(lengths), strict=True)
    ]
    mask = torch.stack([torch.arange(width) >= width - n for n in lengths]).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = twin(
        input_ids=torch.stack(rows), attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    return logits[mask.bool()]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_packed_logits_equal_padded_ones(model_type):
    model = tiny_model(model_type)
    ids = random_ids(LENGTHS)
    expected = padded_logits(plain_twin(model), ids, LENGTHS)
    torch.testing.assert_close(packed_logits(model, ids, LENGTHS), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_packed_gradients_equal_padded_ones(model_type):
    model = tiny_model(model_type)
    twin = plain_twin(model)
    ids = random_ids(LENGTHS)
    weight = torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(5))
    (packed_logits(model, ids, LENGTHS) * weight).sum().backward()
    (padded_logits(twin, ids, LENGTHS) * weight).sum().backward()
    expected = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-3, msg=name
        )


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_neighbour_in_the_pack_changes_nothing(model_type):
    model = tiny_model(model_type)
    ids = random_ids(LENGTHS)
    before = packed_logits(model, ids, LENGTHS)
    start, stop = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    other = ids.clone()
    other[start:stop] = (ids[start:stop] + 7) % VOCABULARY
    after = packed_logits(model, other, LENGTHS)
    outside = torch.ones(len(ids), dtype=torch.bool)
    outside[start:stop] = False
    assert not torch.equal(before[start:stop], after[start:stop])
    torch.testing.assert_close(before[outside], after[outside], rtol=0, atol=1e-6)


def test_tied_embeddings_stay_one_parameter_and_collect_both_gradients():
    model = tiny_model("qwen2")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head.weight is embedding.weight
    packed_logits(model, random_ids([5]), [5]).sum().backward()
    seen = embedding.weight.grad.abs().sum(-1) > 0
    assert seen.all(), "the output layer gives every row of the vocabulary a gradient"


def test_a_model_called_without_a_layout_is_refused():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="without layout"):
        model(input_ids=torch.tensor([[3, 4]]))


def test_groups_waste_little_on_padding_and_hold_every_sequence_once():
    lengths = [5, 100, 90, 0, 4, 1, 99, 30]
    groups = similar_lengths(lengths)
    assert sorted(i for group in groups for i in group) == [0, 1, 2, 4, 5, 6, 7]
    for group in groups:
        real = sum(lengths[i] for i in group)
        assert real >= 0.8 * len(group) * max(lengths[i] for i in group)


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_a_token_sees_itself_and_the_nearest_before_it(window):
    distance = torch.arange(5)[:, None] - torch.arange(5)
    expected = (distance >= 0) & (distance < window)
    assert torch.equal(window_mask(5, window, torch.device("cpu")), expected)


def test_a_mask_is_made_on_its_device_and_nothing_larger_on_the_way():
    made = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func(*args, **(kwargs or {})))
            return made[-1]

    with Recorder():
        mask = window_mask(50, 7, torch.device("meta"))
    assert {x.device.type for x in made} == {"meta"}
    assert max(x.numel() * x.element_size() for x in made) == mask.numel() == 2500


# Gemma 2 has layers with and without a window, and a soft cap that needs a mask in both.
@pytest.mark.parametrize(("model_type", "num_masks"), [("mistral", 1), ("gemma2", 2)])
def test_layers_share_masks_which_are_freed_with_the_pass(model_type, num_masks):
    length = 37

    def masks():
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        return [x for x in tensors if x.dtype == torch.bool and x.shape == (length, length)]

    model = tiny_model(model_type, num_hidden_layers=4)
    ids, layout = random_ids([length]), PackedLayout([length])
    hidden = hidden_states(model, ids, packed_positions(layout.lengths), layout)
    assert len(masks()) == num_masks
    hidden.sum().backward()
    del hidden, layout
    gc.collect()
    assert masks() == []


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_log_probs_and_entropy_equal_plain_torch_with_gradients(
    monkeypatch, softcap, with_bias
):
    monkeypatch.setattr("verl.models.head.WORKSPACE_ELEMENTS", 16 * 11)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 6, generator=generator, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 11, (37,), generator=generator)
    on_log_prob, on_entropy = torch.randn(2, 37, generator=generator)

    head = OutputHead(weight, bias, softcap, scale=0.7)
    log_prob, entropy = token_log_probs(hidden, head, targets, temperature=1.3)
    plain = torch.log_softmax(scaled_logits(hidden, head, 1.3), -1)
    plain_log_prob = plain[torch.arange(37), targets]
    plain_entropy = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(log_prob, plain_log_prob)
    torch.testing.assert_close(entropy, plain_entropy)

    leaves = [hidden, weight, *([bias] if bias is not None else [])]
    ours = torch.autograd.grad((log_prob * on_log_prob + entropy * on_entropy).sum(), leaves)
    theirs = torch.autograd.grad(
        (plain_log_prob * on_log_prob + plain_entropy * on_entropy).sum(), leaves
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_log_prob_of_a_token_is_read_at_the_position_before_it():
    """A head that predicts `id + 1` with certainty scores an ascending sequence with log-prob 0."""
    vocabulary = 8
    ids = torch.arange(5)
    hidden = torch.eye(vocabulary)[ids]
    head = OutputHead(50.0 * torch.eye(vocabulary).roll(1, dims=0))
    log_prob, _ = token_log_probs(hidden[:-1], head, ids[1:])
    torch.testing.assert_close(log_prob, torch.zeros(4))


def test_more_hidden_states_than_targets_are_refused():
    with pytest.raises(ValueError, match="one target for each"):
        token_log_probs(
            torch.zeros(3, 2), OutputHead(torch.zeros(4, 2)), torch.zeros(2, dtype=torch.long)
        )


def test_a_recurrent_model_is_refused_by_name():
    from transformers import AutoConfig

    from verl.models.loading import random_causal_lm

    config = AutoConfig.for_model(
        "mamba", vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    with pytest.raises(ValueError, match="MambaForCausalLM keeps state outside attention"):
        random_causal_lm(config)


def test_a_model_whose_attention_would_ignore_the_layout_is_refused():
    twin = plain_twin(tiny_model("llama"))
    layout = PackedLayout([2, 2])
    with pytest.raises(ValueError, match="neighbours see each other"):
        hidden_states(twin, torch.tensor([3, 4, 5, 6]), packed_positions(layout.lengths), layout)
