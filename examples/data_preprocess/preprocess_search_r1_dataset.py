"""Questions to be answered with a search engine (Search-R1, arXiv:2503.09516).

    python examples/data_preprocess/preprocess_search_r1_dataset.py --local_dataset_path raw/nq

Raw rows have `question`, `golden_answers` (any of them is right) and `data_source` (nq, hotpotqa,
...). The tool `search` and the answer in `<answer>` tags are what the reward function of
`searchR1_<source>` expects.
"""

from typing import Any

from preparation import Source, command_line, prepare

HUB_NAME = "PeterJinGo/nq_hotpotqa_train"
SYSTEM = "You are a helpful assistant who looks facts up before stating them."
INSTRUCTION = (
    "Answer the question. Whenever new information arrives, first reason about it inside <think> "
    "and </think>. If you lack knowledge, call the tool `search`; its results come back between "
    "<tool_response> and </tool_response>. You may search as often as you want. When nothing is "
    "missing, give the answer inside <answer> and </answer>, without explanations; for example, "
    "<answer> Beijing </answer>. Question: "
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    question, source = raw["question"], f"searchR1_{raw['data_source']}"
    answers = list(raw["golden_answers"])
    if not answers:
        raise ValueError(f"there is no golden answer to {question!r}")
    truth = {"target": answers}
    create_kwargs = {"ground_truth": truth, "question": question, "data_source": source}
    return {
        "data_source": source,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": INSTRUCTION + question},
        ],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": create_kwargs}},
        },
    }


if __name__ == "__main__":
    parser = command_line(__doc__, "~/data/searchR1_processed_direct")
    parser.add_argument("--hf_repo_id", default=HUB_NAME, help="dataset on the hub")
    arguments = parser.parse_args()
    prepare(arguments, Source(arguments.hf_repo_id), make_row)
