"""What every HTTP request must pass before a route sees it: whom it names, where it comes from, its token, its size.

Host      a server on a loopback address answers to loopback names only: else a page whose name is made to point here
          (DNS rebinding) could read videos
Origin    none, or the server's own: else any page open in the user's browser could have videos made
token     Authorization: Bearer TOKEN, where one was set; "/" and "/health" show nothing and need none
size      no more bytes than the limit, whatever the length that was announced
"""

import hmac
import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPEN = ("/", "/health")


def read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token file {path} cannot be read: {error}") from None
    if not token or not token.isascii() or any(c.isspace() for c in token):
        raise ValueError(f"token file {path} must hold one word of plain ASCII")
    return token


class TooLarge(Exception):
    """A body went beyond the limit while it was read."""


class Guard:
    """ASGI middleware. `host` is the address that the server is bound to."""

    def __init__(self, app: Callable, host: str, token: str | None, body: int):
        self.app, self.loopback, self.token, self.body = app, host in LOOPBACK, token, body

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers, sizes = {}, []
        for name, value in scope["headers"]:
            headers[name] = value.decode("latin-1")
            sizes += [headers[name]] if name == b"content-length" else []
        if refused := self.refusal(scope["path"], headers):
            return await answer(send, *refused)
        if sizes and not (sizes[0].isdigit() and int(sizes[0]) <= self.body):
            return await self.too_large(receive, send)
        taken, started = 0, False

        async def take() -> dict:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.body:
                raise TooLarge
            return message

        async def give(message: dict) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, take, give)
        except TooLarge:
            if not started:
                await self.too_large(receive, send)

    async def too_large(self, receive: Callable, send: Callable) -> None:
        """Throw some of the rest away: a client that is still sending when we hang up does not see the answer."""
        rest, message = 4 * self.body, {"more_body": True}
        while rest > 0 and message.get("more_body"):
            message = await receive()
            rest -= len(message.get("body", b""))
        await answer(send, 413, f"a request has at most {self.body} bytes")

    def refusal(self, path: str, headers: dict[bytes, str]) -> tuple[int, str] | None:
        """Status and reason."""
        named, origin = headers.get(b"host", ""), headers.get(b"origin")
        if self.loopback and host(f"//{named}")[0] not in LOOPBACK:
            return 421, f"this server is not {named[:80]!r}"
        if origin is not None and host(origin)[1] != named:
            return 403, "pages of other origins may not use this server"
        given = headers.get(b"authorization", "").encode("latin-1")
        if self.token and path not in OPEN and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            return 401, "this server wants its token: Authorization: Bearer TOKEN"
        return None


def host(url: str) -> tuple[str | None, str | None]:
    """Its host, without and with the port; None of what is no URL."""
    try:
        return urlsplit(url).hostname, urlsplit(url).netloc
    except ValueError:
        return None, None


async def answer(send: Callable, status: int, why: str) -> None:
    body = json.dumps({"error": {"message": why, "type": "invalid_request_error", "param": None, "code": str(status)}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
