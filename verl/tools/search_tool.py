"""`SearchTool`: passages from a service that speaks Search-R1's protocol (arXiv:2503.09516).

    POST <retrieval_service_url>  {"queries": ["..."], "topk": 3, "return_scores": true}
    reply  {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.5}, ...], ...]}

There is one list of passages per query.

A passage's first line is its title. `examples/search/` has such a service.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from verl.protocol.trajectory import InfraFault
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.services import RequestRefused, Service
from verl.utils.environment import retrieval_token
from verl.utils.py_functional import printable

MAX_QUERIES = 16
MAX_QUERY_CHARACTERS = 4096
DEFAULT_SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches for passages that answer the given queries.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "Complete search queries.",
                }
            },
            "required": ["query_list"],
        },
    },
}


class SearchTool(BaseTool):
    """Configuration:

    `retrieval_service_url` the address to POST to, as `http://127.0.0.1:8000/retrieve`
    `topk` (3) passages per query
    `num_workers`, `rate_limit` (120) the smaller of both is the number of requests at once
    `timeout` (30) seconds for a reply, retries included
    `reply` (json) the model reads `{"result": "..."}`; `text` sends it the passages as they are

    The token in the environment variable `VERL_RETRIEVAL_TOKEN`, if set, is shown to the service.
    """

    allows_parallel_calls = True
    default_schema = DEFAULT_SCHEMA
    options = ("retrieval_service_url", "topk", "num_workers", "rate_limit", "reply")

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        url = config.get("retrieval_service_url")
        if not url:
            raise ValueError(
                "SearchTool has no retrieval_service_url in its config; give the address of a "
                "retrieval service, for example http://127.0.0.1:8000/retrieve"
            )
        self.topk = int(config.get("topk", 3))
        if self.topk < 1:
            raise ValueError(f"topk of SearchTool is {self.topk}; it must be 1 or more")
        self.reply: Literal["json", "text"] = config.get("reply", "json")
        if self.reply not in ("json", "text"):
            raise ValueError(f"reply of SearchTool is {self.reply!r}; it must be json or text")
        self.service = Service(
            "the retrieval service",
            url,
            token=retrieval_token(),
            timeout_seconds=float(config.get("timeout", 30)),
            max_parallel=min(
                int(config.get("num_workers", 120)), int(config.get("rate_limit", 120))
            ),
        )

        self.config["timeout"] = self.service.deadline_seconds

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        queries = checked_queries(parameters.get("query_list"))
        payload = {"queries": queries, "topk": self.topk, "return_scores": True}
        try:
            answer = await self.service.ask(payload=payload)
        except RequestRefused as refusal:
            raise InfraFault(f"{self.service.url} refused a search: {refusal}") from refusal
        found = list(read_passages(answer, len(queries), self.service.url))
        text = "\n---\n".join(passages_text(passages) for passages in found)
        count = sum(map(len, found))
        metrics = {"query_count": len(queries), "total_results": count, "status": "success"}
        return ToolResponse(text=self._written(text)), 0.0, metrics

    def _written(self, text: str) -> str:
        return text if self.reply == "text" else json.dumps({"result": text}, ensure_ascii=False)


def checked_queries(queries: Any) -> list[str]:
    """The queries of a call; a ValueError tells the model what is wrong with them."""
    if not isinstance(queries, list) or not queries:
        raise ValueError("'query_list' must be a list with at least one query")
    if len(queries) > MAX_QUERIES:
        raise ValueError(
            f"'query_list' has {len(queries)} queries; at most {MAX_QUERIES} are served"
        )
    for query in queries:
        if not isinstance(query, str) or not query.strip():
            shown = printable(repr(query), max_characters=80)
            raise ValueError(f"every query must be a text; one is {shown}")
        if len(query) > MAX_QUERY_CHARACTERS:
            raise ValueError(
                f"a query has {len(query)} characters; at most {MAX_QUERY_CHARACTERS} are served"
            )
    return queries


def read_passages(answer: Any, num_queries: int, url: str) -> Iterator[list[str]]:
    """The passages for each query; a reply of another form is the service's fault."""
    result = answer.get("result") if isinstance(answer, Mapping) else None
    if not isinstance(result, Sequence) or len(result) != num_queries:
        raise InfraFault(
            f'{url} must reply {{"result": [...]}} with {num_queries} lists of passages; it '
            f"replied {printable(json.dumps(answer), max_characters=200)}"
        )
    for passages in result:
        texts: list[str] = []
        for passage in passages:
            # Without scores, the service sends the documents themselves.
            document = passage.get("document", passage) if isinstance(passage, Mapping) else None
            contents = document.get("contents") if isinstance(document, Mapping) else None
            if not isinstance(contents, str):
                raise InfraFault(
                    f"{url} sent a passage without a text in document.contents: "
                    f"{printable(json.dumps(passage), max_characters=200)}"
                )
            texts.append(contents)
        yield texts


def passages_text(passages: Sequence[str]) -> str:
    """`Doc 1 (Title: ...)` and its text, one after another."""
    lines: list[str] = []
    for number, contents in enumerate(passages, start=1):
        title, _, text = contents.partition("\n")
        lines.append(f"Doc {number} (Title: {title.strip(chr(34))})\n{text}\n")
    return "\n".join(lines).strip()
