r"""The corpus of graded pairs: `data/pairs.jsonl`, made by `python -m` this module.

Each row has a gold answer, an answer, whether it is right, its kind, and its part: `held out` rows
were not looked at while the grader was written. Half of the rows come from tables worked by hand
(`HAND`: gold, then right answers, then after `!!` wrong ones), half from generators that know the
value of what they write. Pairs whose verdict is a matter of taste (a point against a bare list, a
point against a set) are left out.
"""

# ruff: noqa: E501 - answers in a line are easier to compare than wrapped ones

import json
import random
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from tests.utils.reward_score.math_grader.hand import HAND

PATH = Path(__file__).parent / "data" / "pairs.jsonl"
Case = tuple[str, list[str], list[str]]
"""A gold answer, right answers, wrong answers."""


def frac(value: Fraction | int, command: str = "\\frac") -> str:
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def integer(pick: random.Random) -> Case:
    n = pick.choice([-1, 1]) * pick.randint(2, 10 ** pick.randint(1, 5))
    right = [f"${n}$", f"{n}.0", f"\\boxed{{{n}}}", f"x = {n}", f"\\text{{{n}}}", f"{n} .",
             f"({n})", f"{n}\\,", f"n={n}"]  # fmt: skip
    wrong = [str(-n), str(n + 1), f"{n}0", f"{n}.5", f"{n}/3", f"{n}\\pi", f"{n}x", f"{n}^2"]
    return str(n), pick.sample(right, 2), pick.sample(wrong, 2)


def fraction(pick: random.Random) -> Case:
    value = Fraction(pick.choice([-1, 1]) * pick.randint(1, 40), pick.choice([3, 7, 9, 11, 13, 8]))
    value = value if value.denominator > 1 else value + Fraction(1, 3)
    k = pick.randint(2, 7)
    over, under = abs(value.numerator), value.denominator
    sign = "-" if value < 0 else ""
    right = [f"{sign}{over}/{under}", f"{sign}\\dfrac{{{over}}}{{{under}}}",
             f"{sign}\\frac{{{over * k}}}{{{under * k}}}", f"{sign}\\left(\\frac{{{over}}}{{{under}}}\\right)",
             f"\\frac{{{sign}{over}}}{{{under}}}", f"x = {sign}\\tfrac{{{over}}}{{{under}}}"]  # fmt: skip
    wrong = [f"{sign}\\frac{{{under}}}{{{over}}}", frac(-value), frac(value + 1),
             f"{sign}{over}{under}", frac(value * 10)]  # fmt: skip
    wrong += [] if under in (2, 4, 8) else [f"{sign}{over / under:.2f}"]
    return frac(value), pick.sample(right, 2), pick.sample(wrong, 2)


def decimal(pick: random.Random) -> Case:
    cents = pick.randint(1, 99999)
    value = Fraction(cents, 100)
    text = f"{cents / 100:.2f}"
    right = [text + "0", frac(value), f"{value.numerator}/{value.denominator}", f"${text}$",
             f"{cents}\\times 10^{{-2}}", f"y={text}"]  # fmt: skip
    wrong = [f"{(cents + 1) / 100:.2f}", f"{cents / 10:.1f}", f"-{text}", text.replace(".", ""),
             f"{text}1", frac(value + 1)]  # fmt: skip
    return text, pick.sample(right, 2), pick.sample(wrong, 2)


def mixed(pick: random.Random) -> Case:
    under = pick.choice([2, 3, 4, 5, 7, 8])
    over = pick.choice([n for n in range(1, under) if Fraction(n, under).denominator == under])
    whole = pick.randint(1, 12)
    value = whole + Fraction(over, under)
    right = [f"{whole}\\frac{{{over}}}{{{under}}}", f"{whole} {over}/{under}",
             f"{whole}\\,\\frac{{{over}}}{{{under}}}", f"{whole}+\\frac{{{over}}}{{{under}}}",
             f"{whole}\\dfrac{{{over}}}{{{under}}}"]  # fmt: skip
    wrong = [f"{whole}\\cdot\\frac{{{over}}}{{{under}}}", f"{whole + 1}\\frac{{{over}}}{{{under}}}",
             f"{whole}\\frac{{{over}}}{{{under + 1}}}", f"-{whole}\\frac{{{over}}}{{{under}}}",
             f"{whole}{over}/{under}"]  # fmt: skip
    return frac(value), pick.sample(right, 2), pick.sample(wrong, 2)


def percent(pick: random.Random) -> Case:
    n = pick.choice([10, 12, 15, 20, 25, 30, 35, 45, 60, 75, 80, 85, 90, 96])
    gold = pick.choice([f"{n}\\%", frac(Fraction(n, 100)), str(n / 100)])
    right = [f"{n}\\%", f"{n}%", frac(Fraction(n, 100)), str(n / 100), f"${n}\\%$",
             f"{n} \\text{{ percent}}"]  # fmt: skip
    wrong = [f"{n + 1}\\%", f"{n}0\\%", frac(Fraction(n + 1, 100)), f"0.0{n}", f"{100 - n + 1}\\%",
             f"-{n}\\%"]  # fmt: skip
    return gold, pick.sample([text for text in right if text != gold], 2), pick.sample(wrong, 2)


UNITS = ["cm", "m", "km", "inches", "feet", "hours", "minutes", "miles", "kg", "apples", "students",
         "days", "years", "meters", "units", "pounds", "seconds", "mph", "ways", "points"]  # fmt: skip


def unit(pick: random.Random) -> Case:
    n, name = pick.randint(2, 900), pick.choice(UNITS)
    gold = pick.choice([str(n), f"{n} \\text{{ {name}}}", f"{n}\\text{{ {name}}}"])
    right = [f"{n}\\text{{ {name}}}", f"{n} {name}", f"{n}\\ \\text{{{name}}}", f"{n}",
             f"{n}\\mathrm{{~{name}}}", f"{n}.0 \\text{{ {name}}}", f"x={n}\\text{{ {name}}}"]  # fmt: skip
    wrong = [f"{n + 1}\\text{{ {name}}}", f"{n}0 {name}", f"-{n}\\text{{ {name}}}",
             f"{n + 2}\\mathrm{{~{name}}}", f"\\frac{{{n}}}{{7}}\\text{{ {name}}}"]  # fmt: skip
    return gold, pick.sample([text for text in right if text != gold], 2), pick.sample(wrong, 2)


def money(pick: random.Random) -> Case:
    n = pick.randint(2, 99_999)
    gold = pick.choice([str(n), f"\\${n}", f"\\${n:,}"])
    right = [
        f"\\${n}",
        f"\\${n:,}",
        f"{n}",
        f"\\${n}.00",
        f"{n} \\text{{ dollars}}",
        f"{n:,} dollars",
    ]
    wrong = [f"\\${n + 1}", f"\\${n}.50", f"\\${n}0", f"-\\${n}", f"{n + 3:,} dollars"]
    return gold, pick.sample([text for text in right if text != gold], 2), pick.sample(wrong, 2)


def thousands(pick: random.Random) -> Case:
    n = pick.randint(1001, 9_999_999)
    comma = f"{n:,}"
    gold = pick.choice([str(n), comma, comma.replace(",", "{,}"), comma.replace(",", ",\\!")])
    right = [str(n), comma, comma.replace(",", "{,}"), comma.replace(",", "\\,"),
             comma.replace(",", ",\\!"), f"x={comma}"]  # fmt: skip
    wrong = [comma.replace(",", ", "), f"{n + 1:,}", f"{n * 10:,}",
             comma.replace(",", " \\text{ and } ", 1)]  # fmt: skip
    return gold, pick.sample([text for text in right if text != gold], 2), pick.sample(wrong, 2)


def scientific(pick: random.Random) -> Case:
    a, k = pick.randint(11, 99), pick.randint(3, 8)
    value = str(a * 10 ** (k - 1))
    right = [f"{a / 10}\\times 10^{{{k}}}", f"{a / 10} \\cdot 10^{k}", f"{a / 10}e{k}",
             f"{a / 10} × 10^{k}", f"{a} \\times 10^{{{k - 1}}}"]  # fmt: skip
    wrong = [f"{a / 10}\\times 10^{{{k + 1}}}", f"{a / 10}\\times 10^{{-{k}}}", f"{a / 10}e{k - 1}",
             f"{(a + 1) / 10}\\times 10^{{{k}}}", f"{a / 10}+10^{k}"]  # fmt: skip
    return value, pick.sample(right, 2), pick.sample(wrong, 2)


def surd(pick: random.Random) -> Case:
    a, b, n = pick.randint(2, 9), pick.randint(1, 12), pick.choice([2, 3, 5, 6, 7, 11])
    gold = f"{b}+{a}\\sqrt{{{n}}}"
    right = [f"{a}\\sqrt{{{n}}}+{b}", f"{b}+\\sqrt{{{a * a * n}}}", f"{b} + {a} \\sqrt {n}",
             f"\\frac{{{2 * b}+{2 * a}\\sqrt{{{n}}}}}{{2}}", f"{b}+{a}\\cdot {n}^{{1/2}}",
             f"{b}+\\frac{{{a * n}}}{{\\sqrt{{{n}}}}}"]  # fmt: skip
    wrong = [f"{b}-{a}\\sqrt{{{n}}}", f"{a}+{b}\\sqrt{{{n}}}" if a != b else "0",
             f"{b}+{a}\\sqrt{{{n + 6}}}", f"{b + a}\\sqrt{{{n}}}", f"{b}+{a}\\sqrt[3]{{{n}}}",
             f"{b + a * n**0.5:.3f}"]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def pi(pick: random.Random) -> Case:
    value = Fraction(pick.randint(1, 50), pick.choice([1, 2, 3, 4, 6]))
    over, under = value.numerator, value.denominator
    gold = f"{over}\\pi" if under == 1 else f"\\frac{{{over}\\pi}}{{{under}}}"
    right = [f"{frac(value)}\\pi", f"\\frac{{{over}}}{{{under}}} \\pi", f"{over}π/{under}",
             f"\\pi \\cdot {frac(value)}", f"\\frac{{{2 * over}\\pi}}{{{2 * under}}}"]  # fmt: skip
    wrong = [frac(value), f"{frac(value + 1)}\\pi", f"{frac(value)}\\pi^2", f"-{frac(value)}\\pi",
             f"{over * 3.14 / under:.2f}", f"{frac(value)}+\\pi"]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def polynomial(pick: random.Random) -> Case:
    a, b, c = pick.randint(2, 9), pick.randint(1, 9), pick.randint(1, 9)
    v = pick.choice("xyznt")
    gold = f"{a}{v}^2+{b}{v}-{c}"
    right = [f"-{c}+{b}{v}+{a}{v}^2", f"{a}{v}^{{2}} + {b}{v} - {c}", f"{v}({a}{v}+{b})-{c}",
             f"{a}\\cdot {v}^2+{b}\\cdot {v}-{c}", f"{2 * a}{v}^2+{b}{v}-{c}-{a}{v}^2"]  # fmt: skip
    wrong = [f"{a}{v}^2-{b}{v}-{c}", f"{a}{v}^2+{b}{v}+{c}", f"{a}{v}^3+{b}{v}-{c}",
             f"{a + 1}{v}^2+{b}{v}-{c}", f"{a}w^2+{b}w-{c}", f"{a}{v}+{b}{v}-{c}"]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def factored(pick: random.Random) -> Case:
    a, b = pick.sample(range(1, 10), 2)
    gold = f"(x-{a})(x+{b})"
    c, sign = abs(b - a), "+" if b > a else "-"
    right = [f"x^2{sign}{c}x-{a * b}", f"(x+{b})(x-{a})", f"\\left(x-{a}\\right)\\left(x+{b}\\right)",
             f"(x - {a}) \\cdot (x + {b})"]  # fmt: skip
    wrong = [f"(x+{a})(x-{b})", f"x^2{sign}{c}x+{a * b}", f"(x-{a})(x-{b})", f"(x-{a})^2"]
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def equation(pick: random.Random) -> Case:
    m, c = pick.randint(2, 9), pick.randint(1, 9)
    gold = f"y={m}x+{c}"
    right = [f"y = {c} + {m}x", f"{m}x - y + {c} = 0", f"y-{m}x={c}", f"{m}x+{c}=y",
             f"{2 * m}x-{2}y={-2 * c}", f"y-{c}={m}x"]  # fmt: skip
    wrong = [f"y={m}x-{c}", f"y={c}x+{m}" if c != m else "y=x", f"{m}x+y+{c}=0", f"x={m}y+{c}",
             f"y={m + 1}x+{c}", f"y={m}x+{c + 1}"]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def point(pick: random.Random) -> Case:
    a, b = pick.sample(range(-20, 20), 2)
    gold = f"({a},{b})"
    right = [f"({a}, {b})", f"\\left({a}, {b}\\right)", f"( {a} , {b} )", f"(x,y)=({a},{b})",
             f"({a}.0,{b})", f"\\left( {a},\\ {b} \\right)", f"({2 * a}/2, {b})"]  # fmt: skip
    wrong = [f"({b},{a})", f"({a},{b + 1})", f"({a},{b},0)", f"({-a - 1},{b})", f"[{a},{b + 2}]"]
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def interval(pick: random.Random) -> Case:
    a = pick.randint(-9, 9)
    b = a + pick.randint(1, 9)
    shapes = [
        (f"({a},{b})", f"{a} < x < {b}"),
        (f"[{a},{b}]", f"{a} \\le x \\le {b}"),
        (f"[{a},{b})", f"{a} \\leq x < {b}"),
        (f"(-\\infty,{b}]", f"x \\le {b}"),
        (f"({a},\\infty)", f"x > {a}"),
    ]
    gold, words = pick.choice(shapes)
    spaced = gold.replace(",", ", ")
    right = [spaced, words, f"x \\in {gold}", f"\\left{spaced[:-1]}\\right{gold[-1]}"]
    flipped = {"(": "[", "[": "("}[gold[0]] + gold[1:]
    wrong = [gold.replace(str(b), str(b + 1)) if str(b) in gold else gold.replace(str(a), str(a + 1)),
             words.replace("x", "x+1"), words.replace("<", ">") if "<" in words else f"({b + 3},{b + 4})"]  # fmt: skip
    wrong += [flipped] if "infty" not in gold[:9] else []
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def union(pick: random.Random) -> Case:
    a = pick.randint(-9, 5)
    b = a + pick.randint(1, 7)
    gold = f"(-\\infty,{a})\\cup({b},\\infty)"
    right = [f"x<{a} \\text{{ or }} x>{b}", f"({b},\\infty)\\cup(-\\infty,{a})",
             f"(-\\infty, {a}) \\cup ({b}, \\infty)", f"x \\in (-\\infty,{a})\\cup({b},\\infty)",
             f"(-∞, {a}) ∪ ({b}, ∞)", f"x>{b} \\text{{ or }} x<{a}"]  # fmt: skip
    wrong = [f"(-\\infty,{a}]\\cup({b},\\infty)", f"({a},{b})", f"x>{a} \\text{{ or }} x<{b}",
             f"(-\\infty,{a})", f"(-\\infty,{a + 1})\\cup({b},\\infty)", f"x<{a}"]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def finite_set(pick: random.Random) -> Case:
    values = pick.sample(range(-20, 30), pick.randint(2, 4))
    other = pick.sample(values, len(values))
    joined = [", ".join(map(str, group)) for group in (values, other)]
    gold = pick.choice([f"\\{{{joined[0]}\\}}", joined[0].replace(" ", "")])
    listed = f"{', '.join(map(str, other[:-1]))} \\text{{ and }} {other[-1]}"
    right = [f"\\{{{joined[1]}\\}}", f"\\left\\{{ {joined[1]} \\right\\}}", joined[1], listed,
             " \\text{ or } ".join(f"x={v}" for v in other), listed.replace("and", "or")]  # fmt: skip
    wrong = [", ".join(map(str, [*values[1:], 77])), ", ".join(map(str, values[1:])),
             f"\\{{{joined[1]}, 99\\}}", str(sum(values) + 1), listed + " \\text{ and } 55"]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def matrix(pick: random.Random) -> Case:
    rows = [[pick.randint(-9, 9) for _ in range(2)] for _ in range(2)]
    rows[0][0] = rows[0][1]  # no row or column equals another
    rows[1] = [rows[0][1] + 1, rows[0][1]]

    def written(table: list[list[int]], kind: str = "pmatrix", space: str = "") -> str:
        body = f"{space}\\\\{space}".join(f"{space}&{space}".join(map(str, row)) for row in table)
        return f"\\begin{{{kind}}}{space}{body}{space}\\end{{{kind}}}"

    changed = [rows[0], [rows[1][0], rows[1][1] + 1]]
    right = [written(rows, "bmatrix"), written(rows, "pmatrix", " "), written(rows, "bmatrix", " "),
             f"A = {written(rows)}"]  # fmt: skip
    wrong = [written(changed), written([list(row) for row in zip(*rows, strict=True)], "bmatrix"),
             written([rows[1], rows[0]]), written([[-v - 1 for v in row] for row in rows])]  # fmt: skip
    return written(rows), pick.sample(right, 2), pick.sample(wrong, 2)


def plus_minus(pick: random.Random) -> Case:
    a, n = pick.randint(1, 9), pick.choice([2, 3, 5, 7, 9, 10])
    root = "3" if n == 9 else f"\\sqrt{{{n}}}"
    gold = f"{a} \\pm {root}"
    right = [f"{a}+{root}, {a}-{root}", f"x = {a} \\pm {root}", f"{a}-{root} \\text{{ and }} {a}+{root}",
             f"\\{{{a}-{root}, {a}+{root}\\}}", f"x={a}+{root} \\text{{ or }} x={a}-{root}"]  # fmt: skip
    wrong = [f"{a}+{root}", f"{a + 1} \\pm {root}", f"-{a} \\pm {root}", f"{a} \\pm 2{root}",
             f"{a}-{root}, {a}-{root}"]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def complex_number(pick: random.Random) -> Case:
    a, b = pick.sample(range(2, 15), 2)
    gold = f"{a}+{b}i"
    right = [f"{b}i+{a}", f"{a} + {b} i", f"z={a}+{b}i", f"{a}+{b}\\cdot i", f"-i({a}i-{b})"]
    wrong = [f"{a}-{b}i", f"{b}+{a}i", f"-{a}+{b}i", f"{a + b}i", f"{a}+{b}", f"{a}+{b + 1}i"]
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def based(pick: random.Random) -> Case:
    n, base = pick.randint(20, 400), pick.choice([2, 3, 4, 5, 6, 7, 8, 9])

    def digits(value: int) -> str:
        return (digits(value // base) if value >= base else "") + str(value % base)

    gold = f"{digits(n)}_{{{base}}}"
    other = base % 8 + 2
    right = [f"{digits(n)}_{base}", digits(n), f"${digits(n)}_{{{base}}}$"]
    wrong = [f"{digits(n)}_{{{other}}}", f"{digits(n + 1)}_{{{base}}}",
             f"{digits(n)}0_{{{base}}}", digits(n + 1)]  # fmt: skip
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def number_against_base(pick: random.Random) -> Case:
    n = pick.choice([10, 11, 100, 101, 110, 111, 1010, 121, 212])
    return str(n), [f"{n}.0"], [f"{n}_{{{pick.choice([3, 4, 5])}}}", f"{n}_3"]


def chain(pick: random.Random) -> Case:
    a, b = pick.sample(range(2, 30), 2)
    s = a + b
    right = [f"x = {a}+{b} = {s}", f"{a}+{b}={s}", f"S = {s}", f"f(2) = {a} + {b} = {s}",
             f"a+b = {s}", f"x+y={a}+{b}={s}", f"\\text{{Total}} = {s}"]  # fmt: skip
    wrong = [f"x = {a}+{b} = {s + 1}", f"{s + 1}={s}", f"x={s + 2}", f"{s - 1} = {s}",
             f"\\text{{Total}} = {s}0"]  # fmt: skip
    return str(s), pick.sample(right, 2), pick.sample(wrong, 2)


def ratio(pick: random.Random) -> Case:
    a, b = pick.choice([(2, 3), (3, 4), (5, 7), (1, 4), (4, 9), (7, 2), (5, 3), (8, 5)])
    right = [f"{a} : {b}", f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"${a}:{b}$"]
    wrong = [f"{b}:{a}", f"{a + 1}:{b}", f"\\frac{{{b}}}{{{a}}}", f"{a}:{b + 1}"]
    return f"{a}:{b}", pick.sample(right, 2), pick.sample(wrong, 2)


def text(pick: random.Random) -> Case:
    words = ["even", "odd", "Monday", "Tuesday", "yes", "no", "circle", "ellipse", "parabola",
             "Alice", "east", "increasing", "decreasing", "isosceles", "true", "false"]  # fmt: skip
    word, *others = pick.sample(words, 3)
    gold = f"\\text{{{word}}}"
    right = [word, f"\\text{{ {word} }}", f"\\textbf{{{word}}}", f"\\mathrm{{{word}}}", word.upper(),
             f"\\text{{{word}.}}", f"\\text{{{word.title()}}}"]  # fmt: skip
    wrong = [others[0], f"\\text{{{others[1]}}}", f"\\text{{not {word}}}", "5"]
    return gold, pick.sample(right, 2), pick.sample(wrong, 2)


def choice(pick: random.Random) -> Case:
    letter, *others = pick.sample("ABCDE", 3)
    gold = pick.choice([letter, f"\\text{{({letter})}}", f"\\text{{{letter}}}"])
    right = [letter, f"({letter})", f"\\textbf{{({letter})}}", f"\\text{{{letter}}}", f"{letter}.",
             f"({letter}) 12", f"\\textbf{{({letter})}}\\ 12"]  # fmt: skip
    wrong = [others[0], f"({others[1]})", f"\\text{{({others[0]})}}", f"({others[1]}) 12", "12"]
    return gold, pick.sample([t for t in right if t != gold], 2), pick.sample(wrong, 2)


GENERATORS = (
    integer, fraction, decimal, mixed, percent, unit, money, thousands, scientific, surd, pi,
    polynomial, factored, equation, point, interval, union, finite_set, matrix, plus_minus,
    complex_number, based, number_against_base, chain, ratio, text, choice,
)  # fmt: skip
CASES_PER_KIND = 8


def generated() -> Iterator[tuple[str, Case]]:
    for generator in GENERATORS:
        kind = generator.__name__.replace("_", " ")
        for seed in range(CASES_PER_KIND):
            yield kind, generator(random.Random(f"{kind} {seed}"))


def by_hand() -> Iterator[tuple[str, Case]]:
    for kind, table in HAND.items():
        for line in table.strip("\n").splitlines():
            right, _, wrong = line.partition("!!")
            gold, *answers = [part.strip() for part in right.split(" | ")]
            yield (
                kind,
                (
                    gold,
                    [a for a in answers if a],
                    [w.strip() for w in wrong.split(" | ") if w.strip()],
                ),
            )


def rows() -> Iterator[dict[str, str]]:
    seen = set()
    for kind, (gold, right, wrong) in (*by_hand(), *generated()):
        for verdict, answers in (("right", right), ("wrong", wrong)):
            for answer in answers:
                if (gold, answer) in seen:
                    continue
                seen.add((gold, answer))
                is_held_out = zlib.crc32(f"{gold}\n{answer}".encode()) % 5 < 2
                part = "held out" if is_held_out else "tuned"
                yield {
                    "gold": gold,
                    "answer": answer,
                    "verdict": verdict,
                    "kind": kind,
                    "part": part,
                }


def read() -> list[dict[str, str]]:
    return [json.loads(line) for line in PATH.read_text().splitlines()]


if __name__ == "__main__":
    PATH.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows()))
