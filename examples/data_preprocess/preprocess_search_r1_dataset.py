"""Questions to answer with a search tool (Search-R1, arXiv:2503.09516).

    python examples/data_preprocess/preprocess_search_r1_dataset.py --local_dataset_path raw/nq

Raw rows have `question`, `golden_answers` (or `reward_model.ground_truth.target`), `data_source`.
Rows name the agent loop `tool_agent` and the tool `search`; `examples/search/` has a service.
"""

from typing import Any

from preparation import Source, command_line, prepare, with_tools

HUB_NAME = "PeterJinGo/nq_hotpotqa_train"
TOOL = "search"
SYSTEM = "You are a helpful and harmless assistant."
INSTRUCTION = (
    "Answer the given question. Reason inside <think> and </think> whenever you get new "
    "information. If you lack some knowledge, call the search tool, as often as you need. When you "
    "need nothing more, give the answer inside <answer> and </answer> without explanations. For "
    "example, <answer> Beijing </answer>. Question: "
)


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    question, answers = raw["question"], gold_answers(raw)
    data_source = f"searchR1_{raw['data_source']}"
    ground_truth = {"target": answers}
    row = {
        "data_source": data_source,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{INSTRUCTION}{question}"},
        ],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "question": question},
    }
    made_with = {"ground_truth": ground_truth, "question": question, "data_source": data_source}
    return with_tools(row, {TOOL: made_with})


def gold_answers(raw: dict[str, Any]) -> list[str]:
    answers = raw.get("golden_answers")
    if answers is None:
        answers = raw["reward_model"]["ground_truth"]["target"]
    listed = [answers] if isinstance(answers, str) else list(answers)
    if not listed:
        raise ValueError("the row has no answer in golden_answers")
    return listed


if __name__ == "__main__":
    parser = command_line(__doc__, "~/data/searchR1_processed_direct")
    parser.add_argument("--hf_repo_id", default=HUB_NAME, help="dataset on the hub")
    arguments = parser.parse_args()
    prepare(arguments, Source(arguments.hf_repo_id), make_row)
