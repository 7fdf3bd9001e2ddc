"""The process that answers for a site, with torch and the site's records in memory.

A site's own process stays small: it holds the connection and imports no torch. The worker is
started with the first message of a study, keeps what it has read, and is ended with the study. It
answers one message at a time. A worker that is killed is replaced, and asked the same again: what
it had charged is in the ledger together with the answer, so that the same bytes are sent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from dpfl.core.errors import DataError, DpflError
from dpfl.deploy.messages import END, Message, write_header
from dpfl.deploy.site_folder import WORKER_LOG
from dpfl.runs.processes import end_with

FAILURE = "failure"  # why nothing may be answered, in place of an answer
_TRIES = 3  # how often one message is tried before the server is told that it failed


class Worker:
    """The worker of the site in a folder: none, or one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._released: list[subprocess.Popen[bytes]] = []
        self.used = 0.0  # when it was last asked, by the monotonic clock

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no worker."""
        return None if self._process is None else self._process.pid

    def answer(self, message: Message, tell: Callable[[str], None]) -> Message:
        """Let the worker answer; one that dies over it is replaced.

        After a few times it is asked once more, to charge the round and to do no work. Raises
        :class:`~dpfl.core.errors.DataError` where it cannot do even that, and the error of the disk
        where an answer cannot be written down.
        """
        for left in range(_TRIES, -1, -1):
            try:
                return self._asked(message, able=left > 0)
            except (EOFError, OSError) as error:
                code = self.end()
                log = self._folder / WORKER_LOG
                if left == 0:
                    raise DataError(
                        "worker process",
                        f"ended {_TRIES + 1} times over one message (exit code {code})",
                        f"see {log}",
                    ) from error
                tell(f"The worker process ended (exit code {code}, see {log}); it is started again")
        raise AssertionError

    def _asked(self, message: Message, *, able: bool) -> Message:
        pipe = self._started()
        pipe.send_bytes(b"work" if able else b"charge only")
        pipe.send_bytes(write_header(message.header).encode())
        pipe.send_bytes(message.payload)
        header = json.loads(pipe.recv_bytes())
        payload = pipe.recv_bytes()
        self.used = time.monotonic()
        if FAILURE in header:
            *told, code = header[FAILURE]
            failure = DpflError(*told)
            failure.exit_code = code
            raise failure
        return Message(header=header, payload=payload)

    def _started(self) -> Connection:
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            command = [sys.executable, "-m", "dpfl.deploy.worker", str(self._folder)]
            command += [str(theirs.fileno()), str(os.getpid())]
            with (self._folder / WORKER_LOG).open("ab") as log, theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
        return self._pipe

    def release(self) -> None:
        """Let the worker end by itself, once it has done what it still does for its site."""
        if self._pipe is not None:
            self._pipe.close()  # the worker ends when nobody can ask it any more
        known = (*self._released, *([] if self._process is None else [self._process]))
        self._released = [process for process in known if process.poll() is None]
        self._process = self._pipe = None

    def end(self) -> int | None:
        """End the worker and those that were released; return the exit code of the worker."""
        last = self._process
        self.release()
        for process in self._released:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._released = []
        return None if last is None else last.returncode


def main(folder: Path, pipe: Connection, parent: int) -> None:
    """Answer messages until the site's process closes the connection, or is gone."""
    end_with(parent)
    from dpfl.deploy.records import LoadedSite, Records
    from dpfl.deploy.site import answered
    from dpfl.deploy.site_folder import log
    from dpfl.deploy.withdrawal import remove_traces

    records = Records()

    def tidied(work: Callable[[LoadedSite], None]) -> None:
        """Do some work on the site's own files; what goes wrong is logged."""
        try:
            work(LoadedSite(folder, records))
        except DpflError as error:
            log(folder, str(error))

    tidied(remove_traces)
    while True:
        try:
            able = pipe.recv_bytes()
            header = pipe.recv_bytes()
            payload = pipe.recv_bytes()
        except EOFError:
            return
        message = Message(header=json.loads(header), payload=payload)
        try:
            answer = answered(folder, message, records, able=able == b"work")
        except DpflError as error:  # nothing may leave that cannot be written down
            told = [error.where, error.problem, error.remedy, error.exit_code]
            answer = Message(header={FAILURE: told})
        pipe.send_bytes(write_header(answer.header).encode())
        pipe.send_bytes(answer.payload)
        if message.header.get("kind") == END and answer.accepted:
            from dpfl.deploy.finish import finish_delivered

            tidied(finish_delivered)  # how long it takes tells the server nothing


if __name__ == "__main__":
    main(Path(sys.argv[1]), Connection(int(sys.argv[2])), int(sys.argv[3]))
