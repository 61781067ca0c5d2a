import pytest

from verl.utils.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢字 🙂", "plain é 漢字 🙂"),
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("line\nstep:9 - reward:1", r"line\nstep:9 - reward:1"),
        ("carriage\rreturn\ttab", r"carriage\rreturn\ttab"),
        ("\x9b31m", r"\x9b31m"),  # the one-byte form of ESC [
        ("a\u202eb\u2028c", r"a\u202eb\u2028c"),
        ("\ud800", r"\ud800"),
        (12.5, "12.5"),
    ],
)
def test_control_characters_are_shown_and_everything_else_stays(text, shown):
    assert printable(text) == shown


def test_long_text_is_cut_and_says_how_much_is_missing():
    assert printable("a" * 12, max_characters=10) == "a" * 10 + "... (2 more)"
    assert printable("a" * 10, max_characters=10) == "a" * 10
