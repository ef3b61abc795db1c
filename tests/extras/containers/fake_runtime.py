"""A fake docker or podman: a program whose containers are started by something that no run knows, as by a daemon.

What a container gets is what its options say, and nothing of the caller: its environment, its directory, its signals.
It needs no image. `FAKE_RUNTIME` names a directory with the state of all containers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

STATE = Path(os.environ["FAKE_RUNTIME"])


def run(words: list[str]) -> int:
    """Run a container, in the foreground: pass its output, the signals and its exit code on."""
    options: list[tuple[str, str]] = []
    while words[0].startswith("-"):
        key, _, value = words.pop(0).partition("=")
        options.append((key, value))
    given = dict(options)
    name, (image, *command) = given["--name"], words
    environment = {"PATH": os.defpath, "HOME": "/", "IMAGE": image}
    for line in Path(given["--env-file"]).read_text().splitlines():
        key, _, value = line.partition("=")
        environment[key] = value
    for key, value in options:
        if key == "--env":
            variable, equals, stated = value.partition("=")
            if equals or variable in os.environ:
                environment[variable] = stated if equals else os.environ[variable]
    _put(name, "json", json.dumps([*options, ("words", words)]))
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        _serve(name, [given["--entrypoint"], *command], environment, given["--workdir"], theirs)
    os.close(theirs)
    pid_file, code_file = STATE / f"{name}.pid", STATE / f"{name}.rc"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: _pass_on(pid_file, number))
    while text := os.read(ours, 1 << 16):
        os.write(1, text)
    while not code_file.exists():
        time.sleep(0.01)
    return int(code_file.read_text())


def _pass_on(pid_file: Path, number: int) -> None:
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(pid_file.read_text()), number)


def _serve(name: str, command: list[str], environment: dict[str, str], workdir: str, output: int) -> None:
    """Be the daemon of one container: without marks of a run, in no session of one, with no output of one."""
    if "SPOOL_RUN" in os.environ:  # what the kernel shows of a process is what it was started with
        words = [sys.executable, __file__, "serve", name, json.dumps([command, environment, workdir]), str(output)]
        os.set_inheritable(output, True)
        os.execve(sys.executable, words, {"FAKE_RUNTIME": str(STATE)})
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        process = subprocess.Popen(command, cwd=workdir, env=environment, stdin=null, stdout=output, stderr=output)
    except OSError as error:
        os.write(output, f"cannot start {command[0]}: {error.strerror}\n".encode())
        _put(name, "rc", "127")
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as what serves a container of podman's does
    _put(name, "pid", str(process.pid))
    os.close(output)
    code = process.wait()
    _put(name, "rc", str(128 - code if code < 0 else code))
    os._exit(0)


def _put(name: str, kind: str, text: str) -> None:
    staged = STATE / f"{name}.{kind}.staged"  # matched by nobody's pattern: a leading dot would not keep it out of glob
    staged.write_text(text)
    staged.rename(STATE / f"{name}.{kind}")


def _options(name: str) -> list[tuple[str, str]]:
    return [(key, value) for key, value in json.loads((STATE / f"{name}.json").read_text())]


def main(words: list[str]) -> int:
    """Do what a command line says."""
    match words:
        case ["run", *rest]:
            return run(rest)
        case ["serve", name, text, output]:
            _serve(name, *json.loads(text), int(output))
        case ["ps", "--all", "--quiet", "--filter", wanted]:
            for path in STATE.glob("*.json"):
                if ("--label", wanted.removeprefix("label=")) in _options(path.stem):
                    sys.stdout.write(f"{path.stem}\n")
        case ["inspect", "--format", "{{.State.OOMKilled}}", name]:
            sys.stdout.write(f"{str((STATE / f'{name}.oom').exists()).lower()}\n")
        case ["inspect", "--format", '{{index .Config.Labels "spool.metadir"}}', name]:
            label = next(value for key, value in _options(name) if value.startswith("spool.metadir="))
            sys.stdout.write(label.partition("=")[2] + "\n")
        case ["rm", "--force", name]:
            (STATE / "removed").open("a").write(f"{name}\n")
            for path in STATE.glob(f"{name}.*"):
                path.unlink(missing_ok=True)
        case _:
            sys.stderr.write(f"unknown: {words}\n")
            return 125
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
