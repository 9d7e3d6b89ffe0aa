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
from diffrl.reward_rows import Final, Log, Rows, attempts, report
from diffrl.types import Reward

CONTENT_TYPE = "application/x-safetensors"


def encode_request(images: Tensor, prompts: Sequence[str]) -> bytes:
    """The body of a request: see the top of this file."""
    text = torch.frombuffer(bytearray(json.dumps(list(prompts)).encode()), dtype=torch.uint8)
    return save({"images": images.detach().cpu().contiguous(), "prompts": text})


def decode_request(body: bytes) -> tuple[Tensor, list[str]]:
    """(images, prompts) of a request's body. ValueError: not such a body, or images and prompts that do not go together."""
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
    """The body of a reply; values that are not finite become null, as JSON has no name for them."""
    return json.dumps({"values": [v if math.isfinite(v) else None for v in values], "failed": failed}).encode()


def decode_reply(body: bytes, rows: int) -> tuple[list[float], int]:
    """(values, failed) of a reply to a request of `rows` rows. ValueError: anything else."""
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
    another try would get the same) and ValueError for more than `limit` bytes."""
    kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
    connection = kind(target.hostname or "", target.port, timeout=timeout)
    path = (target.path or "/") + (f"?{target.query}" if target.query else "")
    try:
        connection.request("POST", path, body, {"Content-Type": CONTENT_TYPE, **headers})
        reply = connection.getresponse()
        data = reply.read(limit + 1)
    finally:
        connection.close()
    if reply.status != 200:
        kind_of_error = Final if 300 <= reply.status < 500 and reply.status not in (408, 429) else RuntimeError
        raise kind_of_error(f"HTTP status {reply.status} {reply.reason}: {data[:200].decode('utf-8', 'replace')}")
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
    workers: int = 2,
    headers: Mapping[str, str] | None = None,
    log: Log | None = None,
) -> Reward:
    """The reward that a server answers with, `python -m diffrl.reward_server` or any other that speaks the encoding above.

    A request that finds no server, is answered with an error or by anything malformed, or has no whole answer in time, is
    sent again `retries` times after growing pauses (an answer of the kind 3xx or 4xx is final, but for 408 and 429); then
    its rows are nan, and counted together with those that the server counted. The call returns within about
    timeout (retries + 1), whatever the server does. Redirects and proxies are not followed.

    Args:
        url: http:// or https:// address.
        timeout: seconds per try, > 0.
        retries: further tries, >= 0.
        pause: seconds before the second try, doubled before each further one, >= 0.
        batch: rows per request, >= 1.
        workers: requests at a time, >= 1.
        headers: sent with every request, for instance Authorization.
        log: see `reward_rows.report`.

    Returns:
        A reward for images and videos. The one reward that needs a network when it is called; nothing is sent before.

    Raises:
        ValueError: another kind of address, an option outside its range. The reward: a malformed call.
    """
    target = _address(url)
    require_number("timeout", timeout, low=0, open_low=True)
    require_number("pause", pause, low=0)
    require_count("retries", retries, low=0)
    require_count("batch", batch)
    require_count("workers", workers)
    sent = dict(headers or {})

    def call(images: Tensor, prompts: Sequence[str]) -> Tensor:
        require_call("remote", images, prompts)
        starts = list(range(0, len(prompts), batch))

        def ask(i: int) -> tuple[list[float], int]:
            part, texts = images[starts[i] : starts[i] + batch], prompts[starts[i] : starts[i] + batch]
            limit = 4096 + 64 * len(texts)  # a number takes up to 24 characters
            body = encode_request(part, texts)
            return decode_reply(_post(target, body, sent, timeout=timeout, limit=limit), len(texts))

        found = attempts(len(starts), ask, workers=workers, timeout=timeout, retries=retries, pause=pause)
        return report("remote", _joined(found, starts, len(prompts), batch), log)

    return call


def _joined(found: Sequence[Any], starts: Sequence[int], rows: int, batch: int) -> Rows:
    """Answers of requests, in order -> the rows they are about."""
    values, failed, first = torch.full((rows,), torch.nan), 0, None
    for start, answer in zip(starts, found, strict=True):
        size = min(batch, rows - start)
        if isinstance(answer, Exception):
            failed, first = failed + size, first or answer
            continue
        numbers, missing = answer
        values[start : start + size] = torch.tensor(numbers)
        if missing:
            failed, first = failed + missing, first or RuntimeError(f"the server could not score {missing} rows")
    return Rows(values, failed, first)
