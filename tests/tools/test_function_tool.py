"""Functions become tools: names, schemas, what they return, and where they are found."""

import asyncio
from typing import Literal

import pytest

from verl.tools.function_tool import (
    function_tool,
    get_function_tool,
    load_function_tools_from_path,
    normalize_function_tool_return,
    schema_of,
)
from verl.tools.schemas import ToolResponse


def google(city: str, days: int = 3, unit: Literal["C", "F"] = "C", at: float | None = None):
    """Tell the weather.

    It may rain.

    Args:
        city (str): Where,
            and nothing else.
        days: How many days.
        unit: Degrees: C or F.

    Returns:
        city: Not a parameter.
    """


def numpy_style(city: str, tags: list[str]):
    """Tell the weather.

    It may rain.

    Parameters
    ----------
    city : str
        Where,
        and nothing else.
    tags : list of str
        More words.

    Returns
    -------
    str
        The weather.
    """


def sphinx(city: str, days: int = 3):
    """Tell the weather.

    It may rain.

    :param city: Where,
        and nothing else.
    :param int days: How many days.
    :return: The weather.
    """


@pytest.mark.parametrize("fn", [google, numpy_style, sphinx])
def test_a_schema_has_types_of_the_signature_and_words_of_the_docstring(fn):
    made = schema_of(fn, "weather").offered()
    assert made["type"] == "function"
    function = made["function"]
    assert function["name"] == "weather"
    assert function["description"] == "Tell the weather.\n\nIt may rain."
    where = {"type": "string", "description": "Where, and nothing else."}
    assert function["parameters"]["properties"]["city"] == where
    assert function["parameters"]["required"][0] == "city"


def test_types_become_json_schema():
    parameters = schema_of(google, "weather").offered()["function"]["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["days"] == {"type": "integer", "description": "How many days."}
    unit = {"type": "string", "enum": ["C", "F"], "description": "Degrees: C or F."}
    assert parameters["properties"]["unit"] == unit
    assert parameters["properties"]["at"] == {"type": "number"}
    tags = schema_of(numpy_style, "w").offered()["function"]["parameters"]["properties"]["tags"]
    assert tags == {"type": "array", "items": {"type": "string"}, "description": "More words."}
    bare = schema_of(lambda x: x, "bare").offered()["function"]
    assert bare["parameters"]["properties"] == {"x": {"type": "string"}}


def test_the_three_forms_of_the_decorator():
    @function_tool
    def plain_form() -> str:
        """One."""
        return "1"

    @function_tool("renamed_form")
    def other() -> str:
        return "2"

    stated = {"type": "function", "function": {"name": "stated_form", "description": "Three."}}

    @function_tool(schema=stated)
    async def third() -> str:
        return "3"

    assert plain_form() == "1"  # the function stays what it is
    tools = [get_function_tool(name) for name in ("plain_form", "renamed_form", "stated_form")]
    assert [tool.is_async for tool in tools] == [False, False, True]
    texts = [asyncio.run(tool.call({}))[0].text for tool in tools]
    assert texts == ["1", "2", "3"]
    assert tools[2].get_openai_tool_schema().function.description == "Three."
    with pytest.raises(
        ValueError, match=r"no function tool 'fourth_form'; registered: .*plain_form"
    ):
        get_function_tool("fourth_form")


def test_what_cannot_be_a_tool_is_refused():
    with pytest.raises(ValueError, match=r"function tool 'many' takes \*args"):
        function_tool("many")(lambda *args: None)
    with pytest.raises(ValueError, match=r"takes \*\*rest"):
        function_tool("many")(lambda **rest: None)
    with pytest.raises(ValueError, match="by position only"):
        function_tool("many")(lambda a, /: None)
    with pytest.raises(ValueError, match="has no JSON schema"):

        @function_tool
        def strange(x: asyncio.Future) -> None: ...

    function_tool("taken")(lambda: "first")
    with pytest.raises(ValueError, match="function tool 'taken' is already registered as"):
        function_tool("taken")(lambda: "second")
    with pytest.raises(ValueError, match="names 'b'; use one name"):
        function_tool("a", schema={"type": "function", "function": {"name": "b"}})(lambda: None)


RESPONSE = ToolResponse(text="r")


@pytest.mark.parametrize(
    ("value", "text", "reward", "metrics"),
    [
        (RESPONSE, "r", 0.0, {}),
        ("s", "s", 0.0, {}),
        ({"text": "t"}, "t", 0.0, {}),
        ({"a": "ü"}, '{"a": "ü"}', 0.0, {}),
        ([1, 2], "[1, 2]", 0.0, {}),
        (7, "7", 0.0, {}),
        (("s",), "s", 0.0, {}),
        (("s", 0.5), "s", 0.5, {}),
        ((RESPONSE, 1, {"k": 2}), "r", 1, {"k": 2}),
        (("s", None, None), "s", 0.0, {}),
    ],
)
def test_what_functions_may_return(value, text, reward, metrics):
    response, got_reward, got_metrics = normalize_function_tool_return(value)
    assert (response.text, got_reward, got_metrics) == (text, reward, metrics)


@pytest.mark.parametrize("value", [(), (1, 2, 3, 4), b"x"])
def test_what_they_may_not(value):
    with pytest.raises(TypeError, match="a function tool returned"):
        normalize_function_tool_return(value)


def test_a_file_gives_its_tools_and_may_be_loaded_again(tmp_path):
    file = tmp_path / "my_tools.py"
    text = """
from verl.tools.function_tool import function_tool

@function_tool
def file_first(x: int) -> int:
    return x

@function_tool("file_second")
async def other() -> str:
    return "y"

def helper():
    pass
"""
    file.write_text(text)
    names = [tool.name for tool in load_function_tools_from_path(str(file))]
    assert names == ["file_first", "file_second"]
    assert [tool.name for tool in load_function_tools_from_path(str(file))] == names
    file.write_text(text + "\n# changed\n")  # such a file is run again
    assert [tool.name for tool in load_function_tools_from_path(str(file))] == names
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"my_tools\.py defines no tools; decorate"):
        load_function_tools_from_path(str(file))
    with pytest.raises(FileNotFoundError):
        load_function_tools_from_path(str(tmp_path / "absent.py"))
