"""How fast the built-in engine generates on one GPU, prefill included.

    python benchmarks/gpu/decode.py [--shape 0.5B] [--hf] [--fuse]

128 prompts of 256 tokens, 8 samples each, 512 tokens per sample, temperature 1, the log-probability
of every token returned. End-of-sequence is ignored, so all runs give the same number of tokens.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from shapes import ceilings, random_model, workload_parser

from verl.models.forward import hidden_states, packed_layout, packed_positions
from verl.models.fuse import fuse_model
from verl.models.head import OutputHead, token_log_probs
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine


def requests(num_prompts, prompt_tokens, num_samples, new_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=seed)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=torch.randint(10, 150000, (prompt_tokens,), generator=generator).tolist(),
            params=params,
            num_samples=num_samples,
        )
        for i in range(num_prompts)
    ]


def timed(run):
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


@torch.no_grad()
def training_difference(model, request, outputs):
    """How far the sampled log-probs are from those of a training pass over the same tokens."""
    sequences = [list(request.prompt_ids) + output.token_ids for output in outputs]
    lengths = [len(tokens) for tokens in sequences]
    ids = torch.tensor([token for tokens in sequences for token in tokens], device=model.device)
    positions = packed_positions(lengths).to(model.device)
    hidden = hidden_states(model, ids, positions, packed_layout(model, lengths))
    log_probs, _ = token_log_probs(hidden[:-1], OutputHead.of(model), ids[1:])
    start, differences = 0, []
    for output, length in zip(outputs, lengths, strict=True):
        first = start + len(request.prompt_ids) - 1
        trained = log_probs[first : first + len(output.token_ids)]
        sampled = torch.tensor(output.log_probs, device=model.device)
        differences.append((trained - sampled).abs())
        start += length
    difference = torch.cat(differences)
    return {"mean": float(difference.mean()), "max": float(difference.max())}


def hugging_face(model, batch, new_tokens):
    ids = torch.tensor([r.prompt_ids for r in batch for _ in range(r.num_samples)], device="cuda")
    model.set_attn_implementation("sdpa")
    try:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation("verl")


def main() -> None:
    parser = workload_parser(__doc__.partition("\n")[0])
    parser.add_argument("--steps-per-visit", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--hf", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("decode.json"))
    options = parser.parse_args()
    model = random_model(options.shape)
    fused = fuse_model(model) if options.fuse else []
    num_sequences = options.prompts * options.samples
    engine = NativeEngine(
        model,
        EngineLimits(
            max_num_seqs=num_sequences,
            max_prompt_tokens=options.prompt_tokens,
            max_response_tokens=options.new_tokens,
            max_prefill_tokens=16384,
            max_cache_bytes=60 << 30,
            steps_per_visit=options.steps_per_visit,
        ),
        eos_token_ids=[0],
    )
    sizes = (options.prompts, options.prompt_tokens, options.samples, options.new_tokens)
    first, _ = timed(lambda: engine.generate_batch(requests(*sizes, seed=0)))
    torch.cuda.reset_peak_memory_stats()
    seconds, outputs, batch = [], [], []
    for repeat in range(options.repeats):
        batch = requests(*sizes, seed=repeat + 1)
        elapsed, outputs = timed(lambda batch=batch: engine.generate_batch(batch))
        seconds.append(elapsed)
    prefill, _ = timed(lambda: engine.generate_batch(requests(*sizes[:3], 1, seed=9)))
    num_tokens = num_sequences * options.new_tokens
    result = {
        "shape": options.shape,
        "fused": fused,
        "batch": type(engine.batch).__name__,
        "sequences": num_sequences,
        "first_seconds": first,
        "seconds": seconds,
        "prefill_seconds": prefill,
        "tokens_per_second": num_tokens / statistics.median(seconds),
        "decode_ms_per_step": 1e3 * (statistics.median(seconds) - prefill) / options.new_tokens,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "training_difference": training_difference(model, batch[0], outputs[0]),
        "ceilings": ceilings(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name(),
    }
    if options.hf:
        del engine
        torch.cuda.empty_cache()
        hugging_face(model, batch, 8)
        elapsed, _ = timed(lambda: hugging_face(model, batch, options.new_tokens))
        result["hf_generate_tokens_per_second"] = num_tokens / elapsed
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    main()
