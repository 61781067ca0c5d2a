"""Images of clients: in `data:` URLs, and files below a folder that the server allows."""

import base64
from dataclasses import replace

import pytest

from tests.server.clients import call, chat
from tests.server.conftest import OPTIONS
from tests.server.engines import ScriptedRollout
from tests.tiny_vision import ID, picture, tiny_processor
from verl.server import serve
from verl.server.encoding import ClientImages
from verl.utils.dataset.media import media_encoder_of
from verl.utils.dataset.tables import DataError
from verl.utils.images import BadImage, as_png


def url(octets, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(octets).decode()}"


def ask(server, *urls):
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    content = [*parts, {"type": "text", "text": "What?"}]
    return chat(server, messages=[{"role": "user", "content": content}], max_tokens=4)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """The engine, the server, and the folder below which it reads files."""
    folder = tmp_path_factory.mktemp("seeing")
    root = folder / "public"
    root.mkdir()
    picture(1).save(root / "a.png")
    picture(1).save(folder / "secret.png")
    processor = tiny_processor(folder / "model")
    engine = ScriptedRollout(lambda request: [ID["y"], ID["</s>"]])
    options = replace(OPTIONS, max_images=2, allowed_local_media_path=str(root))
    with serve([engine], processor.tokenizer, options, processor) as server:
        yield engine, server, root


def test_an_image_in_a_message_reaches_the_engine_in_its_place(seeing):
    engine, server, root = seeing
    for one in (url(as_png(picture(1))), f"file://{root / 'a.png'}"):
        status, _ = ask(server, one)
        assert status == 200
        request = engine.requests[-1]
        (media,) = request.media
        assert {request.prompt_ids[place] for place in media.places} == {ID["<|image_pad|>"]}
    first, second = engine.requests[-2:]
    assert first.prompt_ids == second.prompt_ids
    assert first.media[0].content_hash == second.media[0].content_hash


def test_the_schema_of_a_model_that_sees_has_images(seeing):
    _, server, _ = seeing
    assert '"#/components/schemas/ImagePart"' in call(server, "/openapi.json")[2].decode()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("https://example.com/a.png", "a data: URL, or a file below the folder"),
        ("file:///etc/passwd", "not below the folder"),
        ("data:image/png;base64,!", "not base64"),
        (url(b"no image"), "cannot be read"),
        (url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF"), "cannot be read"),
    ],
)
def test_what_is_no_image_of_the_client_is_refused(seeing, bad, reason):
    status, answer = ask(seeing[1], bad)
    assert status == 400
    assert reason in answer["error"]["message"]


def test_a_path_that_leads_out_of_the_folder_is_refused(seeing):
    status, answer = ask(seeing[1], f"file://{seeing[2]}/../secret.png")
    assert status == 400
    assert "not below the folder" in answer["error"]["message"]


def test_a_path_is_opened_as_it_was_checked(tmp_path, monkeypatch):
    """`~` is a folder of that name below the root, and not the user's home."""
    home, root = tmp_path / "home", tmp_path / "public"
    for folder in (home, root / "~"):
        folder.mkdir(parents=True)
    picture(1).save(home / "a.png")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(root)
    processor = tiny_processor(tmp_path / "model")
    images = ClientImages(media_encoder_of(processor.tokenizer, processor, {}), str(root))
    parts = [{"type": "image", "image": "file://~/a.png"}, {"type": "text", "text": "What?"}]
    with pytest.raises((BadImage, DataError), match=r"public/~/a\.png"):
        images.encode(lambda: ([{"role": "user", "content": parts}], []), 100, None)


def test_more_images_than_allowed_are_refused(seeing):
    one = url(as_png(picture(1)))
    status, answer = ask(seeing[1], one, one, one)
    assert status == 400
    assert "3 images" in answer["error"]["message"]


def test_a_model_that_does_not_see_is_given_no_images(plain_server):
    status, answer = ask(plain_server, url(as_png(picture(1))))
    assert status == 400
    assert "does not see" in answer["error"]["message"]
