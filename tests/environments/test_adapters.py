"""Packages of games and problems: what they show, what they refuse, and that episodes repeat."""

import json

import pytest

from tests.environments.test_pool import leased, pool_of
from verl.environments.base import Action
from verl.environments.pool import EnvironmentSpec

HANOI = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
GAMES = {
    "gymnasium:FrozenLake-v1": ({"random_map_size": 5}, ["[right]", "down", "I go [down]", "up"]),
    "gymnasium:Taxi-v4": ({}, ["[south]", "[north]", "[pickup]"]),
    "gymnasium:Blackjack-v1": ({}, ["hit", "hit", "stick"]),
    "textarena:GuessTheNumber-v0": ({"max_number": 16}, ["[8]", "4", "[12]", "nothing", "[2]"]),
    "textarena:TicTacToe-v0": ({}, ["[4]", "[0]", "[8]", "[2]", "[6]", "[5]", "[1]"]),
    "textarena:KuhnPoker-v0": ({}, ["[bet]", "[check]", "[call]", "[fold]"]),
    "textarena:Minesweeper-v0-small": ({}, ["[2 2]", "[0 0]", "[4 4]"]),
    "textarena:TowerOfHanoi-v0": ({}, HANOI),
}


async def play(pool, name, seed, kwargs, actions):
    async with leased(pool) as lease:
        first, _ = await lease.reset(EnvironmentSpec(name=name, kwargs=kwargs), {}, seed)
        seen = [first]
        for action in actions:
            seen.append(await lease.step(Action(action)))
            if seen[-1].done:
                break
    return [json.dumps(vars(one)) for one in seen], seen


async def test_the_same_seed_and_actions_are_the_same_episode():
    async with pool_of() as pool:
        for name, (kwargs, actions) in GAMES.items():
            episodes = [await play(pool, name, seed, kwargs, actions) for seed in (3, 4, 5, 3)]
            assert episodes[0][0] == episodes[3][0], name
            num_different = len({tuple(texts) for texts, _ in episodes})
            assert num_different > 1 or name == "textarena:TowerOfHanoi-v0", name


async def test_games_say_the_legal_actions_refuse_others_and_give_their_rewards():
    async with pool_of() as pool:
        lake = {"is_slippery": False, "desc": ["SF", "HG"]}
        _, seen = await play(
            pool, "gymnasium:FrozenLake-v1", 0, lake, ["[jump]", "[right]", "[down]"]
        )
        assert "[S]F\nHG\nActions: [left], [down], [right], [up]." in seen[0].text
        assert "'jump' is no action here" in seen[1].text
        assert "S[F]" in seen[2].text
        assert [(one.reward, one.done) for one in seen[1:]] == [(0, False), (0, False), (1, True)]

        _, seen = await play(pool, "textarena:TowerOfHanoi-v0", 0, {}, HANOI)
        assert (seen[-1].reward, seen[-1].done) == (1.0, True)

        game = {"min_number": 5, "max_number": 7}
        _, seen = await play(pool, "textarena:GuessTheNumber-v0", 0, game, ["[5]", "[6]", "[7]"])
        assert "Congratulations" in seen[-1].text
        assert (seen[-1].reward, seen[-1].info["num_turns"]) == (1.0, len(seen) - 1)

        scripted = {"opponent": "tests.environments.worlds.corner_player"}
        _, seen = await play(pool, "textarena:TicTacToe-v0", 0, scripted, ["[4]", "[5]", "[3]"])
        assert "placed their symbol (X) in cell 0" in seen[1].text
        assert (seen[-1].reward, seen[-1].done) == (1.0, True)


@pytest.mark.slow
async def test_slow_packages_repeat_too():
    async with pool_of() as pool:
        moves = ["[up]", "[left]", "[down]", "[right]"]
        episodes = [await play(pool, "textarena:Sokoban-v0", s, {}, moves) for s in (3, 4, 3)]
        assert episodes[0][0] == episodes[2][0] != episodes[1][0]

        async def solve(answer):
            _, seen = await play(pool, "reasoning_gym:chain_sum", 7, {}, [answer])
            return seen

        question, wrong = await solve("no idea")
        assert (wrong.reward, wrong.done) == (0.0, True)
        terms = question.text.partition(":")[2].strip(" =").replace("- ", "-").replace("+ ", "")
        total = sum(map(int, terms.split()))
        assert (await solve(f"so <answer>{total}</answer>"))[1].reward == 1.0
