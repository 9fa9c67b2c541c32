"""ASGI middleware that checks requests: allowed hosts and origins, size and time limits, and security headers.

It is plain ASGI, so that no other code runs before it. A page of another site that the user has open can send requests
to this machine. Three checks prevent this: the Host must be a name of this server (a rebound DNS name is not), the
Origin must be this server, and Sec-Fetch-Site, set by browsers, must not name another site.
"""

import asyncio
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from regard.studio.limits import LIMITS, Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# The requests that may have a large body, with the name of the field of `Limits` that limits the body.
LARGER = {("POST", "/api/traces"): "trace", ("POST", "/api/ask"): "question"}

log = logging.getLogger("regard.studio")


def hosts(host: str, port: int) -> frozenset[str]:
    """Return the Host headers that a server bound to `host` accepts.

    >>> sorted(hosts("127.0.0.1", 7788))
    ['127.0.0.1:7788', '[::1]:7788', 'localhost:7788']
    """
    name = f"[{host}]" if ":" in host else host
    names = LOOPBACK if is_loopback(host) or host in ("0.0.0.0", "::") else (name,)
    return frozenset(f"{name}:{port}" if port != 80 else name for name in names)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address.

    >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """The outermost ASGI layer of the application, which checks every request before it is handled."""

    def __init__(self, app: App, *, host: str, port: int, limits: Limits = LIMITS) -> None:
        self.app = app
        self.limits = limits
        self.port = port
        self.hosts = hosts(host, port)
        # A server that is bound to all addresses accepts any IP address in the Host header.
        self.any_address = host in ("0.0.0.0", "::")

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection, or reject it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        # a scope other than "http" or "lifespan" is a websocket, which the studio does not have
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        refusal = self.refusal(scope)
        if refusal:
            return await answer(send, *refusal)
        return await self.pass_on(scope, receive, send)

    def refusal(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        """Return the HTTP status and the reason if this request is rejected, else None."""
        host, *more = values(scope, b"host") or [""]
        if more or not self.is_mine(host):
            return 421, f"the Host must be one of {', '.join(sorted(self.hosts))}, got {host[:80]!r}"
        origins = values(scope, b"origin")
        if any(origin != f"http://{host}" for origin in origins):
            return 403, f"the Origin must be http://{host}, got {origins[0][:80]!r}"
        sites = values(scope, b"sec-fetch-site")
        navigating = scope["method"] == "GET" and values(scope, b"sec-fetch-mode") == ["navigate"]
        if any(site not in ("same-origin", "none") for site in sites) and not (navigating and scope["path"] == "/"):
            return 403, f"only pages of this studio may ask; the browser says the request is {sites[0][:20]!r}"
        if scope["method"] not in ("GET", "HEAD", "POST", "DELETE"):
            return 405, f"the method must be GET, HEAD, POST or DELETE, got {scope['method'][:20]}"
        lengths = values(scope, b"content-length")
        if lengths and not (len(lengths) == 1 and lengths[0].isdecimal() and len(lengths[0]) < 16):
            return 400, "the Content-Length must be a number"
        if lengths and int(lengths[0]) > self.most(scope):
            return 413, f"the body must have at most {self.most(scope)} bytes, got {lengths[0]}"
        return None

    def is_mine(self, host: str) -> bool:
        """Return whether a Host header names this server.

        Only known names are accepted, because anyone can register a DNS name that resolves to this machine.
        """
        if host.lower() in self.hosts:
            return True
        name, _, port = host.rpartition(":")
        if not self.any_address or port != str(self.port):
            return False
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def most(self, scope: MutableMapping[str, Any]) -> int:
        most: int = getattr(self.limits, LARGER.get((scope["method"], scope["path"]), "body"))
        return most

    async def pass_on(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request to the application, with limits of its size and duration, and add headers to the response."""
        loop = asyncio.get_running_loop()
        most, until = self.most(scope), loop.time() + self.limits.receive_seconds
        seen, started, whole = 0, False, False

        async def bounded_receive() -> Message:
            nonlocal seen, whole
            if whole:  # the body has been received completely, so the next message is the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                limit = self.limits.receive_seconds
                raise BrokenBodyError(408, f"the body must arrive within {limit:g} seconds, got {seen} bytes") from None
            seen += len(message.get("body", b""))
            if seen > most:
                raise BrokenBodyError(413, f"the body must have at most {most} bytes, got more")
            whole = not message.get("more_body", False)
            return message

        async def headed_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                names = {name for name, _ in message["headers"]}
                headers = [header for header in message["headers"] if header[0] != b"server"]
                message["headers"] = headers + [header for header in HEADERS if header[0] not in names]
            await send(message)

        limit = self.limits.receive_seconds + self.limits.answer_seconds
        try:
            async with asyncio.timeout(limit):
                await self.app(scope, bounded_receive, headed_send)
        except BrokenBodyError as broken:
            if not started:
                await answer(send, broken.status, str(broken))
        except TimeoutError:
            if not started:
                await answer(send, 503, f"no answer within {limit:g} seconds: ask for less")
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await answer(send, 500, "the studio made a mistake; its log says which")


class BrokenBodyError(Exception):
    """The error of a body that is too large or too slow. Frameworks do not handle this exception."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def values(scope: MutableMapping[str, Any], name: bytes) -> list[str]:
    """Return the values of all headers with this name."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value.decode("latin-1") for key, value in headers if key == name]


async def answer(send: Send, status: int, message: str) -> None:
    """Send an error response as JSON."""
    body = json.dumps({"error": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    if status in (408, 413):  # the server does not read the rest of the body
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
