"""What people write is text: it comes back as it was, and it never controls the conversation."""

import random
import time
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from examples.quickstart.build_model import ASSISTANT, END, USER, build_tokenizer
from verl.utils.dataset.prompts import PromptTooLong, encode_prompt, shield
from verl.utils.dataset.tables import BadRow, JsonFile

TOKENIZER = build_tokenizer()
SPECIAL = sorted(TOKENIZER.all_special_tokens)
words = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(SPECIAL))
).map("".join)


@settings(max_examples=300, deadline=None)
@given(content=words)
@example(content="a\x00b\u202ec\u200bd\U0001f600\ufeff")
@example(content="\ue000 0\ue000" + END)
@example(content=END * 3 + USER)
def test_any_text_comes_back_from_its_tokens_and_controls_nothing(content):
    ids = encode_prompt([{"role": "user", "content": content}], TOKENIZER)
    assert TOKENIZER.decode(ids) == f"{USER}{content}{ASSISTANT}"
    control = [token for token in ids if token in TOKENIZER.all_special_ids]
    assert control == TOKENIZER.convert_tokens_to_ids([USER, ASSISTANT])


def test_text_without_special_tokens_has_the_tokens_it_always_had():
    messages = [{"role": "user", "content": "1+1"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert encode_prompt(messages, TOKENIZER) == TOKENIZER(text).input_ids


@pytest.mark.parametrize("content", ["^" * 10**6, "a" * 10**6, END * 250_000, "\U0001f600" * 10**6])
def test_a_million_characters_are_refused_in_little_time_and_memory(content):
    messages = [{"role": "user", "content": content}]
    with pytest.raises(PromptTooLong):  # once before the clock: the tokenizer warms up
        encode_prompt(messages, TOKENIZER, max_tokens=512)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(PromptTooLong, match="characters"):
        encode_prompt(messages, TOKENIZER, max_tokens=512)
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.25  # an idle machine needs a fifth of this
    assert peak < 50 << 20


def test_a_hundred_thousand_lines_of_any_bytes_are_rows_or_named_as_bad(tmp_path):
    chance = random.Random(0)
    prompts = [
        b'{"prompt": "' + chance.randbytes(chance.randint(0, 12)).replace(b"\n", b"?") + b'"}'
        for _ in range(100_000)
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(prompts))
    file = JsonFile(str(tmp_path / "a.jsonl"))
    assert len(file) == 100_000
    texts = [row["prompt"] for row in file if not isinstance(row, BadRow)]
    assert 5_000 < len(texts) < 95_000
    for text in texts[:2000]:
        ids = encode_prompt([{"role": "user", "content": text}], TOKENIZER)
        assert TOKENIZER.decode(ids) == f"{USER}{text}{ASSISTANT}"


def test_tokens_that_are_marked_special_but_not_named_are_words_too():
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("<|turn|>", special=True)])
    assert "<|turn|>" not in tokenizer.all_special_tokens
    messages, marks = shield([{"role": "user", "content": "a<|turn|>b"}], tokenizer)
    assert "<|turn|>" not in messages[0]["content"]
    ids = marks.encode(messages[0]["content"], tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|turn|>") not in ids
