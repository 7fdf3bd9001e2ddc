"""Serving a study: from its file to a folder with certificates, and then to its last round.

The study itself runs in a process of Flower's, as a ServerApp. This process starts the others,
follows the study by the files in its folder, and ends what it has started. The folder holds ::

    certificates/    the study's authority and its server's certificate; sites get ca.crt
    sites/           the public keys of the sites, NAME.pub
    app/, flower/    what Flower needs
    superlink.log, proxy.log
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dpfl.core.checks import check
from dpfl.core.errors import DpflError, FolderError, PeerError
from dpfl.core.files import check_private, for_owner_only, hold_folder, write_safely
from dpfl.deploy import superlink
from dpfl.deploy.connections import NODES
from dpfl.deploy.coordinator import ALL_HAVE_IT
from dpfl.deploy.credentials import make_certificates
from dpfl.deploy.enrolment import ENROLMENT, EnrolmentFile, check_study
from dpfl.deploy.processes import (
    CERTIFICATES,
    FAILED,
    FINISHED,
    READY_SECONDS,
    SITES,
    end_leftovers,
    noted_process,
)
from dpfl.deploy.progress import PROGRESS, News
from dpfl.deploy.server_app import APP_PROCESS
from dpfl.deploy.summary import DeploymentSummary
from dpfl.rounds.record import RoundRecord
from dpfl.runs.deployment import LINK_PROCESS, STUDY_FILE, StudyFile
from dpfl.runs.folder import RunFolder

Verb = Literal["run", "resume", "deliver"]
_MOST_RESTARTS = 5
_NOTES = {
    "the server app": APP_PROCESS,
    "the proxy": superlink.PROXY_PROCESS,
    "the SuperLink": LINK_PROCESS,
}


class ProcessEnded(PeerError):
    """A process of the server ended before the study did."""


@for_owner_only()
def make_study(folder: Path, study: StudyFile) -> None:
    """Make a study's folder: its file, certificates, and a place for the sites' public keys.

    A study that no sites can take part in is refused, and no folder is made.
    """
    check_study(study)
    path = folder / STUDY_FILE
    check(
        not path.exists(), str(folder), "already holds a study", "name another folder", FolderError
    )
    make_certificates(folder / CERTIFICATES, _names(study))
    write_safely(path, study.to_toml().encode())
    (folder / SITES).mkdir(exist_ok=True)
    superlink.write_app(folder)
    folder.chmod(0o700)


@for_owner_only()
def renew_certificates(folder: Path) -> None:
    """Make new certificates under the names in [network]; every site needs the new ca.crt."""
    study = StudyFile.in_folder(folder)
    check(
        noted_process(folder / LINK_PROCESS) is None,
        str(folder),
        "its server is running",
        "stop it first: its sites would lose their connections",
        FolderError,
    )
    shutil.rmtree(folder / CERTIFICATES, ignore_errors=True)
    make_certificates(folder / CERTIFICATES, _names(study))


def _names(study: StudyFile) -> list[str]:
    """Return the names under which sites reach the server."""
    anywhere = ("0.0.0.0", "::")  # noqa: S104 - compared, not listened on
    names = dict.fromkeys([*study.network.names, study.network.host, "127.0.0.1"])
    return [name for name in names if name not in anywhere]


def _check_startable(folder: Path, verb: Verb) -> None:
    """Refuse to run a study that has begun or ended, or to go on with one that has changed.

    What sites have agreed to is what is resumed: how long the server waits for them may change.
    """
    where = str(folder)
    begun = (folder / ENROLMENT).exists()
    summary = DeploymentSummary.load(RunFolder(folder))
    ended = summary is not None
    check(
        verb == "deliver" or not ended,
        where,
        "holds a study that has ended",
        f"see: dpfl server status {folder}",
        FolderError,
    )
    check(
        verb != "deliver" or ended,
        where,
        "holds a study that has not ended",
        f"continue with: {resume_command(folder)}",
        FolderError,
    )
    check(
        summary is None or bool(summary.undelivered),
        where,
        ALL_HAVE_IT,
        "start another study in a new folder",
        FolderError,
    )
    if verb == "run":
        check(
            not begun,
            where,
            "holds a study that has begun",
            f"continue with: {resume_command(folder)}",
            FolderError,
        )
        return
    check(
        begun,
        where,
        "holds no study that has begun",
        f"start it with: dpfl server run {folder}",
        FolderError,
    )
    agreed = EnrolmentFile.read(folder).study
    now = StudyFile.in_folder(folder).digest()
    check(
        agreed in (None, now),
        str(folder / STUDY_FILE),
        "is not the study that was begun",
        "undo what was changed since",
        FolderError,
    )


def resume_command(folder: Path) -> str:
    """Return the command that continues from here."""
    return f"dpfl server {'resume' if (folder / ENROLMENT).exists() else 'run'} {folder}"


@for_owner_only()
def serve(
    folder: Path,
    verb: Verb,
    tell: Callable[[str], None],
    show: Callable[[Sequence[RoundRecord]], None],
    *,
    insecure: bool,
) -> None:
    """Start the server of a study, and wait for the study's end.

    ``verb`` is what was asked for, and refused where the folder does not hold such a study.
    ``tell`` is given each sentence for the people who watch, ``show`` the rounds so far.
    ``insecure`` leaves out TLS and keys, for a rehearsal on one machine. The folder is held: a
    study has one server. A process that ends before the study does, by a kill or an error of
    Flower's, is started again with the others, a few times at most. Whatever happens, the processes
    that were started are ended. A folder that other users may enter is refused. Raises the error
    that ended the study, if one did; ``failed.txt`` holds it as well.
    """
    StudyFile.in_folder(folder)
    check_private(folder)
    with hold_folder(folder, ".serving.lock"):
        _check_startable(folder, verb)
        end_leftovers({name: folder / note for name, note in _NOTES.items()}, tell)
        for left in range(_MOST_RESTARTS, -1, -1):
            try:
                _serve_once(folder, tell, show, insecure=insecure)
                return
            except DpflError as error:
                if left == 0 or not isinstance(error, ProcessEnded):
                    with suppress(DpflError):  # the disk may be full
                        write_safely(folder / FAILED, f"{error.exit_code}\n{error}\n".encode())
                    raise
                tell("The server's processes are starting again; the study goes on")


def _serve_once(
    folder: Path,
    tell: Callable[[str], None],
    show: Callable[[Sequence[RoundRecord]], None],
    *,
    insecure: bool,
) -> None:
    """Start the processes of a study once, and follow it to its end, or to theirs."""
    study = StudyFile.in_folder(folder)
    network = study.network
    for name in (FAILED, FINISHED, APP_PROCESS, PROGRESS, NODES):
        (folder / name).unlink(missing_ok=True)
    superlink.write_app(folder)
    tell("Starting Flower's SuperLink")
    link = superlink.SuperLink.start(folder, network, insecure=insecure)
    try:
        superlink.write_connection(folder, link.port, insecure=insecure)
        if not insecure:
            nodes, refused = superlink.register_sites(folder)
            write_safely(folder / NODES, json.dumps(nodes).encode())
            for site, reason in refused.items():
                tell(f"The key of '{site}' was not registered: {reason}")
        # Not before the keys are known: a site that comes early would be rejected for good.
        link.start_proxy(study)
        run_id = superlink.start_run(folder)
        tell(f"Listening on {network.host}:{network.port}; the study's own process is starting")
        _follow(folder, link, run_id, tell, show)
    except ProcessEnded as error:
        tell(f"{error.where} {error.problem}")  # before the others are ended, which takes a while
        raise
    finally:
        link.end()
        for note in _NOTES.values():
            (folder / note).unlink(missing_ok=True)


def _follow(
    folder: Path,
    link: superlink.SuperLink,
    run_id: str,
    tell: Callable[[str], None],
    show: Callable[[Sequence[RoundRecord]], None],
) -> None:
    """Wait for the end of the run, showing its rounds and what becomes of its sites."""
    run = RunFolder(folder)
    began = time.monotonic()
    news = News(folder)
    while True:
        finished = (folder / FINISHED).exists()
        rounds = run.read_rounds()
        show(rounds)
        for sentence in news.read(rounds):
            tell(sentence)
        if finished:
            return
        time.sleep(0.5)
        if (folder / FAILED).exists():
            raise _failure(folder / FAILED)
        remedy = f"continue with: {resume_command(folder)}"
        ended = link.ended()
        if ended is not None:
            raise ProcessEnded(ended.log.stem, ended.how_it_ended(), remedy)
        if (folder / APP_PROCESS).exists():
            running = noted_process(folder / APP_PROCESS) is not None
            if not running and not any((folder / name).exists() for name in (FAILED, FINISHED)):
                raise ProcessEnded("the server app", "ended unexpectedly (killed?)", remedy)
        elif time.monotonic() - began > READY_SECONDS:
            status = superlink.run_status(folder, run_id)
            raise ProcessEnded(
                "Flower",
                f"has not started the server app within {READY_SECONDS:g} s ({status})",
                f"{link.process.see}, then {remedy}",
            )


def _failure(path: Path) -> DpflError:
    """Read the error that the server app wrote down, with its own exit code."""
    code, sentence = path.read_text().strip().split("\n", 1)
    where, _, rest = sentence.partition(": ")
    problem, _, remedy = rest.rpartition("; ")
    error = PeerError(where, problem or rest, remedy or "see the log")
    error.exit_code = int(code)
    return error
