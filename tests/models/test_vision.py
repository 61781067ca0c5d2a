"""Vision-language models of four families, tiny and random: what images mean for packed tokens."""

import numpy as np
import pytest
import torch

from tests.tiny_vision import (
    FAMILIES,
    picture,
    plain_twin,
    tiny_processor,
    tiny_vision_model,
)
from verl.models.forward import hidden_states, packed_layout
from verl.models.loading import random_causal_lm
from verl.models.lora import LoraOptions, add_lora, lora_layers
from verl.models.vision import FeatureCache, freeze_tower, placed_features, vision_parts
from verl.utils.dataset.media import MediaEncoder
from verl.utils.media import Media, hash_of_all, rope_delta, rope_positions


def prompt(*pictures, words="What is it?"):
    images = [{"type": "image", "image": one} for one in pictures]
    return [{"role": "user", "content": [*images, {"type": "text", "text": words}]}]


def encoder(tmp_path, family):
    processor = tiny_processor(tmp_path / family, family)
    return MediaEncoder(processor.tokenizer, processor)


def packed_logits(model, sequences):
    """Logits of sequences with images, end to end in one pass."""
    placed, positions, start = [], [], 0
    for ids, media in sequences:
        placed += [(one, np.arange(len(one.places)), one.places + start) for one in media]
        found = rope_positions(len(ids), media)
        positions.append(np.arange(len(ids)) if found is None else found)
        start += len(ids)
    if any(one.ndim == 2 for one in positions):
        positions = [one if one.ndim == 2 else np.stack([one] * 3) for one in positions]
    hidden = hidden_states(
        model,
        torch.tensor([token for ids, _ in sequences for token in ids]),
        torch.from_numpy(np.concatenate(positions, axis=-1)),
        packed_layout(model, [len(ids) for ids, _ in sequences]),
        placed_features(model, placed),
    )
    return model.get_output_embeddings()(hidden).split([len(ids) for ids, _ in sequences])


def plain_inputs(family, ids, media):
    """The arguments of an unmodified model for one sequence."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    if not media:
        return inputs
    across = 1 if family == "idefics3" else 0
    for name in media[0].inputs:
        inputs[name] = torch.cat([one.inputs[name] for one in media], across)
    if family != "idefics3":
        kinds = torch.zeros(1, len(ids), dtype=torch.int32)
        for one in media:
            kinds[0, one.places] = 1
        inputs["mm_token_type_ids"] = kinds
    return inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_an_unmodified_model_in_logits_and_gradients(tmp_path, family):
    encode = encoder(tmp_path, family).encode_prompt
    sequences = [
        encode(prompt(picture(1), picture(2, 16, 16))),
        encode(prompt(words="No picture.")),
        encode(prompt(picture(3, 8, 16))),
    ]
    model = tiny_vision_model(family)
    twin = plain_twin(model, family)
    ours = packed_logits(model, sequences)
    theirs = [twin(**plain_inputs(family, *one)).logits[0] for one in sequences]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    for logits in (ours, theirs):
        sum(
            (one.log_softmax(-1)[:, 7] * (1 + number)).sum() for number, one in enumerate(logits)
        ).backward()
    others = dict(twin.named_parameters())
    num_of_tower = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, others[name].grad, atol=2e-3, rtol=2e-3)
            num_of_tower += "vis" in name
    assert num_of_tower > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_the_model_itself(tmp_path, family):
    ids, media = encoder(tmp_path, family).encode_prompt(prompt(picture(1), picture(2, 32, 8)))
    found = rope_positions(len(ids), media)
    if family == "idefics3":
        assert found is None
        assert rope_delta(media) == 0
        return
    inputs = plain_inputs(family, ids, media)
    base = random_causal_lm(tiny_vision_model(family).config).base_model
    theirs, delta = base.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    assert found.tolist() == theirs[:, 0].tolist()
    assert rope_delta(media) == int(delta)


def test_a_sampled_placeholder_is_a_token_like_others(tmp_path):
    ids, media = encoder(tmp_path, "qwen2_vl").encode_prompt(prompt(picture(1)))
    model = tiny_vision_model("qwen2_vl")
    placeholder = ids[media[0].places[0]]
    (logits,) = packed_logits(model, [([*ids, placeholder, 30], media)])
    (other,) = packed_logits(model, [([*ids, 31, 30], media)])
    torch.testing.assert_close(logits[: len(ids)], other[: len(ids)])
    assert not torch.allclose(logits[-1], other[-1])


def test_a_neighbours_image_changes_nothing(tmp_path):
    encode = encoder(tmp_path, "qwen2_vl").encode_prompt
    model = tiny_vision_model("qwen2_vl")
    first = encode(prompt(picture(1)))
    logits = [packed_logits(model, [first, encode(prompt(picture(seed)))]) for seed in (2, 3)]
    assert torch.equal(logits[0][0], logits[1][0])
    assert not torch.allclose(logits[0][1], logits[1][1])


def test_equal_tokens_with_other_images_are_other_prompts(tmp_path):
    encode = encoder(tmp_path, "qwen2_vl").encode_prompt
    (ids, media), (other_ids, other) = encode(prompt(picture(1))), encode(prompt(picture(2)))
    assert ids == other_ids
    assert hash_of_all(media) != hash_of_all(other)
    assert hash_of_all(media) == hash_of_all(encode(prompt(picture(1)))[1])


def test_the_tower_runs_once_per_image_and_anew_when_its_weights_change(tmp_path):
    _, media = encoder(tmp_path, "qwen2_vl").encode_prompt(prompt(picture(1), picture(1)))
    model = tiny_vision_model("qwen2_vl")
    cache = FeatureCache(model)
    placed = [(one, np.arange(len(one.places)), one.places) for one in media]
    before = cache.placed(placed, one_by_one=False)
    cache.placed(placed, one_by_one=False)
    assert cache.num_computed == 1
    with torch.no_grad():
        next(iter(vision_parts(model)[0].parameters())).mul_(1.5)
    after = cache.placed(placed, one_by_one=False)
    assert cache.num_computed == 2
    assert not torch.equal(before.features.embeddings, after.features.embeddings)


def test_a_frozen_tower_gets_no_gradient_and_adapters_go_to_the_language_part(tmp_path):
    sequence = encoder(tmp_path, "idefics3").encode_prompt(prompt(picture(1)))
    model = tiny_vision_model("idefics3")
    freeze_tower(model)
    packed_logits(model, [sequence])[0].sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert not any("vision_model" in name for name in trained)
    assert any("connector" in name for name in trained)
    pytest.importorskip("peft")
    adapted = add_lora(tiny_vision_model("idefics3"), LoraOptions(rank=2))
    names = list(lora_layers(adapted))
    assert names
    assert all("text_model" in name for name in names)


def test_features_that_do_not_fit_the_tokens_are_refused(tmp_path):
    ids, (media,) = encoder(tmp_path, "qwen2_vl").encode_prompt(prompt(picture(1)))
    short = Media("image", media.content_hash, media.inputs, media.places[:-1], media.grid)
    with pytest.raises(ValueError, match="6 features of 1 images that have 5 tokens"):
        packed_logits(tiny_vision_model("qwen2_vl"), [(ids, (short,))])
