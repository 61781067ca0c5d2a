"""Images on the wire to an engine in a process of its own."""

import json

import pytest
import torch

from tests.models.test_vision import encoder, prompt
from tests.tiny_vision import ID, picture, tiny_vision_model
from tests.workers.rollout.test_vision import LIMITS, engine, request
from verl.utils.images import open_image
from verl.utils.media import unexpanded
from verl.workers.rollout.native.core import EngineCore
from verl.workers.rollout.process.messages import request_fields, request_of
from verl.workers.rollout.process.native import HostedNativeEngine


def sent(asked, form):
    return request_of(json.loads(json.dumps(request_fields(asked, form))))


def test_an_engine_elsewhere_says_what_one_here_says(tmp_path):
    ids, media = encoder(tmp_path, "qwen2_vl").encode_prompt(prompt(picture(1), picture(2)))
    asked = request(ids, media, max_tokens=6)
    model = tiny_vision_model()
    ((here,),) = engine(model).generate_batch([asked])
    hosted = HostedNativeEngine(EngineCore(model, LIMITS, eos_token_ids=[ID["</s>"]]))
    assert hosted.facts().media == "inputs"
    hosted.submit(0, sent(asked, "inputs"))
    tokens = []
    while hosted.has_work():
        tokens += [token for _, delta in hosted.step() for token in delta.token_ids]
    assert tokens == here.token_ids


def test_an_engine_with_a_processor_of_its_own_gets_files_and_one_placeholder_each(tmp_path):
    encode = encoder(tmp_path, "idefics3")
    ids, media = encode.encode_prompt(prompt(picture(1), picture(2)))
    arrived = sent(request(ids, media), "files")
    assert [one.inputs for one in arrived.media] == [{}, {}]
    images = [open_image(one.source) for one in arrived.media]
    assert [one.tobytes() for one in images] == [picture(1).tobytes(), picture(2).tobytes()]
    short = unexpanded(arrived.prompt_ids, arrived.media)
    assert short.count(ID["<image>"]) == 2
    assert encode.place(short, images)[0] == ids


def test_an_engine_that_sees_nothing_refuses_images_by_name(tmp_path):
    ids, media = encoder(tmp_path, "qwen2_vl").encode_prompt(prompt(picture(1)))
    with pytest.raises(ValueError, match="request r has 1 images"):
        request_fields(request(ids, media))


def test_tensors_come_through_as_they_were(tmp_path):
    ids, media = encoder(tmp_path, "idefics3").encode_prompt(prompt(picture(1)))
    (arrived,) = sent(request(ids, media), "inputs").media
    for name, tensor in media[0].inputs.items():
        assert torch.equal(arrived.inputs[name], tensor)
    assert arrived.places.tolist() == media[0].places.tolist()
