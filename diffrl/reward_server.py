"""Serves a reward over HTTP to `diffrl.remote_rewards.remote`:  python -m diffrl.reward_server REWARD [--port 8000]

REWARD is a name as for `diffrl train --reward` (ocr, clip:PATH ...) or MODULE:FACTORY, a function that returns the reward
when it is called without arguments. POST scores; GET /health answers {"ok": true}. The reward is asked by one request at a
time. There is no authentication and no encryption: serve where only those who may ask can reach it.
"""

import argparse
import io
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from typing import Any

from diffrl.checks import require_count, require_number
from diffrl.remote_rewards import decode_request, encode_reply
from diffrl.reward_names import is_known, make_reward
from diffrl.reward_rows import score_rows
from diffrl.types import Reward


class RewardServer(ThreadingHTTPServer):
    """A server that is bound but not yet running: `serve_forever()` runs it, `shutdown()` from another thread ends that,
    `server_close()` frees the port. Made by `serve`. Its threads do not keep the interpreter alive."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], reward: Reward, *, max_bytes: int, patience: float, requests: int):
        self.reward, self.max_bytes, self.patience = reward, max_bytes, patience
        self.alone = threading.Lock()  # models are not made to be called by several threads
        self.places = threading.BoundedSemaphore(requests)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """Where it answers, for `remote`."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def score(self, body: bytes) -> bytes:
        """The reply to a request's body; rows whose scoring raises are null and counted. ValueError: a malformed body."""
        images, prompts = decode_request(body)
        with self.alone:
            rows = score_rows(self.reward, images, prompts, batch=max(len(prompts), 1))
        if rows.failed:
            print(f"{rows.failed} of {len(prompts)} rows failed: {rows.error!r:.300}", file=sys.stderr, flush=True)
        return encode_reply(rows.values.tolist(), rows.failed)


class _Arriving(io.RawIOBase):
    """What a connection brings within so many seconds in all, then TimeoutError, even if a byte drips in now and then."""

    def __init__(self, connection: socket.socket, seconds: float):
        self.connection, self.end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """One request per connection, all of it (line, headers, body, or what of it is discarded) within the server's patience.
    Errors are JSON, {"error": reason}."""

    server: RewardServer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Arriving(self.connection, self.server.patience))

    def log_message(self, format: str, *args: object) -> None:  # one line per request would bury what failed
        pass

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.connection.settimeout(self.server.patience)  # what was left for the request is not for the answer
        try:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:  # the other side did not wait: nobody to answer
            self.close_connection = True

    def _refuse(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, json.dumps({"error": reason}).encode(), headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, a strange method or a malformed request, in JSON like everything else."""
        self.request_version = "HTTP/1.0"  # not known where the line is malformed; without one there would be no status
        self._refuse(code, message or HTTPStatus(code).phrase)

    def do_GET(self) -> None:
        """Says that the server is there."""
        if self.path == "/health":
            self._answer(200, b'{"ok": true}')
        else:
            self._refuse(404, "GET /health, or POST a request")

    def do_POST(self) -> None:
        """Scores a request."""
        given = self.headers.get("Content-Length", "")
        if not (given.isascii() and given.isdigit()):
            return self._refuse(411, f"Content-Length must be a number, got {given!r:.40}")
        if len(given) > 18 or int(given) > self.server.max_bytes:
            self._refuse(413, f"the body may have {self.server.max_bytes} bytes, not {given:.40}")
            return self._discard(int(given[:18]))
        if not self.server.places.acquire(blocking=False):
            self._refuse(503, "too many requests at a time", {"Retry-After": "1"})
            return self._discard(int(given))
        try:
            body = self._received(int(given))
            if len(body) < int(given):
                raise ValueError(f"the body ends after {len(body)} of {given} bytes")
            status, answer = 200, self.server.score(body)
        except ValueError as error:
            status, answer = 400, json.dumps({"error": str(error)}).encode()
        except OSError:  # the other side is gone, or silent: nobody to answer
            return
        finally:
            self.server.places.release()  # before the answer: who has it may ask again at once
        self._answer(status, answer)

    def _received(self, size: int) -> bytes:
        """Up to `size` bytes. TimeoutError: the request takes longer than the server has patience."""
        parts = []
        while size > 0 and (part := self.rfile.read1(min(size, 2**20))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _discard(self, most: int) -> None:
        """Reads up to so many bytes of a refused body, as long as the request has time: a client that is still sending when
        the connection closes would see a broken pipe instead of the answer."""
        try:
            while most > 0 and (part := self.rfile.read1(min(most, 2**16))):
                most -= len(part)
        except OSError:
            pass


def serve(
    reward: Reward,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_bytes: int = 2**28,
    patience: float = 120.0,
    requests: int = 4,
) -> RewardServer:
    """A server of this reward, bound to host and port, for `serve_forever()`.

    Args:
        reward: asked by one request at a time.
        host: an address of this machine; the default is reached from this machine only.
        port: 0: any free one, see `RewardServer.url`.
        max_bytes: of a request's body, which is held in memory (a 512 x 512 image has 786,432); more is refused and not kept.
        patience: seconds that a request may take to arrive, from its first line to the end of its body, > 0.
        requests: bodies held at a time; further ones are answered 503 and Retry-After, and `remote` tries again.

    Raises:
        ValueError: a reward that cannot be called, an option outside its range. OSError: the address cannot be bound.

    No example: binds a port.
    """
    if not callable(reward):
        raise ValueError(f"reward must be a callable, got {reward!r}")
    require_count("max_bytes", max_bytes)
    require_count("port", port, low=0)
    require_count("requests", requests)
    require_number("patience", patience, low=0, open_low=True)
    if port > 65535:
        raise ValueError(f"port must be below 65536, got {port}")
    return RewardServer((host, port), reward, max_bytes=max_bytes, patience=patience, requests=requests)


def served_reward(name: str, *, threads: int = 2, device: str = "cpu") -> Reward:
    """The reward that the command line names: see the top of this file. ValueError: it cannot be made; ImportError.

    >>> served_reward("math:pi")
    Traceback (most recent call last):
    ValueError: 'math:pi' makes no reward: TypeError: 'float' object is not callable
    """
    if is_known(name):
        return make_reward(name, threads=threads, device=device)
    module, _, factory = name.partition(":")
    if not module or not factory:
        return make_reward(name)  # which says what there is
    try:
        reward = getattr(import_module(module), factory)()
    except Exception as error:  # whatever the user's module or factory raises
        raise ValueError(f"{name!r} makes no reward: {type(error).__name__}: {error}") from error
    if not callable(reward):
        raise ValueError(f"{name!r} made no callable: {reward!r:.80}")
    return reward


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 when interrupted, 2 on bad input. No example: serves until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m diffrl.reward_server", description="Serve a reward over HTTP.")
    parser.add_argument("reward", metavar="REWARD", help="a name as for diffrl train --reward, or MODULE:FACTORY")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    parser.add_argument("--max-megabytes", type=int, default=256, help="of one request (default: 256)")
    parser.add_argument("--requests", type=int, default=4, help="held at a time; further ones wait (default: 4)")
    parser.add_argument("--device", default="cpu", help="of a named reward's model (default: cpu)")
    parser.add_argument("--threads", type=int, default=2, help="of the OCR engine (default: 2)")
    options = parser.parse_args(arguments)
    try:
        reward = served_reward(options.reward, threads=options.threads, device=options.device)
        limits = {"max_bytes": options.max_megabytes * 2**20, "requests": options.requests}
        server = serve(reward, host=options.host, port=options.port, **limits)
    except (ValueError, ImportError, OSError) as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    print(f"serving {options.reward} on {server.url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
