"""The gateway: an HTTP server in front of the engines that a trainer samples with.

    program --HTTP--> /s/<session>/v1/... --> Session: history -> ids --> AsyncLLMServerManager
                                                 |
                                                 +--> rows: the ids, log-probs and versions sampled

An agent program that takes a base URL and a key runs against it unmodified. It speaks OpenAI's chat
completions and responses and Anthropic's messages. Each session has a key of its own, and the
gateway listens on this machine only. It runs on the event loop of the agent loops, so ids go from
the engine into the trajectory without being written down in between.
"""

import asyncio
import contextvars
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl.agent_loop.server_manager import AsyncLLMServerManager
from verl.server import answers
from verl.server.dialects import CHAT, Dialect
from verl.server.errors import ApiError, internal_error
from verl.server.events import EventStream
from verl.server.forms import IGNORED_HEADER, SAMPLING, chat_form
from verl.server.guard import Guard, Receive, Recorder, Send, header, refuse
from verl.server.messages import MESSAGES
from verl.server.options import ServerOptions
from verl.server.responses import RESPONSES
from verl.server.running import listening_socket, uvicorn_config
from verl.server.session import MODEL, Answering, Session, SessionService
from verl.server.tree import Budget, ModelTurn, Tree

logger = logging.getLogger(__name__)

DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}

MAX_ENDED = 10_000
"""Ended sessions that are remembered, to tell their programs so."""

START_SECONDS = 30.0
IDLE_SECONDS = 30.0
"""Time without sessions after which a gateway is closed; the next session starts another."""


class Gateway:
    """Serves sessions over the engines of `manager`; it belongs to the event loop that starts it.

    `budget` is what a row of the training batch holds. `call_format` is how the model writes tool
    calls. `request_seconds` limits one answer.
    """

    def __init__(
        self,
        manager: AsyncLLMServerManager,
        tokenizer: Any,
        budget: Budget,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        call_format: str = "hermes",
        request_seconds: float = 3600.0,
    ) -> None:
        self.manager = manager
        self.budget = budget
        self.token = secrets.token_urlsafe(32)
        """Opens every session; programs get the key of their own."""

        options = ServerOptions(
            model=MODEL,
            max_model_len=budget.prompt_length + budget.response_length,
            tool_call_parser=call_format,
            token=self.token,
            max_running=4096,
            max_waiting=4096,
            max_connections=8192,
            request_seconds=request_seconds,
            keep_alive_seconds=60.0,
        )
        self.service = SessionService(
            manager, tokenizer, options, budget, template_kwargs=template_kwargs
        )
        self.sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        self._has_told = False
        self._listener = listening_socket(options)
        app = SessionGuard(self._app(), self)
        self._server = QuietServer(uvicorn_config(app, options))
        self._serving: asyncio.Task[None] | None = None
        self.closing: asyncio.Task[None] | None = None
        self.num_opened = 0

    @property
    def is_closed(self) -> bool:
        return self.closing is not None or (self._serving is not None and self._serving.done())

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; whoever calls it again waits for the same start."""
        if self._serving is None:
            # In a context of its own: requests are not part of the loop that happens to start it.
            serving = self._server.serve(sockets=[self._listener])
            self._serving = contextvars.Context().run(asyncio.create_task, serving)
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if self._serving.done() or time.monotonic() > deadline:
                raise RuntimeError("the gateway did not start; its log says why")
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        for session in list(self.sessions.values()):
            await self.end(session)
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._listener.close()
        self.service.close()

    def open(self, sampling_params: Mapping[str, Any], *, max_calls: int = 1000) -> Session:
        """A session whose turns are sampled with these parameters, the sample's seed among them."""
        name = secrets.token_hex(8)
        self.num_opened += 1
        self.sessions[name] = Session(
            name,
            sampling_params,
            self.service,
            url=f"{self.url}/s/{name}",
            key=self.key_of(name),
            max_calls=max_calls,
        )
        return self.sessions[name]

    async def end(self, session: Session) -> None:
        """End what still runs; further requests are told that the session has ended."""
        if self.sessions.pop(session.name, None) is None:
            return
        self._ended[session.name] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        await session.close()

    def key_of(self, name: str) -> str:
        return hmac.new(self.token.encode(), name.encode(), hashlib.sha256).hexdigest()

    def session_of(self, name: str) -> Session:
        if name in self.sessions:
            return self.sessions[name]
        if name in self._ended:
            raise ApiError(410, "the session has ended", code="session_ended")
        message = "there is no such session; its name is in the path (/s/<session>/v1/...)"
        raise ApiError(404, message, code="unknown_session")

    # ---- routes ----------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                *(
                    Route(path, self._route(dialect), methods=["POST"])
                    for path, dialect in DIALECTS.items()
                ),
                Route("/v1/models", self._models, methods=["GET"]),
            ],
            exception_handlers={
                ApiError: self._failed,
                HTTPException: self._failed,
                Exception: self._failed,
            },
        )

    def _route(self, dialect: Dialect) -> Any:
        async def endpoint(request: Request) -> Delivery:
            session: Session = request.scope["verl.session"]
            task = asyncio.current_task()
            assert task is not None
            session.tasks.add(task)
            task.add_done_callback(session.tasks.discard)
            return await self._answer(session, dialect, await request.body())

        return endpoint

    async def _answer(self, session: Session, dialect: Dialect, body: bytes) -> "Delivery":
        call = dialect.read(await self.service.json(body), session.remembered)
        request, ignored = chat_form(call.chat, MODEL)
        self._tell(ignored)
        answering = Answering(session, request)
        headers = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
        if request.stream:
            events = dialect.events(call, answering)
            response = EventStream(events, is_named=dialect.has_named_events, headers=headers)
        else:
            text = dialect.whole(call, await answering.whole())
            response = Response(text, media_type="application/json", headers=headers)
        return Delivery(response, session.tree, answering.turns)

    def _tell(self, ignored: Sequence[str]) -> None:
        decided = SAMPLING.intersection(ignored)
        if decided and not self._has_told:
            self._has_told = True
            logger.warning(
                "a program asks for %s; what is trained is sampled as actor_rollout_ref.rollout "
                "says (further requests are told in the header %s)",
                ", ".join(sorted(decided)),
                IGNORED_HEADER,
            )

    async def _models(self, request: Request) -> Response:
        options = self.service.options
        card = answers.ModelCard(
            id=MODEL,
            created=self.service.created,
            owned_by="verl",
            max_model_len=options.max_model_len,
        )
        text = answers.ModelList(data=[card]).model_dump_json()
        return Response(text, media_type="application/json")

    async def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            failure = ApiError(error.status_code, str(error.detail), code="http")
        else:
            failure = error if isinstance(error, ApiError) else internal_error()
        if failure.status >= 500:
            request.scope["verl.session"].fault = failure.message
        content = DIALECTS.get(request.scope["path"], CHAT).error(failure)
        return JSONResponse(content, failure.status, failure.headers)


class QuietServer(uvicorn.Server):
    """Leaves signals to the trainer."""

    def capture_signals(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nullcontext()


class SessionGuard(Guard):
    """Opens the session that a request names to whoever shows its key."""

    def __init__(self, app: Starlette, gateway: Gateway) -> None:
        service = gateway.service
        routes = frozenset(route.path for route in app.routes)  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(app, service.options, gateway.token, service.metrics, routes)
        self._gateway = gateway

    def _check_token(self, scope: Any) -> None:
        path: str = scope["path"]
        name = header(scope, b"x-verl-session").decode("latin-1")
        if path.startswith("/s/"):
            name, _, path = path.removeprefix("/s/").partition("/")
            scope["path"] = f"/{path}"
            scope["raw_path"] = scope["path"].encode()
        scheme, _, shown = header(scope, b"authorization").partition(b" ")
        shown = shown if scheme.lower() == b"bearer" else header(scope, b"x-api-key")
        keys = (self._gateway.key_of(name).encode(), self._gateway.token.encode())
        if not any(hmac.compare_digest(shown, key) for key in keys):
            message = "this needs the session's key, as Authorization: Bearer or x-api-key"
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")
        scope["verl.session"] = self._gateway.session_of(name)

    async def _refuse(self, error: ApiError, scope: Any, answer: Recorder) -> None:
        await refuse(DIALECTS.get(scope["path"], CHAT).error(error), error, answer)


class Delivery:
    """An answer on its way: turns whose client leaves before it has come are abandoned."""

    def __init__(self, response: Response, tree: Tree, turns: Sequence[ModelTurn]) -> None:
        self._response = response
        self._tree = tree
        self._turns = turns

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        except BaseException:
            for turn in self._turns:
                self._tree.abandon(turn)
            raise


_gateways: dict[AsyncLLMServerManager, Gateway] = {}


@asynccontextmanager
async def gateway_session(
    make: Callable[[], Gateway],
    manager: AsyncLLMServerManager,
    sampling_params: Mapping[str, Any],
    *,
    max_calls: int,
) -> AsyncIterator[Session]:
    """A session at the gateway of a manager, which is made and started when a session needs it."""
    gateway = _gateways.get(manager)
    if gateway is None or gateway.is_closed:
        gateway = _gateways[manager] = make()
    session = gateway.open(sampling_params, max_calls=max_calls)
    try:
        await gateway.start()
        yield session
    finally:
        await gateway.end(session)
        if not gateway.sessions:
            loop = asyncio.get_running_loop()
            loop.call_later(IDLE_SECONDS, close_idle, gateway, gateway.num_opened)


def close_idle(gateway: Gateway, num_opened: int) -> None:
    """Close a gateway that has had no session since it had this many."""
    if gateway.num_opened == num_opened and _gateways.get(gateway.manager) is gateway:
        del _gateways[gateway.manager]
        gateway.closing = asyncio.get_running_loop().create_task(gateway.close())
