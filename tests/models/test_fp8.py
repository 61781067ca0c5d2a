"""Linear layers in fp8: what they compute, which layers they cover, and when a layer stays out."""

import pytest
import torch
import torch.nn.functional as F

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import LIMITS, request, training_log_probs
from verl.models.experts import expert_modules
from verl.models.fp8 import (
    E4M3,
    Fp8Linears,
    fp8_grouped_product,
    fp8_product,
    reference_quantize_rows,
)
from verl.models.routing import generation_pass
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.cache import as_stored
from verl.workers.rollout.native.engine import NativeEngine


def test_a_row_is_scaled_so_that_its_largest_number_is_448():
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    quantized, scale = reference_quantize_rows(x)
    assert quantized.dtype == E4M3
    assert quantized[0].float().tolist() == [224.0, -448.0, 112.0, 0.0]
    assert scale[0].item() == pytest.approx(2 / 448)
    assert not quantized[1].float().any()


def test_the_product_is_that_of_the_rounded_numbers():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 32, generator=generator), torch.randn(16, 32, generator=generator)
    bias = torch.randn(16, generator=generator)
    (x8, xs), (w8, ws) = reference_quantize_rows(x), reference_quantize_rows(weight)
    actual = fp8_product(x[None], w8, ws, bias)[0].double()
    expected = (x8.double() * xs.double()) @ (w8.double() * ws.double()).t() + bias.double()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    error = (actual - F.linear(x, weight, bias).double()).norm() / F.linear(x, weight).norm()
    assert 0.01 < error < 0.06, "it is rounded, to three bits of mantissa"


def fp8_engine(model):
    return NativeEngine(model, LIMITS, eos_token_ids=[2], quantization="fp8")


def generate(engine, prompt=(5, 6, 7), max_tokens=12):
    params = SamplingParams(max_tokens=max_tokens, seed=4)
    return engine.generate_batch([request(list(prompt), params, "0")])[0][0]


def test_generation_is_quantized_and_training_is_not():
    model = tiny_model("qwen3")
    before = training_log_probs(model, [5, 6, 7], [8, 9])
    output = generate(fp8_engine(model))
    assert torch.equal(training_log_probs(model, [5, 6, 7], [8, 9]), before)
    trained = training_log_probs(model, [5, 6, 7], output.token_ids)
    difference = (torch.tensor(output.log_probs) - trained).abs()
    assert 1e-3 < difference.mean() < 0.3


def test_the_log_probs_are_those_of_the_rounded_model():
    """A twin whose layers are rounded by hand gives the same numbers."""
    model, twin = tiny_model("qwen3"), tiny_model("qwen3")
    output = generate(fp8_engine(model))
    for name, module in twin.named_modules():
        if type(module) is torch.nn.Linear and "lm_head" not in name:
            w8, ws = reference_quantize_rows(module.weight.detach().to(torch.bfloat16))
            module.forward = lambda x, w8=w8, ws=ws: fp8_product(x, w8, ws, None)
    expected = training_log_probs(twin, [5, 6, 7], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)


def test_an_update_is_followed():
    model, other = tiny_model("qwen3"), tiny_model("qwen3", scale=0.15)
    engine = fp8_engine(model)
    first = generate(engine)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(new)
    second = generate(engine)
    assert second.log_probs != first.log_probs
    assert second.log_probs == generate(fp8_engine(other)).log_probs


def test_the_audit_lists_every_matrix_with_its_format():
    model = tiny_model("qwen3_moe")
    engine = fp8_engine(model)
    generate(engine)
    lines = {line.name: line for line in engine.core.quantized.audit()}
    assert lines["model.layers.0.self_attn.q_proj"].format == "fp8"
    assert 0 < lines["model.layers.0.self_attn.q_proj"].error < 0.08
    assert lines["model.embed_tokens.weight"].format == "float32"
    assert lines["model.layers.1.mlp.experts.down_proj"].format == "fp8"
    assert 0 < lines["model.layers.1.mlp.experts.down_proj"].error < 0.08
    assert lines["model.layers.0.mlp.gate.weight"].format == "float32", "a router is not quantized"
    total = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert sum(line.num_weights for line in lines.values()) == total


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])  # the latter is transposed
def test_experts_compute_with_rounded_weights_and_rows(model_type):
    """A twin whose experts are rounded by hand gives the same numbers."""
    model, twin = tiny_model(model_type, scale=0.1), tiny_model(model_type, scale=0.1)
    output = generate(fp8_engine(model))
    for name, module in twin.named_modules():
        if type(module) is torch.nn.Linear and "lm_head" not in name:
            w8, ws = reference_quantize_rows(module.weight.detach().to(torch.bfloat16))
            module.forward = lambda x, w8=w8, ws=ws, m=module: fp8_product(x, w8, ws, m.bias)
    for experts in expert_modules(twin).values():
        vars(experts)["low_precision"] = {
            leaf: RoundedByHand(getattr(experts, leaf), experts.is_transposed)
            for leaf in ("gate_up_proj", "down_proj")
        }
    expected = training_log_probs(twin, [5, 6, 7], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-4)
    trained = training_log_probs(model, [5, 6, 7], output.token_ids)
    assert (torch.tensor(output.log_probs) - trained).abs().mean() > 1e-4


class RoundedByHand:
    """A tensor of experts whose weights and rows are rounded, one row at a time."""

    is_used = True

    def __init__(self, weight, is_transposed):
        weight = weight.detach().to(torch.bfloat16).float()
        self.weight = weight.transpose(1, 2) if is_transposed else weight

    def __call__(self, rows, ends):
        outputs, expert = [], 0
        for number, row in enumerate(rows):
            while number >= ends[expert]:
                expert += 1
            (x8, xs), (w8, ws) = map(reference_quantize_rows, (row[None], self.weight[expert]))
            outputs.append((x8.float() * xs) @ (w8.float() * ws).t())
        return torch.cat(outputs)


@pytest.mark.gpu
def test_grouped_fp8_products_on_a_gpu_are_those_of_plain_torch():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(70, 64, generator=generator).bfloat16()
    weight = torch.randn(4, 48, 64, generator=generator).bfloat16()
    ends = torch.tensor([17, 17, 40, 64], dtype=torch.int32)
    w8, scale = reference_quantize_rows(weight.flatten(0, 1))
    arguments = rows, w8.view(4, 48, 64), scale.view(4, 48, 1), ends
    expected = fp8_grouped_product(*arguments)[:64]
    found = fp8_grouped_product(*(x.cuda() for x in arguments))[:64].cpu()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_an_engine_generates_with_experts_in_fp8_on_a_gpu():
    model = tiny_model("qwen3_moe", scale=0.1).to("cuda", torch.bfloat16)
    engine = fp8_engine(model)
    output = generate(engine)
    lines = {line.name: line for line in engine.core.quantized.audit()}
    assert lines["model.layers.1.mlp.experts.down_proj"].format == "fp8"
    trained = training_log_probs(model, [5, 6, 7], output.token_ids).cpu()
    assert (torch.tensor(output.log_probs) - trained).abs().mean() < 0.3


def test_a_layer_above_the_budget_stays_as_it_is(caplog):
    model = tiny_model("qwen3")
    quantized = Fp8Linears(model, budget=0.0)
    with generation_pass():
        quantized.refresh(
            lambda ids: [
                m(torch.randn(3, 32)) for m in quantized.matrices if m.source().shape[1] == 32
            ]
        )
    assert not any(matrix.is_on for matrix in quantized.matrices)
    assert "off by" in quantized.matrices[0].reason
    assert "stays in float32" in caplog.text


def test_exact_mode_and_fp8_exclude_each_other():
    from verl.models.exact import make_exact

    with pytest.raises(ValueError, match=r"exact=False"):
        fp8_engine(make_exact(tiny_model("qwen3"), 64))


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "deepseek_v3"])
def test_keys_and_values_in_fp8_take_half_the_memory_and_change_little(model_type):
    model = tiny_model(model_type, scale=0.1)
    engines = [
        NativeEngine(model, LIMITS, eos_token_ids=[2], kv_cache_dtype=name)
        for name in ("auto", "fp8")
    ]
    sizes = [engine.core.cache.shape.bytes_per_token for engine in engines]
    assert sizes[0] == 4 * sizes[1], "one byte instead of four on a CPU"
    output = generate(engines[1])
    trained = training_log_probs(model, [5, 6, 7], output.token_ids)
    difference = (torch.tensor(output.log_probs) - trained).abs()
    assert 1e-6 < difference[1:].max() < 0.1
    assert difference[0] < 1e-5, "the first token attends to keys as they were computed"


def test_a_conversation_goes_on_from_keys_in_fp8():
    model = tiny_model("qwen3", scale=0.1)
    engine = NativeEngine(model, LIMITS, eos_token_ids=[2], kv_cache_dtype="fp8")
    params = SamplingParams(max_tokens=4, seed=4)
    ids = [5, 6, 7]
    for number in range(3):
        turn = GenerationRequest(
            request_id=str(number), prompt_ids=ids, params=params, session_ids=("s",)
        )
        (output,) = engine.generate_batch([turn])[0]
        trained = training_log_probs(model, ids, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), trained, rtol=0, atol=0.1)
        ids = [*ids, *output.token_ids, 20, 21]
    assert engine.core.num_prefilled_tokens < 3 + len(ids)


def test_larger_keys_than_e4m3_has_become_its_largest():
    assert as_stored(torch.tensor([1e4, -1e4, 1.0]), E4M3).float().tolist() == [448, -448, 1]
