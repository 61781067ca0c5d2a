"""Many clients at once, in a process of their own: `python -m tests.server.load URL TOKEN COUNT`.

Client n continues the prompt [80, n // 100 + 81, n % 100 + 81] with seed n. One in ten cancels
(reads a little and closes), one in ten disconnects (sends and closes); half of the others stream.
Meanwhile `/health` is asked all the time. The last line of the output is a JSON object: what each
client got, statuses, and how long `/health` took.
"""

import asyncio
import json
import sys
import time

import aiohttp

from tests.pace import PATIENCE

LENGTHS = (4, 12, 40)


def prompt_of(number: int) -> list[int]:
    return [80, number // 100 + 81, number % 100 + 81]


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


def body_of(number: int) -> dict:
    return {
        "model": "tiny",
        "prompt": prompt_of(number),
        "max_tokens": length_of(number),
        "seed": number,
        "stream": number % 2 == 0,
        "return_token_ids": True,
    }


class Clients:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url
        self.answers: dict[int, list[int]] = {}
        self.statuses: dict[int, int] = {}
        self.health_seconds: list[float] = []
        self.is_over = False

    async def run(self, number: int) -> None:
        while True:
            async with self.session.post(
                f"{self.url}/v1/completions", json=body_of(number)
            ) as answer:
                self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
                if answer.status == 429:
                    await asyncio.sleep(int(answer.headers["Retry-After"]) * (1 + number % 7 / 7))
                    continue
                if number % 10 == 3:  # cancels
                    await answer.content.read(1)
                    answer.close()
                    return
                self.answers[number] = ids_of(await answer.read(), number % 2 == 0)
                return

    async def disconnect(self, number: int) -> None:
        """Send a request and go."""
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(body_of(number)).encode()
        token = self.session.headers["Authorization"]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(0.05 * (number % 20))
        writer.transport.abort()

    async def watch(self) -> None:
        while not self.is_over:
            started = time.monotonic()
            async with self.session.get(f"{self.url}/health") as answer:
                await answer.read()
                assert answer.status == 200
            self.health_seconds.append(time.monotonic() - started)
            await asyncio.sleep(0.01)


def ids_of(answer: bytes, is_stream: bool) -> list[int]:
    if not is_stream:
        return json.loads(answer)["choices"][0]["token_ids"]
    events = [event[6:] for event in answer.decode().split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]


async def main(url: str, token: str, count: int) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=100 * PATIENCE)
    async with aiohttp.ClientSession(headers=headers, connector=limits, timeout=timeout) as session:
        clients = Clients(session, url)
        watch = asyncio.create_task(clients.watch())
        await asyncio.gather(
            *(clients.disconnect(n) if n % 10 == 7 else clients.run(n) for n in range(count))
        )
        clients.is_over = True
        await watch
    times = sorted(clients.health_seconds)
    result = {
        "answers": clients.answers,
        "statuses": clients.statuses,
        "health_p50": times[len(times) // 2],
        "health_p99": times[int(0.99 * len(times))],
        "health_asked": len(times),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
