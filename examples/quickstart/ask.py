"""Ask the trained model: `python examples/quickstart/ask.py MODEL_FOLDER '5071*4' ...`

The folder is an ordinary Hugging Face model; nothing of verl is needed to use it.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def ask(folder: str, questions: list[str]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**prompt, max_new_tokens=64, do_sample=False)
        start = prompt["input_ids"].shape[1]
        answers.append(tokenizer.decode(output[0, start:], skip_special_tokens=True))
    return answers


if __name__ == "__main__":
    model_folder, *asked = sys.argv[1:]
    for one, answer in zip(asked, ask(model_folder, asked), strict=True):
        print(f"{one}\n{answer}\n")
