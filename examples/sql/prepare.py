"""A made-up world in three tables, questions about it, and SmolLM2 with a template for tools.

python examples/sql/prepare.py --out runs/sql --model runs/smollm2/model

world.db          country(name, continent), city(name, country, people), river(name, country, km)
model/            the model of examples/smollm2, with a chat template that shows tools
tools.yaml        the tool `sql`, read-only, at this database
sft.parquet       conversations: a query, its rows, the answer
train.parquet     questions for reinforcement learning, with their right answers
test.parquet      further questions
"""

import argparse
import json
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import yaml
from sql_tool import SCHEMA
from transformers import AutoTokenizer

NUM_COUNTRIES, NUM_CITIES, NUM_RIVERS = 24, 240, 120
NUM_SHOWN, NUM_TRAIN, NUM_TEST = 256, 512, 64
CONTINENTS = ("Arda", "Bora", "Cela", "Dira")
SYSTEM = (
    "Answer with the database. Tables: country(name, continent), city(name, country, people), "
    'river(name, country, km). To query it, write <tool_call>{"name": "sql", "arguments": '
    '{"query": "SELECT ..."}}</tool_call>. Then write Answer: and the answer.'
)
QUESTIONS = (
    ("How many people live in {city}?", "SELECT people FROM city WHERE name = '{city}'"),
    ("How long is the river {river}?", "SELECT km FROM river WHERE name = '{river}'"),
    ("How many cities has {country}?", "SELECT COUNT(*) FROM city WHERE country = '{country}'"),
    (
        "Which is the longest river of {country}?",
        "SELECT name FROM river WHERE country = '{country}' ORDER BY km DESC LIMIT 1",
    ),
    (
        "On which continent is {city}?",
        "SELECT continent FROM country JOIN city ON city.country = country.name "
        "WHERE city.name = '{city}'",
    ),
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- if loop.first and tools -%}
{{ '\\nTools:' }}{% for tool in tools %}{{ '\\n' + tool['function'] | tojson }}{% endfor %}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def make_world(path: Path, rng: random.Random) -> dict[str, list[str]]:
    """Write the database; give the names of each kind that questions may be about."""
    names = make_names(NUM_COUNTRIES + NUM_CITIES + NUM_RIVERS, rng)
    countries, cities = names[:NUM_COUNTRIES], names[NUM_COUNTRIES:-NUM_RIVERS]
    rivers = names[-NUM_RIVERS:]
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE country (name TEXT PRIMARY KEY, continent TEXT);"
        "CREATE TABLE city (name TEXT PRIMARY KEY, country TEXT, people INTEGER);"
        "CREATE TABLE river (name TEXT PRIMARY KEY, country TEXT, km INTEGER);"
    )
    tables = {
        "country": [(name, rng.choice(CONTINENTS)) for name in countries],
        "city": [(name, rng.choice(countries), rng.randint(1000, 99999)) for name in cities],
        "river": [
            (name, countries[i % NUM_COUNTRIES], km)
            for i, (name, km) in enumerate(
                zip(rivers, rng.sample(range(100, 3000), NUM_RIVERS), strict=True)
            )
        ],
    }
    for table, rows in tables.items():
        places = ", ".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
    connection.commit()
    connection.close()
    return {"country": countries, "city": cities, "river": rivers}


def make_names(count: int, rng: random.Random) -> list[str]:
    parts = (
        ["B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z"],
        ["a", "e", "i", "o", "u"],
    )
    names: dict[str, None] = {}
    while len(names) < count:
        start, end = rng.choice(parts[0]), rng.choice(parts[0]).lower()
        names[f"{start}{rng.choice(parts[1])}{rng.choice(parts[0]).lower()}o{end}a"] = None
    return list(names)


def make_questions(world: dict[str, list[str]], path: Path) -> list[tuple[str, str, str]]:
    """(question, query, answer) of every kind and name; the answers are the database's."""
    connection = sqlite3.connect(path)
    made = []
    for question, query in QUESTIONS:
        kind = next(kind for kind in world if f"{{{kind}}}" in question)
        for name in world[kind]:
            sql = query.format(**{kind: name})
            answer = str(connection.execute(sql).fetchone()[0])
            made.append((question.format(**{kind: name}), sql, answer))
    connection.close()
    return made


def messages_of(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def demonstration(question: str, query: str, answer: str) -> dict[str, Any]:
    call = json.dumps({"name": "sql", "arguments": {"query": query}})
    turns = [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": f"Answer: {answer}"},
    ]
    return {"messages": [*messages_of(question), *turns], "tools": json.dumps([SCHEMA])}


def rl_row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "sql",
        "agent_name": "tool_agent",
        "prompt": messages_of(question),
        "ability": "sql",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def prepare(folder: Path, seed: int) -> None:
    """World, tool and questions."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "world.db"
    questions = make_questions(make_world(database, rng), database)
    rng.shuffle(questions)
    shown, rest = questions[:NUM_SHOWN], questions[NUM_SHOWN:]
    test, train = rest[:NUM_TEST], rest[NUM_TEST:][:NUM_TRAIN]
    files = {"sft": [demonstration(*one) for one in shown]}
    for split, part in ("train", train), ("test", test):
        files[split] = [rl_row(q, a, split, i) for i, (q, _, a) in enumerate(part)]
    for name, rows in files.items():
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    entry = {
        "class_name": "sql_tool.SqlTool",
        "config": {"type": "native", "database": str(database.resolve()), "timeout": 20},
    }
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))


def with_tool_template(model: Path, folder: Path) -> None:
    """A copy of the model whose chat template shows tools, which SmolLM2's own does not."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a world, questions about it and a model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="the folder that examples/smollm2 wrote")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.out, arguments.seed)
    if arguments.model is not None:
        with_tool_template(arguments.model, arguments.out / "model")
    print(f"{arguments.out}: {', '.join(sorted(file.name for file in arguments.out.iterdir()))}")
