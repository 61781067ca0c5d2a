"""Where a response ends because of its text."""

from verl.workers.rollout.native.sequence import tokens_until_stop

PIECES = ["a", "b", "END", "E", "ND", " ", "é", "xENDy"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def end_of(ids, num_new, *stop):
    return tokens_until_stop(ids, num_new, stop, decode)


def test_the_token_that_completes_the_text_is_the_last():
    assert end_of([0, 1, 2, 0, 0], 5, "END") == 3
    assert end_of([0, 3, 4, 1], 4, "END") == 3  # in two pieces
    assert end_of([0, 7, 1], 3, "END") == 2  # in the middle of a piece


def test_a_text_that_began_before_the_new_tokens_counts():
    assert end_of([0, 1, 3, 4], 1, "END") == 4
    assert end_of([0] * 30 + [5, 3, 4, 1, 1], 3, "a END") == 33


def test_the_first_of_several_texts_ends_it():
    assert end_of([0, 1, 6, 2], 4, "END", "é") == 3


def test_without_the_text_there_is_no_end():
    assert end_of([0, 1, 3, 1, 4], 5, "END") is None
