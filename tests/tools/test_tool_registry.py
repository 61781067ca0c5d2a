"""YAML files of tools: what is read, and what is refused with the file, the entry and the field."""

import pytest
import yaml

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from verl.tools.tool_registry import (
    ToolType,
    get_tool_class,
    initialize_tools_from_config,
    load_all_tools,
)
from verl.tools.utils import tool_registry as older_path


class Echo(BaseTool):
    """Needs no schema in a file."""

    def get_openai_tool_schema(self):
        values = {"type": "function", "function": {"name": "echo"}}
        return OpenAIFunctionToolSchema.model_validate(values)


ECHO = f"{__name__}.Echo"
SCHEMA = {
    "type": "function",
    "function": {
        "name": "named",
        "description": "Says it.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1}},
            "required": ["n"],
        },
    },
}


@pytest.fixture
def write(tmp_path):
    def file(*entries, **others):
        path = tmp_path / "tools.yaml"
        path.write_text(yaml.safe_dump({"tools": list(entries), **others}))
        return str(path)

    return file


def test_a_file_lists_tools(write):
    path = write(
        {"class_name": ECHO, "config": {"type": "native", "volume": 3}},
        {"class_name": ECHO, "tool_schema": SCHEMA},
    )
    echo, named = initialize_tools_from_config(path)
    assert (echo.name, named.name) == ("echo", "named")
    assert echo.config["volume"] == 3
    assert named.tool_schema.offered() == SCHEMA  # JSON Schema's own words are kept
    assert get_tool_class(ECHO) is Echo
    assert older_path.initialize_tools_from_config is initialize_tools_from_config
    assert ToolType("mcp") is ToolType.MCP


def without(schema, **function):
    return {**schema, "function": {**schema["function"], **function}}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"class_name": ECHO, "tool_shema": SCHEMA}, "'tool_shema', .* did you mean tool_schema"),
        ({"class_name": ECHO, "x": 1}, "tool 1 .*Echo.* 'x', .*Known: class_name, config, tool"),
        ({"config": {}}, "tool 1 is .*needs class_name"),
        ({"class_name": ECHO, "config": []}, r"config is \[\]; it must be a mapping"),
        (
            {"class_name": ECHO, "tool_schema": without(SCHEMA, parameter={})},
            "tool_schema.function.parameter is a field that nobody reads; known: name, desc",
        ),
        ({"class_name": ECHO, "tool_schema": {**SCHEMA, "n": 1}}, "tool_schema.n .*type, function"),
        ({"class_name": ECHO, "tool_schema": {"type": "function"}}, "function: Field required"),
        ({"class_name": ECHO, "mcp": {"a": 1}}, "has mcp, which only entries of config.type mcp"),
        ({"class_name": ECHO, "config": {"type": "magic"}}, "unknown tool type 'magic'"),
    ],
)
def test_an_entry_that_cannot_be_read_is_named(write, entry, message):
    path = write(entry)
    with pytest.raises(ValueError, match=message) as caught:
        initialize_tools_from_config(path)
    assert path in str(caught.value) or "tool type" in str(caught.value)


def test_files_that_are_no_lists_of_tools_are_refused(tmp_path, write):
    file = tmp_path / "t.yaml"
    for text, message in [
        ("- a", "must hold `tools:`"),
        ("tools: {a: 1}", "must hold `tools:`"),
        ("tools: [", "is no YAML"),
        ("!!python/object:os.system {}", "is no YAML"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            initialize_tools_from_config(str(file))
    with pytest.raises(ValueError, match="'toolz', which nobody reads; did you mean tools"):
        initialize_tools_from_config(write(toolz=1))
    with pytest.raises(FileNotFoundError, match="absent"):
        initialize_tools_from_config(str(tmp_path / "absent.yaml"))
    with pytest.raises(ImportError, match="nowhere"):
        get_tool_class("nowhere.Tool")
    with pytest.raises(AttributeError, match="Did you mean 'Echo'"):
        get_tool_class(f"{__name__}.Echoo")


def test_names_must_not_collide(write, tmp_path):
    file = tmp_path / "colliding.py"
    file.write_text(
        "from verl.tools.function_tool import function_tool\n"
        "@function_tool\ndef echo():\n    pass\n"
    )
    path = write({"class_name": ECHO})
    assert [tool.name for tool in load_all_tools(path, None)] == ["echo"]
    assert [tool.name for tool in load_all_tools(None, str(file))] == ["echo"]
    assert load_all_tools(None, None) == []
    with pytest.raises(ValueError, match="two tools have the name 'echo'"):
        load_all_tools(path, str(file))
    with pytest.raises(ValueError, match="two tools have the name 'echo'"):
        initialize_tools_from_config(write({"class_name": ECHO}, {"class_name": ECHO}))


async def test_a_plain_tool_has_verls_defaults():
    tool = Echo({})
    instance_id, response = await tool.create()
    assert isinstance(instance_id, str)
    assert response.is_empty()
    _, reward, metrics = await tool.execute(instance_id, {})
    assert (reward, metrics) == (0.0, {})
    assert await tool.calc_reward(instance_id) == 0.0
    await tool.release(instance_id)
    with pytest.raises(ValueError, match="BaseTool has no schema"):
        BaseTool({}, None)


def test_responses_and_parsed_calls():
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=["b"]).is_text_only()
    assert ToolResponse(text="").is_empty()
    with pytest.raises(ValueError, match="image must be a list, but got str"):
        ToolResponse(image="b")
    with pytest.raises(ValueError, match="text must be str, but got bytes"):
        ToolResponse(text=b"a")
    read = OpenAIFunctionCallSchema.from_openai_function_parsed_schema
    for arguments, expected in [
        ('{"a": 1}', ({"a": 1}, False)),
        ("[1]", ({}, True)),
        ("{", ({}, True)),
    ]:
        call, has_error = read(OpenAIFunctionParsedSchema(name="f", arguments=arguments))
        assert (call.arguments, has_error) == expected


@pytest.mark.parametrize(
    ("class_name", "config", "meant"),
    [
        ("search_tool.SearchTool", {"retrieval_service_url": "http://x/", "top_k": 5}, "topk"),
        ("sandbox_fusion_tools.SandboxFusionTool", {"memory_limit": 5}, "memory_limit_mb"),
        ("gsm8k_tool.Gsm8kTool", {"time_out": 5}, "timeout"),
        ("mcp_search_tool.MCPSearchTool", {"type": "mcp", "rate_limits": 5}, "rate_limit"),
    ],
)
def test_an_option_that_a_built_in_tool_does_not_read_is_refused(
    tmp_path, class_name, config, meant
):
    file = tmp_path / "tools.yaml"
    item = {"class_name": f"verl.tools.{class_name}", "config": config}
    file.write_text(yaml.safe_dump({"tools": [item]}))
    with pytest.raises(ValueError, match=f"config has the field .*did you mean {meant}\\?"):
        initialize_tools_from_config(str(file))
