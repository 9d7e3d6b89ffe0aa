"""A reward on another machine, over HTTP: the client `remote`, and the encoding that `diffrl.reward_server` shares.

A request is a POST whose body is a safetensors file (no pickle: nothing in it can run) with two tensors,

    images   UInt8 " b h w 3" or " b f h w 3", as they are
    prompts  UInt8 " n", the UTF-8 text of a JSON list of b strings

and the reply is JSON, {"values": [b numbers, null for no score], "failed": rows whose scoring raised}.
"""

import http.client
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import torch
from safetensors.torch import load, save
from torch import Tensor

from diffrl.checks import require_call, require_count, require_number
from diffrl.reward_rows import Busy, Final, Log, Rows, attempts, report
from diffrl.types import Reward

CONTENT_TYPE = "application/x-safetensors"


def encode_request(images: Tensor, prompts: Sequence[str]) -> bytes:
    """The body of a request: see the top of this file. No example: `decode_request` has one."""
    text = torch.frombuffer(bytearray(json.dumps(list(prompts)).encode()), dtype=torch.uint8)
    return save({"images": images.detach().cpu().contiguous(), "prompts": text})


def request_rows(images: Tensor, prompts: Sequence[str], *, batch: int, max_bytes: int) -> list[slice]:
    """The rows of each request, in order: as many as fit into `batch` rows and a body of `max_bytes`, but at least one.

    >>> request_rows(torch.zeros(3, 2, 2, 3, dtype=torch.uint8), ["a", "b", "c"], batch=2, max_bytes=10**6)
    [slice(0, 2, None), slice(2, 3, None)]
    """
    found: list[slice] = []
    size = 0
    for row, prompt in enumerate(prompts):
        own = images[row].numel() + len(json.dumps(prompt)) + 2  # a byte per number; the comma between two prompts
        if found and row - found[-1].start < batch and size + own <= max_bytes:
            found[-1], size = slice(found[-1].start, row + 1), size + own
        else:
            found.append(slice(row, row + 1))
            size = own + 512  # what safetensors puts in front, less than 300 bytes, and the brackets
    return found


def decode_request(body: bytes) -> tuple[Tensor, list[str]]:
    """(images, prompts) of a request's body. ValueError: not such a body, or images and prompts that do not go together.

    >>> images, prompts = decode_request(encode_request(torch.zeros(1, 2, 4, 3, dtype=torch.uint8), ["a cat"]))
    >>> tuple(images.shape), prompts
    ((1, 2, 4, 3), ['a cat'])
    """
    try:
        tensors = load(body)
        if set(tensors) != {"images", "prompts"}:
            raise ValueError(f"the tensors must be images and prompts, got {sorted(tensors)}")
        prompts = json.loads(bytes(tensors["prompts"].numpy()))
    except Exception as error:
        raise ValueError(f"not a request for a reward: {type(error).__name__}: {error!s:.200}") from None
    if not isinstance(prompts, list):
        raise ValueError(f"not a request for a reward: prompts must be a list, got {type(prompts).__name__}")
    require_call("request", tensors["images"], prompts)
    return tensors["images"], prompts


def encode_reply(values: Sequence[float], failed: int) -> bytes:
    """The body of a reply; values that are not finite become null, as JSON has no name for them.

    >>> encode_reply([0.5, math.nan], 1)
    b'{"values": [0.5, null], "failed": 1}'
    """
    return json.dumps({"values": [v if math.isfinite(v) else None for v in values], "failed": failed}).encode()


def decode_reply(body: bytes, rows: int) -> tuple[list[float], int]:
    """(values, failed) of a reply to a request of `rows` rows. ValueError: anything else.

    >>> decode_reply(b'{"values": [0.5, null], "failed": 1}', 2)
    ([0.5, nan], 1)
    """
    try:
        found = json.loads(body)
        values, failed = found["values"], found["failed"]
        numbers = [math.nan if value is None else value for value in values]
    except Exception as error:
        raise ValueError(f"not a reply of a reward: {body[:80]!r} ({type(error).__name__})") from None
    if len(numbers) != rows or not all(type(value) in (int, float) for value in numbers):
        raise ValueError(f"not a reply of a reward: {rows} numbers are needed, got {values!r:.200}")
    if type(failed) is not int or not 0 <= failed <= rows:
        raise ValueError(f"not a reply of a reward: failed must be in 0 ... {rows}, got {failed!r:.80}")
    return [float(value) for value in numbers], failed


def _address(url: str) -> SplitResult:
    """The parts of an address. ValueError: no http or https address with a host, a port that is none."""
    try:
        target = urlsplit(url)
        good = target.scheme in ("http", "https") and target.hostname and (target.port is None or target.port > 0)
    except (ValueError, AttributeError, TypeError):
        good = False
    if not good:
        raise ValueError(f"url must be http://HOST... or https://HOST..., got {url!r}")
    return target


def _post(target: SplitResult, body: bytes, headers: Mapping[str, str], *, timeout: float, limit: int) -> bytes:
    """The reply to one POST. Raises what the connection does, RuntimeError for another status than 200 (`Final` where
    another try would get the same, `Busy` for 503) and ValueError for more than `limit` bytes."""
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    connection = kind(target.hostname or "", target.port, timeout=timeout)
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    try:
        try:
            connection.request("POST", path, body, {"Content-Type": CONTENT_TYPE, **headers})
            reply = connection.getresponse()
        except (BrokenPipeError, ConnectionResetError) as error:  # it stopped listening: it may have said why
            try:
                reply = connection.getresponse()
            except Exception:
                raise error from None
        data = reply.read(limit + 1)
    finally:
        connection.close()
    if reply.status != 200:
        reason = f"HTTP status {reply.status} {reply.reason}: {data[:200].decode('utf-8', 'replace')}"
        if reply.status == 503:
            after = reply.getheader("Retry-After", "")  # a date, which it may also be, is as good as none
            raise Busy(reason, float(after) if after.isascii() and after.isdigit() else 0.0)
        raise (Final if 300 <= reply.status < 500 and reply.status not in (408, 429) else RuntimeError)(reason)
    if len(data) > limit:
        raise ValueError(f"the reply is longer than {limit} bytes")
    return data


def remote(
    url: str,
    *,
    timeout: float = 60.0,
    retries: int = 2,
    pause: float = 0.5,
    batch: int = 32,
    max_bytes: int = 2**27,
    workers: int = 2,
    headers: Mapping[str, str] | None = None,
    log: Log | None = None,
) -> Reward:
    """The reward that a server answers with, `python -m diffrl.reward_server` or any other that speaks the encoding above.

    A request that finds no server, is answered with an error or by anything malformed, or has no whole answer in time, is
    sent again `retries` times after growing pauses (an answer of the kind 3xx or 4xx is final, but for 408 and 429); then
    its rows are nan, and counted together with those that the server counted. A server that is busy (503) is asked again,
    not before the seconds of its Retry-After, as long as the call lasts. The call returns within about
    timeout (retries + 1), whatever the server does. Redirects and proxies are not followed.

    Args:
        url: http:// or https:// address.
        timeout: seconds per try, > 0.
        retries: further tries, >= 0.
        pause: seconds before the second try, doubled before each further one, >= 0.
        batch: rows per request at most, >= 1.
        max_bytes: of a request with several rows at most; below the server's limit (by default 2**28), or it refuses.
        workers: requests at a time, >= 1.
        headers: sent with every request, for instance Authorization.
        log: see `reward_rows.report`.

    Returns:
        A reward for images and videos. The one reward that needs a network when it is called; nothing is sent before.

    Raises:
        ValueError: another kind of address, an option outside its range. The reward: a malformed call. No example: needs a server.
    """
    target = _address(url)
    require_number("timeout", timeout, low=0, open_low=True)
    require_number("pause", pause, low=0)
    require_count("retries", retries, low=0)
    require_count("batch", batch)
    require_count("max_bytes", max_bytes)
    require_count("workers", workers)
    sent = dict(headers or {})

    def call(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("remote", images, prompts)
        spans = request_rows(images, prompts, batch=batch, max_bytes=max_bytes)

        def ask(i: int) -> tuple[list[float], int]:
            part, texts = images[spans[i]], prompts[spans[i]]
            limit = 4096 + 64 * len(texts)  # a number takes up to 24 characters
            reply = _post(target, encode_request(part, texts), sent, timeout=timeout, limit=limit)
            return decode_reply(reply, len(texts))

        found = attempts(len(spans), ask, workers=workers, timeout=timeout, retries=retries, pause=pause)
        return report("remote", _joined(found, spans, len(prompts)), log)

    return call


def _joined(found: Sequence[Any], spans: Sequence[slice], rows: int) -> Rows:
    """Answers of requests, in order -> the rows they are about."""
    values, failed, first = torch.full((rows,), torch.nan), 0, None
    for span, answer in zip(spans, found, strict=True):
        if isinstance(answer, Exception):
            failed, first = failed + span.stop - span.start, first or answer
            continue
        numbers, missing = answer
        values[span] = torch.tensor(numbers)
        if missing:
            failed, first = failed + missing, first or RuntimeError(f"the server could not score {missing} rows")
    return Rows(values, failed, first)
