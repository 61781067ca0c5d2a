import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from examples.quickstart.build_model import build_tokenizer
from verl.config.sft import SFTEngineDataConfig
from verl.trainer.sft.batches import lay_out
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator
from verl.utils.dataset.multiturn_sft_dataset import (
    MultiTurnSFTDataset,
    TemplateMismatch,
    encode_conversation,
)
from verl.utils.dataset.prompts import encode_prompt, set_chat_template

TOKENIZER = build_tokenizer()

# The shape of Qwen 3's: turns end with a special token and a line break, tools come first, thinking
# is written for the answers after the last question only.
THINKING = (
    "{% if tools %}<|user|>tools:{% for tool in tools %}{{ tool['function']['name'] }};{% endfor %}"
    "</s>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% if loop.index0 > ns.last and m['reasoning_content'] %}"
    "<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call['function']['name'] }}</call>{% endfor %}"
    "</s>\n"
    "{% else %}<|user|>{{ m['role'][0] }}:{{ m['content'] }}</s>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def tokenizer(template=None):
    made = build_tokenizer()
    if template is not None:
        made.chat_template = template
    return made


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def trained(conversation, made):
    """The trained text, turn by turn."""
    turns, before = [], 0
    for token, is_trained in zip(conversation.input_ids, conversation.loss_mask, strict=True):
        if is_trained and not before:
            turns.append([])
        if is_trained:
            turns[-1].append(token)
        before = is_trained
    return [made.decode(turn) for turn in turns]


def whole(conversation, made):
    return made.decode(conversation.input_ids)


# ---- which tokens --------------------------------------------------------------------------------


def test_every_assistant_turn_is_trained_with_its_end_and_nothing_else():
    made = tokenizer()
    conversation = encode_conversation(chat("1", "22", "3", "4"), made)
    assert whole(conversation, made) == "<|user|>1<|assistant|>22</s><|user|>3<|assistant|>4</s>"
    assert conversation.loss_mask == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert trained(conversation, made) == ["22</s>", "4</s>"]


def test_the_tokens_are_those_of_the_whole_conversation():
    made = tokenizer()
    messages = chat("eins", "zwei", "drei", "vier")
    ids = made(made.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    assert encode_conversation(messages, made).input_ids == ids["input_ids"]


def test_the_line_break_after_an_end_token_is_not_trained():
    made = tokenizer(THINKING)
    conversation = encode_conversation(chat("1", "2", "3", "4"), made)
    assert trained(conversation, made) == ["2</s>", "4</s>"]


def test_thinking_and_tool_calls_are_trained_and_tool_results_are_not():
    made = tokenizer(THINKING)
    call = {"type": "function", "function": {"name": "calc", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two", "reasoning_content": "so"},
    ]
    tools = [{"type": "function", "function": {"name": "calc"}}]
    conversation = encode_conversation(messages, made, tools=tools)
    assert whole(conversation, made).startswith("<|user|>tools:calc;</s>\n<|user|>u:1+1?</s>\n")
    assert trained(conversation, made) == [
        "<think>hm</think><call>calc</call></s>",
        "<think>so</think>two</s>",
    ]


def test_what_the_prompt_already_says_is_not_trained():
    made = tokenizer(THINKING.replace("{{ m['content'] }}", "<think></think>{{ m['content'] }}", 1))
    messages = chat("1", "2")
    without = encode_conversation(messages, made, template_kwargs={"enable_thinking": False})
    assert trained(without, made) == ["2</s>"]
    default = encode_conversation(messages, made)
    assert trained(default, made) == ["<think></think>2</s>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_or_accepted_on_request():
    made = tokenizer(THINKING)
    messages = chat("1", "2", "3", "4")
    messages[1]["reasoning_content"] = "hm"  # written only while this is the last answer
    with pytest.raises(TemplateMismatch, match=r"message 1: .*<think>hm.*ignore_input_ids_mismatc"):
        encode_conversation(messages, made)
    accepted = encode_conversation(messages, made, accepts_mismatch=True)
    assert trained(accepted, made) == ["2</s>", "4</s>"]


def test_a_token_that_reaches_over_the_border_of_a_turn_is_refused():
    made = merging_tokenizer()
    assert trained(encode_conversation(chat("1", "b"), made), made) == ["b</s>"]
    with pytest.raises(TemplateMismatch, match="message 1: a token reaches over the border"):
        encode_conversation(chat("1", "a"), made)  # ":" and "a" are one token
    accepted = encode_conversation(chat("1", "ab"), made, accepts_mismatch=True)
    assert trained(accepted, made) == ["b</s>"]


def merging_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<|user|>", "<|assistant|>", "</s>", *alphabet, ":a"]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges=[(":", "a")])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=(
            "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
            "{% else %}<|assistant|>:{{ m['content'] }}</s>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>:{% endif %}"
        ),
    )


def test_special_tokens_in_what_people_wrote_are_words_in_the_conversation_too():
    made = tokenizer()
    conversation = encode_conversation(chat("end </s><|assistant|>x", "is </s> so"), made)
    assert conversation.input_ids.count(made.eos_token_id) == 1
    assert trained(conversation, made) == ["is </s> so</s>"]


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
pieces = st.lists(st.one_of(words, st.sampled_from(["</s>", "<|user|>"])), max_size=3).map("".join)


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(pieces, min_size=2, max_size=6))
def test_whatever_is_said_the_assistants_words_are_trained_and_the_prompts_are_those_of_a_rollout(
    contents,
):
    messages = chat(*contents)
    conversation = encode_conversation(messages, TOKENIZER)
    answers = [message["content"] for message in messages[1::2]]
    assert trained(conversation, TOKENIZER) == [f"{answer}</s>" for answer in answers]
    for turn in range(1, len(messages), 2):
        prompt = encode_prompt(messages[:turn], TOKENIZER)
        assert conversation.input_ids[: len(prompt)] == prompt
        assert conversation.loss_mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_the_built_in_template_trains_answers_and_their_ends():
    made = tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    set_chat_template(made, "chatml")
    messages = [{"role": "system", "content": "be kind"}, *chat("hi", "hello", "bye", "see you")]
    conversation = encode_conversation(messages, made)
    assert trained(conversation, made) == ["hello<|im_end|>", "see you<|im_end|>"]


# ---- the dataset ---------------------------------------------------------------------------------


def write(tmp_path, rows, name="rows.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def dataset(tmp_path, rows, made=None, **options):
    config = SFTEngineDataConfig(**{"max_length": 64, **options})
    return MultiTurnSFTDataset(write(tmp_path, rows), made or tokenizer(), config)


def test_rows_have_their_own_length_or_are_padded_on_the_right(tmp_path):
    rows = [{"messages": chat("1", "2")}]
    plain = dataset(tmp_path, rows)[0]
    assert plain["loss_mask"].tolist() == [0, 0, 0, 1, 1]
    assert plain["position_ids"].tolist() == [0, 1, 2, 3, 4]
    padded = dataset(tmp_path, rows, pad_mode="right", max_length=8)[0]
    assert padded["attention_mask"].tolist() == [1] * 5 + [0] * 3
    assert padded["input_ids"].tolist() == plain["input_ids"].tolist() + [0] * 3
    assert padded["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


def test_columns_are_found_by_name_at_the_top_or_in_the_multiturn_section(tmp_path):
    file = write(tmp_path, [{"turns": chat("1", "2")}])
    for config in (
        {"messages_key": "turns"},
        OmegaConf.create({"multiturn": {"enable": True, "messages_key": "turns"}}),
    ):
        assert len(MultiTurnSFTDataset(file, tokenizer(), config)) == 1


def test_tools_may_be_json_text_and_thinking_is_switched_by_the_row(tmp_path):
    made = tokenizer(THINKING)
    tools = [{"type": "function", "function": {"name": "calc"}}]
    rows = [
        {"messages": chat("1", "2"), "tools": json.dumps(tools), "enable_thinking": None},
        {"messages": chat("1", "2"), "tools": tools, "enable_thinking": None},
    ]
    data = dataset(tmp_path, rows, made)
    assert torch.equal(data[0]["input_ids"], data[1]["input_ids"])
    assert "tools:calc;" in made.decode(data[0]["input_ids"])


def test_a_row_that_cannot_be_trained_is_named_before_the_first_step(tmp_path, caplog):
    good = [{"messages": chat("1", "2")}] * 200
    bad = {
        "nobody answers": {"messages": chat("1")},
        "begins with the assistant": {"messages": [{"role": "assistant", "content": "1"}]},
        "tools are no JSON": {"messages": chat("1", "2"), "tools": "{"},
    }
    for number, row in enumerate(bad.values()):
        data = dataset(tmp_path, [*good, row])
        assert len(data) == 200
        assert caplog.text.count("rows.jsonl:201: ") == number + 1
    for reason in ("no turn of the assistant", "begins with the assistant", "no JSON"):
        assert reason in caplog.text
    with pytest.raises(ValueError, match=r"1 of 1 rows are bad(.|\n)*rows.jsonl:1: "):
        dataset(tmp_path, [bad["nobody answers"]])


def test_a_template_that_refuses_a_conversation_makes_it_a_bad_row(tmp_path):
    made = tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses the conversation: roles must alternate"):
        dataset(tmp_path, [{"messages": chat("1", "2")}], made)


def test_long_conversations_are_refused_by_name_or_cut(tmp_path):
    rows = [{"messages": chat("1", "2")}, {"messages": chat("1234", "5678")}]
    with pytest.raises(NotImplementedError, match=r"rows.jsonl:2 has 11 tokens.*max_length=8"):
        dataset(tmp_path, rows, max_length=8)
    left = dataset(tmp_path, rows, max_length=8, truncation="left")[1]
    assert tokenizer().decode(left["input_ids"]) == "34<|assistant|>5678</s>"
    right = dataset(tmp_path, rows, max_length=8, truncation="right")[1]
    assert tokenizer().decode(right["input_ids"]) == "<|user|>1234<|assistant|>56"
    assert right["loss_mask"].tolist() == [0] * 6 + [1, 1]


def test_a_row_without_a_trained_token_is_laid_out_with_an_empty_mask(tmp_path):
    row = dataset(tmp_path, [{"messages": chat("1234", "5")}], max_length=3, truncation="right")[0]
    batch = lay_out([row])
    assert batch["response_mask"].sum() == 0
    assert batch["input_ids"].shape == (1, 4)


def test_a_template_that_does_not_end_turns_is_noticed(tmp_path, caplog):
    dataset(tmp_path, [{"messages": chat("1", "2")}])
    assert caplog.text == ""
    endless = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    opening = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    dataset(tmp_path, [{"messages": chat("1", "2")}], tokenizer(endless + opening))
    assert "the assistant's turn ends with '2', which is no special token" in caplog.text


# ---- batches -------------------------------------------------------------------------------------


def test_rows_without_padding_become_jagged_columns():
    rows = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 4, 5])}]
    batch = SFTTensorCollator(DatasetPadMode.NO_PADDING)(rows)
    assert batch["input_ids"].is_nested
    assert [part.tolist() for part in batch["input_ids"].unbind()] == [[1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match=r"'input_ids' have the shapes .*pad_mode=right"):
        SFTTensorCollator("right")(rows)


def test_padded_rows_are_stacked_and_other_values_become_objects():
    rows = [{"input_ids": torch.tensor([1, 2]), "note": "a"}, {"input_ids": torch.tensor([3, 4])}]
    batch = SFTTensorCollator(DatasetPadMode.RIGHT)(rows)
    assert batch["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert batch["note"].tolist() == ["a", None]
