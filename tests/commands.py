"""Run `penstock …` in a process of its own. A process that has imported the command line forks for each command, since imports take most of the time."""

import atexit
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile


def penstock(*arguments, **variables):
    """Run a command. Returns a CompletedProcess with texts. `variables` are added to the environment."""
    words = [str(word) for word in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        request = {"words": words, "folder": os.getcwd(), "variables": {**os.environ, **variables}}
        request |= {"process": os.getpid(), "streams": [out.fileno(), error.fileno()]}
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(words, code, out.read().decode(), error.read().decode())


@functools.cache
@functools.cache
def _server():
    server = subprocess.Popen(
        [sys.executable, "-X", "utf8", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(server.stdin.close)
    return server


def _serve():
    from penstock.cli import main

    # Import what commands import when they run.
    sys.argv = ["penstock", "info", "--help"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    answers = os.dup(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers)
            _become(json.loads(line))
            return main()  # The process ends as `python -m penstock` does.
        os.write(answers, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    return None


def _become(request):
    """Take on the arguments, the folder, the environment and the streams of a command."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in enumerate(request["streams"], 1):
        os.dup2(os.open(f"/proc/{request['process']}/fd/{stream}", os.O_WRONLY | os.O_APPEND), number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = ["penstock", *request["words"]]


if __name__ == "__main__":
    _serve()
