"""vLLM's side of `rollout_workloads.py`: runs in an environment that has vLLM and nothing of ours.

Loads the model in the folder it is given, then answers each line of work on its input with a line
`RESULT {...}`. Needs no tokenizer: ids in, ids out.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that CPU time is this process's

import vllm


def answer(**result: object) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def main() -> None:
    engine = vllm.LLM(
        sys.argv[1], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=64
    )
    answer(version=vllm.__version__)
    for line in sys.stdin:
        work = json.loads(line)
        params = [
            vllm.SamplingParams(
                temperature=1.0,
                max_tokens=num_tokens,
                ignore_eos=True,
                logprobs=0,
                n=work["num_samples"],
                detokenize=False,
            )
            for num_tokens in work["num_tokens"]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        answer(
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu_start,
            num_tokens=sum(len(sample.token_ids) for o in outputs for sample in o.outputs),
        )


if __name__ == "__main__":
    main()
