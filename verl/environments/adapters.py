"""Games and problems of other packages as environments: gymnasium, textarena, reasoning-gym.

Each shows text and reads text: an action is the last thing in square brackets, or all that the
model said. What means nothing is refused with the actions that are legal. Rewards are the
package's own. The packages are imported when one of their environments is made.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.environments.base import Action, Environment, InvalidAction, Observation
from verl.utils.import_utils import load_class_from_fqn, require

GYMNASIUM_ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "stay", "right"),
    "Acrobot": ("left", "stay", "right"),
}
GYMNASIUM_RULES = {
    "FrozenLake": (
        "Cross the frozen lake from S to G without falling into a hole (H). The field in brackets "
        "is where you stand."
    ),
    "Taxi": (
        "Drive the taxi to the passenger, pick up, drive to the destination and drop off. You "
        "cannot drive through | walls."
    ),
    "Blackjack": "Play a hand of Blackjack: come closer to 21 than the dealer without going over.",
    "CliffWalking": "Walk from x to T without stepping on the cliff (C).",
}
_IN_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_QUOTED = re.compile(r"'(\[[^\[\]']*\])'")
_PLAYER = re.compile(r"\x1b\[41m(.*?)\x1b\[0m", re.DOTALL)
_CODES = re.compile(r"\x1b\[[0-9;]*m")
TAXI_PLACES = ("at R", "at G", "at Y", "at B", "in the taxi")


def chosen(action: str) -> str:
    """What the model says that it does: the last text in brackets, or everything."""
    bracketed = _IN_BRACKETS.findall(action)
    return (bracketed[-1] if bracketed else action).strip()


class GymnasiumEnvironment(Environment):
    """An environment of gymnasium with numbered actions, as text.

    `kwargs` are those of `gymnasium.make`, and `action_names` where the built-in ones do not fit,
    `rules` to say first, and for FrozenLake `random_map_size`: a map of its own for every seed.
    """

    def __init__(
        self,
        name: str,
        *,
        action_names: Sequence[str] | None = None,
        rules: str | None = None,
        random_map_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._gym: Any = require("gymnasium")
        self._name = name
        self._kwargs = kwargs
        self._random_map_size = random_map_size
        family = name.rpartition("/")[2].partition("-")[0]
        self._rules = GYMNASIUM_RULES.get(family, f"You play {family}.") if rules is None else rules
        self._world = self._make()
        space = self._world.action_space
        if not isinstance(space, self._gym.spaces.Discrete):
            raise ValueError(
                f"the actions of {name} are {space}; the text adapter needs Discrete ones"
            )
        num_actions, self._first_action = int(space.n), int(space.start)
        self._names = list(action_names or GYMNASIUM_ACTIONS.get(family, ()))
        if len(self._names) != num_actions:
            self._names = [str(number) for number in range(num_actions)]
        if action_names is not None and self._names != list(action_names):
            raise ValueError(
                f"action_names has {len(action_names)} names; {name} has {num_actions} actions"
            )

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        if self._random_map_size is not None:
            self._world.close()
            maps = require("gymnasium.envs.toy_text.frozen_lake")
            self._kwargs["desc"] = maps.generate_random_map(self._random_map_size, seed=seed)
            self._world = self._make()
        state, info = self._world.reset(seed=seed)
        return Observation(text=f"{self._rules}\n{self._shown(state, info)}")

    def step(self, action: Action) -> Observation:
        name = chosen(action).lower()
        if name not in self._names:
            raise InvalidAction(
                f"{chosen(action)[:100]!r} is no action here. Answer with one of "
                f"{self._choices(self._names)}."
            )
        number = self._first_action + self._names.index(name)
        state, reward, is_over, is_cut, info = self._world.step(number)
        is_done = bool(is_over or is_cut)
        return Observation(
            text=self._shown(state, info, is_done=is_done),
            reward=float(reward),
            done=is_done,
            info={"is_truncated": bool(is_cut)},
        )

    def close(self) -> None:
        self._world.close()

    def _make(self) -> Any:
        modes = self._gym.spec(self._name).make(**self._kwargs).unwrapped.metadata["render_modes"]
        render_mode = "ansi" if "ansi" in modes else None
        return self._gym.make(self._name, render_mode=render_mode, **self._kwargs)

    def _shown(self, state: Any, info: Mapping[str, Any], *, is_done: bool = False) -> str:
        shown = self._picture(state)
        if is_done:
            return f"{shown}\nThe episode is over."
        mask = info.get("action_mask")
        legal = [name for number, name in enumerate(self._names) if mask is None or mask[number]]
        return f"{shown}\nActions: {self._choices(legal)}."

    def _choices(self, names: Sequence[str]) -> str:
        return ", ".join(f"[{name}]" for name in names)

    def _picture(self, state: Any) -> str:
        if self._world.render_mode == "ansi":
            board = _CODES.sub("", _PLAYER.sub(r"[\1]", self._world.render())).strip()
            if not self._name.startswith("Taxi"):
                return board
            row, column, place, target = self._world.unwrapped.decode(state)
            return (
                f"{board}\nThe taxi is in row {row}, column {column}. The passenger is "
                f"{TAXI_PLACES[place]}, the destination {TAXI_PLACES[target][3:]}."
            )
        if self._name.startswith("Blackjack"):
            total, dealer, has_ace = (int(part) for part in state)
            ace = " with a usable ace" if has_ace else ""
            return f"Your hand is worth {total}{ace}. The dealer shows {dealer}."
        numbers = require("numpy").asarray(state).tolist()
        return f"State: {numbers}"


class TextArenaEnvironment(Environment):
    """A game of textarena. Against others, the model is `player`; they play as `opponent` says:
    `random` (any legal move, by the seed), or the full name of a function
    `(observation: str, legal: list[str], rng: random.Random) -> str`.

    `kwargs` are those of the game, such as `max_number`. The model is shown what is new each turn.
    """

    def __init__(
        self,
        name: str,
        *,
        player: int = 0,
        num_players: int | None = None,
        opponent: str = "random",
        **kwargs: Any,
    ) -> None:
        self._arena: Any = require("textarena")
        raw = name if name.endswith("-raw") else f"{name}-raw"
        self._game: Any = self._arena.make(raw, **kwargs)
        self._player = player
        self._num_players = num_players
        self._opponent: Callable[[str, list[str], random.Random], str] = (
            random_move if opponent == "random" else load_class_from_fqn(opponent, "opponent")
        )
        self._rng = random.Random()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        self._rng = random.Random(f"opponent {seed}")
        self._begin(seed)
        is_done = self._play_others()
        return self._observation(is_done)

    def step(self, action: Action) -> Observation:
        text = str(action) if "[" in action or "]" in action else f"[{action.strip()}]"
        is_done, _ = self._game.step(text)
        is_done = is_done or self._play_others()
        return self._observation(is_done)

    def _begin(self, seed: int) -> None:
        for num_players in (self._num_players,) if self._num_players else (1, 2, 3):
            random.seed(seed)
            try:
                self._game.reset(num_players=num_players, seed=seed)
            except AssertionError:  # how games refuse a number of players
                continue
            if not 0 <= self._player < num_players:
                raise ValueError(f"player is {self._player}; the game has {num_players}")
            return
        raise ValueError(f"{self._game.env_id} takes another number of players; set num_players")

    def _play_others(self) -> bool:
        """Until it is the model's turn, or the game is over."""
        while self._game.state.current_player_id != self._player:
            _, messages = self._game.get_observation()
            shown = "\n".join(text for _, text, _ in messages)
            legal = next(
                (_QUOTED.findall(text) for _, text, _ in reversed(messages) if "vailable" in text),
                [],
            )
            is_done, _ = self._game.step(self._opponent(shown, legal, self._rng))
            if is_done:
                return True
        return False

    def _observation(self, is_done: bool) -> Observation:
        kinds = self._arena.ObservationType
        messages = self._game.state.observations[self._player]
        self._game.state.observations[self._player] = []
        own = (self._player, self._arena.GAME_ID)
        shown: list[str] = []
        for sender, text, kind in messages:
            is_echo = kind is kinds.PLAYER_ACTION and sender in own
            if not is_echo and [text.strip("\n")] != shown[-1:]:
                shown.append(text.strip("\n"))
        if not is_done:
            return Observation(text="\n".join(shown), reward=0.0)
        rewards, game_info = self._game.close()
        reason = str(game_info[self._player].get("reason", ""))
        info = {
            "reason": reason,
            "is_invalid_move": bool(game_info[self._player]["invalid_move"]),
            "num_turns": int(game_info[self._player]["turn_count"]),
        }
        reward = float((rewards or {}).get(self._player, 0.0))
        return Observation(
            text="\n".join(filter(None, [*shown, reason])), reward=reward, done=True, info=info
        )


def random_move(observation: str, legal: list[str], rng: random.Random) -> str:
    if not legal:
        raise ValueError(
            f"no legal move can be read from what the opponent is shown: {observation[-500:]!r}; "
            "set opponent to the full name of a function"
        )
    return rng.choice(legal)


class ReasoningGymEnvironment(Environment):
    """A problem of reasoning-gym, asked once and scored by its own scorer.

    The answer is what stands between the last `<answer>` and `</answer>`, or all that the model
    said. `kwargs` are those of the dataset; the seed of the episode is the seed of the problem.
    """

    def __init__(self, name: str, *, instruction: str = "", **kwargs: Any) -> None:
        self._gym: Any = require("reasoning_gym")
        self._name = name
        self._instruction = instruction
        self._kwargs = kwargs
        self._dataset: Any = self._gym.create_dataset(name, size=1, seed=0, **kwargs)
        self._problem: Any = None

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        self._dataset = self._gym.create_dataset(self._name, size=1, seed=seed, **self._kwargs)
        self._problem = self._dataset[0]
        question = str(self._problem["question"])
        return Observation(text="\n".join(filter(None, [question, self._instruction])))

    def step(self, action: Action) -> Observation:
        answers = re.findall(r"<answer>(.*?)</answer>", action, re.DOTALL)
        answer = (answers[-1] if answers else action).strip()
        score = float(self._dataset.score_answer(answer, self._problem))
        return Observation(reward=score, done=True, info={"answer": answer[:1000]})
