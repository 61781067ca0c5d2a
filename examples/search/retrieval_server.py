"""A retrieval service over a JSON Lines corpus: BM25, on this machine, with Search-R1's protocol.

    python examples/search/retrieval_server.py --corpus corpus.jsonl --port 8000

    POST /retrieve {"queries": ["..."], "topk": 3, "return_scores": true}
    reply          {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}

A line of the corpus is `{"id": ..., "contents": "title\\ntext"}`. Clients show the token in
`VERL_RETRIEVAL_TOKEN`; without that variable the server makes one and prints it. It listens on
127.0.0.1; another `--host` lets other machines in.
"""

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.json_server import JsonServer, Refusal

WORD = re.compile(r"\w+")
MAX_QUERIES, MAX_TOPK, MAX_QUERY_CHARACTERS = 64, 100, 8192


class Bm25:
    """Okapi BM25 (Robertson and Zaragoza, 2009).

        score(d, q) = sum over words w of q   idf(w) * tf (k + 1) / (tf + k (1 - b + b |d| / mean))
        idf(w) = log(1 + (N - n_w + 1/2) / (n_w + 1/2))      n_w of N documents have w

    The summands are computed once, and kept as one list of (document, summand) per word.
    """

    def __init__(self, texts: list[str], k: float = 1.2, b: float = 0.75) -> None:
        if not texts:
            raise ValueError("the corpus has no documents")
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
        norm = k * (1 - b + b * lengths / max(lengths.mean(), 1e-9))
        documents: dict[str, list[int]] = {}
        for i, count in enumerate(counts):
            for word in count:
                documents.setdefault(word, []).append(i)
        self.num_documents = len(texts)
        self._summands: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, found in documents.items():
            which = np.array(found)
            tf = np.array([counts[i][word] for i in found], dtype=np.float64)
            idf = np.log1p((len(texts) - len(found) + 0.5) / (len(found) + 0.5))
            self._summands[word] = which, idf * tf * (k + 1) / (tf + norm[which])

    def search(self, query: str, topk: int) -> list[tuple[int, float]]:
        """The best documents that share a word with the query, and their scores."""
        scores = np.zeros(self.num_documents)
        for word, times in Counter(words(query)).items():
            if word in self._summands:
                which, summands = self._summands[word]
                scores[which] += times * summands
        best = np.argsort(-scores, kind="stable")[:topk]
        return [(int(i), float(scores[i])) for i in best if scores[i] > 0]


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def read_corpus(path: Path) -> list[dict[str, Any]]:
    documents = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        document = json.loads(line)
        if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
            raise SystemExit(f"{path}, line {number}: expected an object with a text in `contents`")
        documents.append(document)
    return documents


def make_server(documents: list[dict[str, Any]], **options: Any) -> JsonServer:
    index = Bm25([document["contents"] for document in documents])

    def retrieve(request: Any) -> dict[str, Any]:
        queries = request.get("queries") if isinstance(request, dict) else None
        if not isinstance(queries, list) or not 1 <= len(queries) <= MAX_QUERIES:
            raise Refusal(422, f"`queries` must be a list of 1 to {MAX_QUERIES} texts")
        if not all(isinstance(q, str) and len(q) <= MAX_QUERY_CHARACTERS for q in queries):
            raise Refusal(422, f"a query is a text of at most {MAX_QUERY_CHARACTERS} characters")
        topk = request.get("topk") or 3
        if not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
            raise Refusal(422, f"`topk` must be a number from 1 to {MAX_TOPK}")
        found = [index.search(query, topk) for query in queries]
        if not request.get("return_scores"):
            return {"result": [[documents[i] for i, _ in passages] for passages in found]}
        return {
            "result": [
                [{"document": documents[i], "score": score} for i, score in passages]
                for passages in found
            ]
        }

    return JsonServer({("POST", "/retrieve"): retrieve}, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a corpus to the search tool.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    arguments = parser.parse_args()
    given = os.environ.get("VERL_RETRIEVAL_TOKEN")
    server = make_server(
        read_corpus(arguments.corpus), host=arguments.host, port=arguments.port, token=given
    )
    print(f"url: {server.url}/retrieve", flush=True)
    shown = "the one in VERL_RETRIEVAL_TOKEN" if given else server.token
    print(f"token: {shown}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped")
