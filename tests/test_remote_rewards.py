"""A reward over HTTP, end to end on this machine: values, servers that hang, fail, lie or flood, and clients that do."""

import http.client
import json
import math
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffrl.remote_rewards import decode_reply, decode_request, encode_reply, encode_request
from diffrl.reward_server import RewardServer, main, serve, served_reward
from diffrl.rewards import remote

ROOT = Path(__file__).parents[1]
NAN = math.nan


def images_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 3, 3).contiguous()


def brightness(images, prompts):
    """The number of the picture plus the prompt's length; a prompt "bad" raises, "nan" has no score."""
    if "bad" in prompts:
        raise RuntimeError("bad prompt")
    values = images.float().flatten(1).mean(1) + torch.tensor([float(len(p)) for p in prompts])
    return torch.where(torch.tensor([p == "nan" for p in prompts]), torch.nan, values)


def same(a, b) -> bool:
    return torch.equal(torch.as_tensor(a).nan_to_num(-99), torch.as_tensor(b).nan_to_num(-99))


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def served():
    with running(serve(brightness, max_bytes=100_000, patience=20)) as server:
        yield server


class Counts(list):
    def __call__(self, *event):
        self.append(event)


# ---- end to end


def test_values_come_back_exactly_in_order(served):
    images, prompts = images_of(5, 1, 9, 200, 0), ["a", "bb", "", "ünï ☃", '"quoted"\n']
    for batch in (1, 2, 32):
        counts = Counts()
        values = remote(served.url, batch=batch, log=counts)(images, prompts)
        assert torch.equal(values, brightness(images, prompts))
        assert values.dtype == torch.float32
        assert counts == []
    videos = images[:4].reshape(2, 2, 2, 3, 3)
    assert torch.equal(remote(served.url)(videos, ["a", "b"]), brightness(videos, ["a", "b"]))
    assert remote(served.url)(images[:0], []).shape == (0,)


@settings(max_examples=15)
@given(st.permutations(range(6)), st.integers(1, 6), st.integers(1, 4))
def test_rows_do_not_depend_on_one_another(served, order, count, batch):
    images, prompts = images_of(*range(6)), ["nan" if i == 3 else "x" * i for i in range(6)]
    reward = remote(served.url, batch=batch)
    part = list(order[:count])
    assert same(reward(images[part], [prompts[i] for i in part]), brightness(images, prompts)[part])


def test_rows_that_fail_at_the_server_are_nan_and_counted(served, capfd):
    counts = Counts()
    images, prompts = images_of(1, 2, 3, 4), ["a", "bad", "nan", "d"]
    assert same(remote(served.url, log=counts)(images, prompts), [2.0, NAN, NAN, 5.0])
    assert counts == [("failed", 1)]
    with pytest.warns(RuntimeWarning, match="remote: 1 of 4 rows have no score .*the server could not score 1 rows"):
        remote(served.url)(images, prompts)
    assert "1 of 4 rows failed: RuntimeError('bad prompt')" in capfd.readouterr().err


def test_malformed_calls_are_refused_before_anything_is_sent():
    reward = remote("http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"remote: 2 images .* but 1 prompts"):
        reward(images_of(1, 2), ["a"])
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        reward(images_of(1).float(), ["a"])


@pytest.mark.parametrize(
    "url",
    ["", "localhost:80", "file:///etc/passwd", "ftp://host", "http://", "http://host:0", "http://host:x", None, 3],
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(ValueError, match="url must be http://"):
        remote(url)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"retries": -1}, {"pause": -1}, {"batch": 0}, {"workers": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        remote("http://host", **options)


# ---- servers that are not there, hang, fail, lie or flood


@contextmanager
def strange(answer):
    """A server whose POST is `answer(handler, body, number of the request)`."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, dict(self.headers), body))
            answer(self, body, len(asked))

        def log_message(self, *rest):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.asked, server.url = asked, f"http://127.0.0.1:{server.server_address[1]}/score?v=1"
    with running(server):
        yield server


def reply(handler, status: int, body: bytes, **headers) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def test_a_server_that_is_not_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    counts = Counts()
    assert remote(url, pause=0.01, log=counts)(images_of(1, 2), ["a", "b"]).isnan().all()
    assert counts == [("failed", 2)]


def test_a_server_that_hangs_costs_no_more_than_its_tries():
    release = threading.Event()
    counts = Counts()
    with strange(lambda handler, body, n: release.wait(60)) as server:
        began = time.monotonic()
        reward = remote(server.url, timeout=0.4, retries=1, pause=0.01, batch=1, workers=2, log=counts)
        assert reward(images_of(*range(8)), list("abcdefgh")).isnan().all()
        assert time.monotonic() - began < 6
        release.set()
    assert counts == [("failed", 8)]


def test_a_server_that_drips_its_answer_hangs_too():
    release, counts = threading.Event(), Counts()

    def drip(handler, body, n):
        handler.send_response(200)
        handler.end_headers()
        while not release.wait(0.05):
            handler.wfile.write(b" ")

    with strange(drip) as server:
        began = time.monotonic()
        assert remote(server.url, timeout=0.5, retries=0, log=counts)(images_of(1), ["a"]).isnan().all()
        assert time.monotonic() - began < 6
        release.set()
    assert counts == [("failed", 1)]


@pytest.mark.parametrize(("status", "requests"), [(500, 3), (503, 3), (429, 3), (404, 1), (413, 1), (302, 1)])
def test_errors_are_tried_again_unless_they_are_final(status, requests):
    counts = Counts()
    with strange(lambda h, b, n: reply(h, status, b"no", Location="http://127.0.0.1:9/")) as server:
        assert remote(server.url, pause=0.001, log=counts)(images_of(1, 2), ["a", "b"]).isnan().all()
        assert len(server.asked) == requests
        assert counts == [("failed", 2)]
        with pytest.warns(RuntimeWarning, match=f"HTTP status {status} .*: no"):
            remote(server.url, retries=0)(images_of(1), ["a"])


def test_a_server_that_recovers_is_believed_and_one_bad_request_costs_its_rows_alone():
    counts = Counts()

    def answer(handler, body, n):
        images, prompts = decode_request(body)
        if n == 1 or "bad" in prompts:
            return reply(handler, 500, b"")
        return reply(handler, 200, encode_reply(brightness(images, prompts).tolist(), 0))

    with strange(answer) as server:
        reward = remote(server.url, pause=0.001, batch=2, workers=1, headers={"Authorization": "Bearer x"}, log=counts)
        values = reward(images_of(1, 2, 3, 4, 5), ["a", "b", "bad", "d", "e"])
    assert same(values, [2.0, 3.0, NAN, NAN, 6.0])
    assert counts == [("failed", 2)]
    path, headers, _ = server.asked[0]
    assert path == "/score?v=1"
    assert headers["Authorization"] == "Bearer x"
    assert headers["Content-Type"] == "application/x-safetensors"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"values": [1]}',
        b'{"values": [1], "failed": 0}',  # one number for two rows
        b'{"values": [1, 2, 3], "failed": 0}',
        b'{"values": [1, "2"], "failed": 0}',
        b'{"values": [1, true], "failed": 0}',
        b'{"values": "12", "failed": 0}',
        b'{"values": [1, 2], "failed": -1}',
        b'{"values": [1, 2], "failed": 3}',
        b'{"values": [1, 2], "failed": null}',
        b'{"values": [1, 1' + b"0" * 400 + b'], "failed": 0}',
    ],
)
def test_a_malformed_reply_is_no_reply(body):
    counts = Counts()
    with strange(lambda h, b, n: reply(h, 200, body)) as server:
        values = remote(server.url, retries=1, pause=0.001, log=counts)(images_of(1, 2), ["a", "b"])
        assert len(server.asked) == 2
    assert values.isnan().all()
    assert counts == [("failed", 2)]


def test_a_flood_is_not_read_to_its_end():
    counts, written = Counts(), []

    def flood(handler, body, n):
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(2000):
                written.append(handler.wfile.write(b" " * 65536))
        except OSError:
            pass

    with strange(flood) as server:
        assert remote(server.url, retries=0, log=counts)(images_of(1), ["a"]).isnan().all()
        time.sleep(0.2)
    assert counts == [("failed", 1)]
    assert sum(written) < 2000 * 65536
    exact = encode_reply([1.0], 0)
    with strange(lambda h, b, n: reply(h, 200, exact + b" " * (4096 + 64 + 1 - len(exact)))) as server:
        with pytest.warns(RuntimeWarning, match="longer than 4160 bytes"):
            remote(server.url, retries=0)(images_of(1), ["a"])
    with strange(lambda h, b, n: reply(h, 200, exact + b" " * (4096 + 64 - len(exact)))) as server:
        assert remote(server.url, retries=0)(images_of(1), ["a"]).item() == 1.0


def test_control_a_good_reply_is_a_reply():
    with strange(lambda h, b, n: reply(h, 200, b'{"values": [1, null], "failed": 1}')) as server:
        counts = Counts()
        assert same(remote(server.url, log=counts)(images_of(1, 2), ["a", "b"]), [1.0, NAN])
        assert len(server.asked) == 1
        assert counts == [("failed", 1)]


# ---- the encoding


@given(st.lists(st.text(), max_size=4), st.integers(1, 3), st.booleans())
def test_requests_come_back_as_they_were(prompts, size, video):
    shape = (len(prompts), *([2] if video else []), size, 2, 3)
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(size), dtype=torch.uint8)
    found, texts = decode_request(encode_request(images, prompts))
    assert torch.equal(found, images)
    assert texts == prompts


def test_requests_of_parts_of_a_tensor_come_back_as_they_were():
    images = torch.arange(2 * 3 * 4 * 3, dtype=torch.uint8).reshape(2, 3, 4, 3)
    turned = images.transpose(1, 2)[1:]
    assert torch.equal(decode_request(encode_request(turned, ["\ud800 half a pair"]))[0], turned)
    assert b"pickle" not in encode_request(images, ["a", "b"])


@given(st.lists(st.floats(width=32) | st.integers(-5, 5).map(float), max_size=5))
def test_replies_come_back_as_they_were(values):
    found, failed = decode_reply(encode_reply(values, len(values)), len(values))
    assert failed == len(values)
    for value, back in zip(values, found, strict=True):
        assert back == value if math.isfinite(value) else math.isnan(back)
    json.loads(encode_reply(values, 0), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def body_of(**tensors) -> bytes:
    from safetensors.torch import save

    return save(tensors)


def text(value) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


BODIES = {
    "empty": b"",
    "zeros": bytes(100),
    "pickle": b"\x80\x04cos\nsystem\n.",
    "header without end": struct.pack("<Q", 2**60) + b"{}",
    "no images": body_of(prompts=text(["a"])),
    "more": body_of(images=images_of(1), prompts=text(["a"]), other=images_of(1)),
    "floats": body_of(images=images_of(1).float(), prompts=text(["a"])),
    "a plane": body_of(images=images_of(1)[0], prompts=text(["a"])),
    "not json": body_of(images=images_of(1), prompts=torch.tensor([1, 2], dtype=torch.uint8)),
    "a string": body_of(images=images_of(1), prompts=text("a")),
    "numbers": body_of(images=images_of(1), prompts=text([1])),
    "two prompts": body_of(images=images_of(1), prompts=text(["a", "b"])),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_request_is_refused(served, name):
    with pytest.raises(ValueError, match="request"):
        decode_request(BODIES[name])
    status, found = post(served, BODIES[name])
    assert status == 400
    assert "request" in json.loads(found)["error"]


# ---- the server


def test_a_server_knows_where_it_is_reached(served):
    assert isinstance(served, RewardServer)
    assert served.url == f"http://127.0.0.1:{served.server_address[1]}"
    reply = decode_reply(served.score(encode_request(images_of(3), ["a"])), 1)
    assert reply == ([4.0], 0)


def post(server, body: bytes, *, length: str | None = None, method: str = "POST", path: str = "/") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.putrequest(method, path)
    if length != "none":
        connection.putheader("Content-Length", length or str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def test_the_server_says_that_it_is_there_and_refuses_the_rest(served):
    assert post(served, b"", method="GET", path="/health") == (200, b'{"ok": true}')
    assert post(served, b"", method="GET", path="/etc/passwd")[0] == 404
    assert post(served, b"", method="DELETE")[0] == 501
    for length in ("none", "-1", "1e3", "x", "٣"):
        if length.isascii():
            assert post(served, b"", length=length)[0] == 411
    assert post(served, encode_request(images_of(1), ["a"]))[0] == 200  # and goes on


@pytest.mark.parametrize("size", [100_001, 5_000_000])
def test_an_oversized_body_is_refused_and_the_server_goes_on(served, size):
    counts = Counts()
    reward = remote(served.url, pause=0.001, log=counts)
    large = torch.zeros(1, size // 3 + 1, 1, 3, dtype=torch.uint8)
    assert reward(large, ["a"]).isnan().all()
    assert counts == [("failed", 1)]
    assert reward(images_of(4), ["a"]).item() == 5.0
    status, body = post(served, b"", length="9" * 30)
    assert status == 413
    assert "100000 bytes" in json.loads(body)["error"]


def test_clients_that_hang_or_stop_do_not_stop_the_server():
    with running(serve(brightness, patience=0.3, requests=2)) as server:
        silent = [socket.create_connection(server.server_address[:2]) for _ in range(3)]
        halves = []
        for _ in range(2):  # both places taken by bodies that do not come
            half = socket.create_connection(server.server_address[:2])
            half.sendall(b"POST / HTTP/1.0\r\nContent-Length: 50\r\n\r\nabc")
            halves.append(half)
        assert remote(server.url, retries=8, pause=0.1, timeout=20)(images_of(4), ["a"]).item() == 5.0
        for connection in (*silent, *halves):
            connection.close()


def test_a_body_that_ends_early_is_refused():
    with running(serve(brightness, patience=20)) as server:
        gone = socket.create_connection(server.server_address[:2], timeout=20)
        gone.sendall(b"POST / HTTP/1.0\r\nContent-Length: 50\r\n\r\nabc")
        gone.shutdown(socket.SHUT_WR)
        assert b"the body ends after 3 of 50 bytes" in gone.makefile("rb").read()
        gone.close()


def test_a_body_that_drips_in_is_not_waited_for():
    with running(serve(brightness, patience=0.4)) as server:
        slow = socket.create_connection(server.server_address[:2], timeout=20)
        slow.sendall(b"POST / HTTP/1.0\r\nContent-Length: 100000\r\n\r\n")
        began, closed = time.monotonic(), False
        while not closed and time.monotonic() - began < 15:
            try:
                slow.sendall(b"x")
                time.sleep(0.05)
            except OSError:
                closed = True
        assert closed
        slow.close()


def test_too_many_requests_at_a_time_are_sent_away():
    entered, release = threading.Event(), threading.Event()

    def slow(images, prompts):
        entered.set()
        release.wait(60)
        return brightness(images, prompts)

    with running(serve(slow, requests=1)) as server:
        body, answers = encode_request(images_of(1), ["a"]), []
        first = threading.Thread(target=lambda: answers.append(post(server, body)), daemon=True)
        first.start()
        assert entered.wait(20)
        assert post(server, body)[0] == 503
        release.set()
        first.join(20)
        assert answers == [(200, encode_reply([2.0], 0))]


def test_a_client_that_does_not_wait_is_nobody_to_answer(capfd):
    entered, release = threading.Event(), threading.Event()

    def slow(images, prompts):
        entered.set()
        release.wait(60)
        return brightness(images, prompts)

    with running(serve(slow)) as server:
        body = encode_request(images_of(1), ["a"])
        gone = socket.create_connection(server.server_address[:2], timeout=20)
        gone.sendall(b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert entered.wait(20)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()  # with a reset: writing to it fails
        release.set()
        assert remote(server.url)(images_of(4), ["a"]).item() == 5.0
        time.sleep(0.1)
    assert "Traceback" not in capfd.readouterr().err


def test_the_reward_is_asked_by_one_request_at_a_time():
    busy, together = threading.Lock(), []

    def alone(images, prompts):
        together.append(busy.acquire(blocking=False))
        time.sleep(0.02)
        busy.release()
        return brightness(images, prompts)

    with running(serve(alone)) as server:
        reward = remote(server.url, batch=1, workers=4)
        assert reward(images_of(1, 2, 3, 4), list("abcd")).tolist() == [2.0, 3.0, 4.0, 5.0]
    assert together == [True] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": 3}, "reward must be a callable"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"port": 70_000}, "port"),
        ({"port": -1}, "port"),
        ({"patience": 0}, "patience"),
        ({"requests": 0}, "requests"),
    ],
)
def test_servers_with_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        serve(**{"reward": brightness, **options})


def make_brightness():
    return brightness


def make_nothing():
    return None


def test_rewards_are_served_by_name_or_from_a_factory():
    assert served_reward("test_remote_rewards:make_brightness")(images_of(1), ["a"]).item() == 2.0
    flat = served_reward("jpeg_incompressibility")
    assert flat(images_of(1), ["a"]).item() > 0
    for name, message in (
        ("beauty", "must be one of"),
        ("nowhere:f", "makes no reward: ModuleNotFoundError"),
        ("test_remote_rewards:nothing_here", "AttributeError"),
        ("test_remote_rewards:make_nothing", "made no callable: None"),
        ("test_remote_rewards:NAN", "'float' object is not callable"),
        ("remote:nowhere", "url must be"),
    ):
        with pytest.raises(ValueError, match=message):
            served_reward(name)


def test_the_command_refuses_in_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words in (["beauty"], ["jpeg_compressibility", "--port", "-1"], ["jpeg_compressibility", "--port", port]):
            assert main(words) == 2
            error = capsys.readouterr().err
            assert error.startswith("python -m diffrl.reward_server: error: ")
            assert error.count("\n") == 1


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    (tmp_path / "mine.py").write_text("def make():\n    return lambda images, prompts: [len(p) for p in prompts]\n")
    words = [sys.executable, "-m", "diffrl.reward_server", "mine:make", "--port", "0"]
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving mine:make on http://127.0.0.1:")
        assert remote(line.split()[-1])(images_of(1, 2), ["abc", ""]).tolist() == [3.0, 0.0]
        process.send_signal(2)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
