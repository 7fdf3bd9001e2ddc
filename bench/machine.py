"""What a measurement ran on: the processor, and the kernels that were really used."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_info


def processor() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def kernels() -> dict[str, str]:
    """The kernels that this process uses."""
    np.ones((2, 2)) @ np.ones((2, 2))
    architectures = {
        f"{library['internal_api']} {library['version']} {library['architecture']}"
        for library in threadpool_info()
        if library["user_api"] == "blas" and "architecture" in library
    }
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": f"{torch.__version__} {capability}", "numpy": ", ".join(sorted(architectures))}


def machine() -> dict[str, Any]:
    """The machine, with the kernels of a process that is set up as the measured ones are."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")
    }
    command = [sys.executable, "-m", "bench.machine"]
    root = Path(__file__).resolve().parent.parent
    told = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=True)
    return {
        "cpus": os.cpu_count(),
        "system": platform.system(),
        "processor": processor(),
        "kernels": json.loads(told.stdout),
    }


if __name__ == "__main__":
    print(json.dumps(kernels()))
