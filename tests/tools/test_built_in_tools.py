"""The tools that come with the package, through a lease as in a run."""

import json
from types import SimpleNamespace

import pytest

from verl.tools.geo3k_tool import Geo3kTool
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.image_zoom_in_tool import ImageZoomInTool, usable_box
from verl.tools.leases import ToolSet


def call(tool, **arguments):
    return SimpleNamespace(name=tool.name, arguments=json.dumps(arguments))


@pytest.mark.parametrize(
    ("cls", "wrong", "right", "truth"),
    [(Gsm8kTool, "17", "1,234", "1234"), (Geo3kTool, "3", "2 \\sqrt{2}", "2\\sqrt{2}")],
)
async def test_the_last_answer_decides_and_no_progress_costs(cls, wrong, right, truth):
    tool = cls({})
    tools = ToolSet([tool])
    kwargs = {tool.name: {"create_kwargs": {"ground_truth": truth}}}
    async with tools.lease("a", kwargs) as lease:
        outcomes = [await lease.call(call(tool, answer=one)) for one in (wrong, right, right)]
    assert [one.kind for one in outcomes] == ["reply"] * 3, outcomes
    assert [one.reward for one in outcomes] == [-0.05, 0.0, -0.05]
    assert outcomes[1].response.text.endswith("reward=1.0")
    assert lease.rewards == {tool.name: 1.0}
    assert tool._instance_dict == {}
    async with tools.lease("b", {}) as lease:
        outcome = await lease.call(call(tool, answer=right))
    assert outcome.kind == "refused"
    assert "extra_info.tools_kwargs" in outcome.response.text or "truncated" in (
        outcome.response.text
    )
    tools.close()


async def test_a_part_of_an_image_is_an_image():
    image_module = pytest.importorskip("PIL.Image")
    tool = ImageZoomInTool({})
    tools = ToolSet([tool])
    image = image_module.new("RGB", (100, 80), "red")
    async with tools.lease("a", {tool.name: {"create_kwargs": {"image": image}}}) as lease:
        outcome = await lease.call(call(tool, bbox_2d=[10, 10, 60, 50], label="a cat"))
        assert outcome.response.image[0].size == (50, 40)
        assert "a cat" in outcome.response.text
        bad = await lease.call(call(tool, bbox_2d=[200, 0, 300, 10]))
        assert (bad.reward, bad.metrics) == (-0.05, {"success": False})
        assert bad.response.image is None
    assert tool._instance_dict == {}
    tools.close()


def test_boxes_stay_in_the_image_and_grow_to_what_models_take():
    assert usable_box([-5, 0, 50, 50.7], 100, 80) == (0, 0, 50, 50)
    assert usable_box([98, 0, 100, 80], 100, 80) == (72, 0, 100, 80)
    assert usable_box([0, 0, 5, 5], 10, 10) == (0, 0, 10, 10)
    for bad in (None, [1, 2, 3], [0, 0, "1", 1], [5, 5, 5, 9], [0, 0, float("nan"), 1]):
        with pytest.raises(ValueError, match="bbox_2d"):
            usable_box(bad, 100, 80)
