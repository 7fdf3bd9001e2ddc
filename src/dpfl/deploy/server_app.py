"""The server as a Flower ServerApp: the study's folder is named in the run's configuration.

Flower runs it in a process of its own, and shows its output to nobody. What went wrong is written
to ``failed.txt``: the exit code, then the sentence. ``finished.txt`` says that all went well.
"""

import os
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from dpfl.core.errors import DpflError
from dpfl.core.files import write_safely
from dpfl.deploy.coordinator import Coordinator
from dpfl.deploy.processes import FAILED, FINISHED, note_process, noted_process, one_line
from dpfl.deploy.transport import Transport
from dpfl.runs.deployment import LINK_PROCESS
from dpfl.runs.processes import end_with

FOLDER_KEY, APP_PROCESS = "dpfl-study", "server-app.pid"
ERROR_LOG = "server-app-error.log"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the study, or resume it where it was cut off.

    An error is written down for whoever started the study. When the SuperLink ends, this process
    ends as well.
    """
    folder = Path(str(context.run_config[FOLDER_KEY]))
    (folder / FAILED).unlink(missing_ok=True)
    note_process(folder / APP_PROCESS, os.getpid())
    link = noted_process(folder / LINK_PROCESS)
    if link is not None:
        # Flower itself waits minutes for a SuperLink that was killed, and would hold the folder.
        end_with(link)
    try:
        Coordinator(folder, Transport(grid)).begin()
        write_safely(folder / FINISHED, b"")
    except DpflError as error:
        write_safely(folder / FAILED, f"{error.exit_code}\n{error}\n".encode())
        raise
    except Exception as error:
        log = folder / ERROR_LOG
        what = f"{type(error).__name__}: {error}"
        write_safely(log, traceback.format_exc().encode())
        said = f"server app: internal error ({one_line(what)}); please report it with {log}"
        write_safely(folder / FAILED, f"1\n{said}\n".encode())
        raise
