"""What follows a turn is what the chat template writes there, whatever the model has said."""

import json
import random

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.templates import (
    TEMPLATES,
    TOOL,
    fuzzed_text,
    template_tokenizer,
    trl_templates,
)
from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils.dataset.continuation import CannotContinue, Continuation
from verl.utils.dataset.prompts import render, shield
from verl.utils.template_probe import REFUSALS

REFUSED = {
    "cohere": "roles must alternate",
    "cohere2": "roles must alternate",
    "deepseek_r1_distill": "must not depend on what came before",
    "deepseekv3": "must not depend on what came before",
    "gemma": "roles must alternate",
    "gemma3": "roles must alternate",
    "llava_next": "refuses messages of role tool",
    "phi3": "leaves out a message of role 'tool'",
    "phi3_5": "leaves out a message of role 'tool'",
}
"""Templates that cannot be told the reply of a tool, and why."""


def continuation(name, template, with_tools):
    return Continuation(template_tokenizer(name, template), tools=[TOOL] if with_tools else None)


def conversations(seed):
    """Turns of the model (text, number of calls) and the messages that follow each."""
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 4)):
        yield rng, rng.choice(["user", "tool"]), rng.randrange(1, 3)


def mismatch(name, template, seed):
    """The first turn whose continuation is not what the template writes in the real conversation;
    the reason where the template refuses such a conversation; None where all is well."""
    tokenizer = template_tokenizer(name, template)
    with_tools = seed % 3 > 0
    follow = continuation(name, template, with_tools)
    history = [{"role": "user", "content": "Guess a number."}]
    for turn, (rng, role, num_replies) in enumerate(conversations(seed)):
        nonce = f"nonce{turn}end"
        text = rng.choice(["", "<think>hm\n</think>\n\n"]) + fuzzed_text(rng, tokenizer) + nonce
        said = {"role": "assistant", "content": text}
        replies = [{"role": "user", "content": fuzzed_text(rng, tokenizer)}]
        if role == "tool" and with_tools:
            ids = [f"call{turn:04d}{n}" for n in range(num_replies)]
            call = {"name": "guess", "arguments": {"n": nonce}}
            content = "" if "gemma" in name else rng.choice(["", fuzzed_text(rng, tokenizer)])
            if "tool_calls" not in template:
                content = text
            said = {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"type": "function", "id": one, "function": call} for one in ids],
            }
            replies = [
                {
                    "role": "tool",
                    "content": fuzzed_text(rng, tokenizer),
                    "name": "guess",
                    "tool_call_id": one,
                }
                for one in ids
            ]
        history += [said, *replies]
        try:
            after_end = follow.ids_after_turn(None, replies)
        except CannotContinue as error:
            return str(error)
        written = real_text(history, tokenizer, follow)
        if written is None:
            return None
        expected = written.rpartition(nonce)[2]
        appended = tokenizer.decode(after_end)
        closing = expected.removesuffix(appended)
        cut = follow.ids_after_turn([5], replies)
        cut_off = tokenizer.decode(cut)
        if not expected.endswith(appended) or not expected.endswith(cut_off):
            raise AssertionError((name, seed, turn, expected, appended, cut_off))
        if replies[0]["role"] == "user":
            assert closing + appended == cut_off, (name, seed, turn)
        end = cut[: len(cut) - len(after_end)]
        assert follow.ids_after_turn([5, *end], replies) == after_end, (name, seed, turn)
    return None


def real_text(history, tokenizer, follow):
    """The whole conversation as the template writes it, special words included; None if it takes no
    such conversation."""
    shielded, marks = shield(history, tokenizer)
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in shielded]
    arguments = [{**m, **as_text(m)} for m in shielded]
    for form in (shielded, arguments, parts):
        try:
            text = render(form, tokenizer, add_generation_prompt=True, tools=follow.tools)
        except REFUSALS:
            continue
        if "nonce" in text:
            for mark, word in marks.texts.items():
                text = text.replace(mark, word)
            return text
    return None


def as_text(message):
    """Calls with their arguments as text."""
    if "tool_calls" not in message:
        return {}
    calls = json.loads(json.dumps(message["tool_calls"]))
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return {"tool_calls": calls}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_continuation_is_what_the_template_writes(name):
    for seed in range(30):
        assert mismatch(name, TEMPLATES[name], seed) is None


def test_a_turn_keeps_the_end_it_has():
    user = [{"role": "user", "content": "low"}]
    cases = {
        "chatml": ("word", "<|im_end|>", ["\n<|im_start|>user\nlow<|im_end|>"]),
        "ends_with_the_next": ("word", "", ["<|user|>\nlow"]),
        "returns_last": ("word", "<|end|>", ["<|start|>user<|message|>low<|end|>"]),
        "two_ends": ("word", "<|said|><|done|>", ["<|turn|>user\nlow<|done|>"]),
    }
    for name, (word, end, (rest,)) in cases.items():
        tokenizer = template_tokenizer(name, TEMPLATES[name])
        follow = Continuation(tokenizer)

        def after(text, follow=follow, tokenizer=tokenizer, **kwargs):
            ids = tokenizer.encode(text, add_special_tokens=False)
            return tokenizer.decode(follow.ids_after_turn(ids, user, **kwargs))

        assert after(word).startswith(end + rest), name
        assert after(word + end).startswith(rest), name
        # Another token that ended the turn stands for the template's own.
        assert after(word + tokenizer.eos_token).startswith(rest), name
        assert after(word, has_ended=True).startswith(rest), name
    tokenizer = template_tokenizer("returns_last", TEMPLATES["returns_last"])
    returned = tokenizer.encode("word<|return|>", add_special_tokens=False)
    ids = Continuation(tokenizer).ids_after_turn(returned, user)
    assert tokenizer.decode(ids).startswith("<|start|>user")
    tokenizer = template_tokenizer("two_ends", TEMPLATES["two_ends"])
    half = tokenizer.encode("word<|said|>", add_special_tokens=False)
    ids = Continuation(tokenizer).ids_after_turn(half, user)
    assert tokenizer.decode(ids).startswith("<|done|><|turn|>user")
    tokenizer = template_tokenizer("ends_with_the_next", TEMPLATES["ends_with_the_next"])
    next_begun = tokenizer.encode("word<|user|>", add_special_tokens=False)
    ids = Continuation(tokenizer).ids_after_turn(next_begun, user)
    assert tokenizer.decode(ids) == "\nlow<|assistant|>"


REFUSALS_OF = {
    "no template": (None, "user", "no chat template"),
    "leaves tools out": (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}",
        "tool",
        "leaves out a message of role 'tool'",
    ),
    "raises": (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}<|end|>{% endfor %}",
        "tool",
        "no tools",
    ),
    "counts turns": (
        "{% for m in messages %}{{ loop.index }}{{ m.content }}<|end|>{% endfor %}",
        "user",
        "must not depend",
    ),
    "repeats the turn": (
        "{% for m in messages %}{% if loop.last %}{{ messages[1].content }}{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}",
        "user",
        "must not depend|leaves out",
    ),
}


def test_a_token_across_the_border_is_refused():
    tokenizer = template_tokenizer("merges", "{% for m in messages %}{{ m.content }}! {% endfor %}")
    vocabulary = {"Q": 0, "!": 1, "Q!": 2, "?": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [("Q", "!")], unk_token="?")),
        chat_template=tokenizer.chat_template,
    )
    with pytest.raises(CannotContinue, match="a token reaches across"):
        Continuation(tokenizer).prove("user")


@pytest.mark.parametrize("why", REFUSALS_OF)
def test_what_cannot_be_proven_is_refused_at_the_start(why):
    template, role, message = REFUSALS_OF[why]
    tokenizer = tiny_tokenizer() if template is None else template_tokenizer(why, template)
    with pytest.raises(CannotContinue, match=message):
        Continuation(tokenizer).prove(role)


def fuzz(templates, num_conversations):
    """The families of templates that refused something, with the reason; raises at a mismatch."""
    refused = {}
    for seed in range(num_conversations):
        name = list(templates)[seed % len(templates)]
        reason = mismatch(name, templates[name], seed // len(templates))
        if reason is not None:
            refused[name.removesuffix("_training")] = reason
    return refused


needs_templates = pytest.mark.skipif(
    not trl_templates(), reason="the chat templates of trl are not in build/trl"
)


def check_real_templates(templates, num_conversations):
    for name, template in templates.items():
        continuation(name, template, False).prove("user")
        reason = REFUSED.get(name.removesuffix("_training"))
        if reason is None:
            continuation(name, template, True).prove("tool")
        else:
            with pytest.raises(CannotContinue, match=reason):
                continuation(name, template, True).prove("tool")
    refused = fuzz(templates, num_conversations)
    assert refused.keys() <= REFUSED.keys()


@needs_templates
def test_templates_of_real_models():
    names = ("gptoss", "gemma4", "glm4moe", "llama3_1", "phi3", "qwen3", "deepseekv3", "smolvlm")
    check_real_templates({name: trl_templates()[name] for name in names}, 100)


@needs_templates
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_conversations_of_real_templates():
    check_real_templates(trl_templates(), 10_000)
