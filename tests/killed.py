"""Run as a script: trains through the command line in forked children, kills them at random moments, resumes them.

    python killed.py PIPE FOLDER

Everything is imported once, before the first fork, so that a child costs no more than its training. Prints one line of
JSON: {name of the run: exit codes of its children, -9 for a kill}. Runs: whole, killed, early, interrupted.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from small import small_settings, words

ITERATIONS = 7


def child(arguments, log):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        from diffrl.cli import main

        code = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rows(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.is_file() else -1


def finish(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def stopped(pid, folder, count, number, delay):
    """Exit code of the child, which got the signal once its folder held `count` rows, and `delay` seconds later."""
    while rows(folder) < count:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(pid, number)
    return finish(pid)


def main(pipe, root):
    settings = {"reward": "small:reader", "iterations": ITERATIONS, "eval_every": 3}
    draw, codes = random.Random(0), {}

    def begin(folder, **changed):
        given = words(small_settings(pipe, **settings, **changed))
        return child(["train", *given, f"--output={folder}", "--quiet", "--no-pictures"], root / "log")

    def resume(folder):
        return child(["train", "--resume", str(folder), "--quiet", "--no-pictures"], root / "log")

    codes["whole"] = [finish(begin(root / "whole"))]

    os.environ["SMALL_SLEEP"] = "0.05"  # so that there is time to be killed in
    folder = root / "killed"
    pid, codes["killed"] = begin(folder), []
    for count in (1, 4):
        codes["killed"].append(stopped(pid, folder, count, signal.SIGKILL, draw.random() * 0.1))
        pid = resume(folder)
    codes["killed"].append(finish(pid))

    folder = root / "early"  # there is no checkpoint before the last iteration
    pid, codes["early"] = begin(folder, checkpoint_every=100), []
    for count in (0, 3):
        codes["early"].append(stopped(pid, folder, count, signal.SIGKILL, draw.random() * 0.1))
        pid = resume(folder)
    codes["early"].append(finish(pid))

    folder = root / "interrupted"
    pid, codes["interrupted"] = begin(folder), []
    for count in (2,):
        codes["interrupted"].append(stopped(pid, folder, count, signal.SIGINT, draw.random() * 0.1))
        pid = resume(folder)
    codes["interrupted"].append(finish(pid))
    print(json.dumps(codes))


if __name__ == "__main__":
    from diffusers import StableDiffusion3Pipeline  # noqa: F401
    from peft import LoraConfig  # noqa: F401

    import diffrl.run
    import diffrl.tasks.digits  # noqa: F401

    main(Path(sys.argv[1]), Path(sys.argv[2]))
