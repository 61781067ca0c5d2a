"""An agent loop that asks a world for numbers that nobody can repeat, and writes them down.

The file `die_at` names the prompt in whose second reply the process kills itself, once others have
ended.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import ClassVar

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.journal import journalled


class AskingLoop(AgentLoopBase):
    """Some tokens of the model, a digit of the world; three turns of the model in all."""

    num_ended: ClassVar[Counter] = Counter()

    def __init__(self, *arguments, asked, die_at, num_tokens=2, **kwargs):
        super().__init__(*arguments, **kwargs)
        self.log, self.die_at = Path(asked), Path(die_at)
        self.num_tokens = num_tokens

    async def run(self, sampling_params, **row):
        self.uid, seed = row["uid"], sampling_params["seed"]
        self.step = self.uid.split("-")[0]
        prompt = await self.apply_chat_template(row["raw_prompt"])
        ids, mask, log_probs = [], [], []
        for turn in range(3):
            output = await self.server_manager.generate(
                f"{self.uid}-{seed}",
                prompt_ids=prompt + ids,
                sampling_params={
                    **sampling_params,
                    "seed": seed + turn,
                    "max_tokens": self.num_tokens,
                },
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            if turn == 2 or output.stop_reason == "stop":
                break
            request = {"said": output.token_ids}
            reply = await journalled("tool", request, lambda turn=turn: self.ask(turn))
            digit = self.tokenizer.encode(str(reply["digit"]), add_special_tokens=False)
            ids, mask = ids + digit, mask + [0] * len(digit)
            log_probs += [0.0] * len(digit)
        self.num_ended[self.step] += 1
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids, response_mask=mask, response_logprobs=log_probs
        )

    async def ask(self, turn):
        digit = os.urandom(1)[0] % 10
        with self.log.open("a") as file:
            file.write(json.dumps([self.uid, turn, digit]) + "\n")
        if turn == 1 and self.die_at.exists() and self.die_at.read_text() == self.uid:
            journal = Path(self.config.trainer.default_local_dir).glob("journal/step_*.jsonl")
            last = max(journal)
            while self.num_ended[self.step] < 3 or last.read_text().count('"end"') < 3:
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"digit": digit}
