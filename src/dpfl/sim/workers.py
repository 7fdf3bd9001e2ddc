"""Worker processes of one thread each. They take whole blocks of clients, so their number never
changes a bit.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.multiprocessing
from torch import Tensor, nn

from dpfl.core.errors import DpflError
from dpfl.core.random import PublicSeed
from dpfl.engine import make_engine
from dpfl.engine.base import Engine
from dpfl.rounds import Agreement, Uplink, Workshop, client_round
from dpfl.rounds.enrol import secret_for
from dpfl.rounds.members import Member
from dpfl.runs.processes import ctrl_c_held, ignore_ctrl_c


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What every worker holds: everything but the round itself.

    ``engine`` and ``device`` name how and where local work is executed. ``seed`` is the root of the
    clients' secret generators in a simulation; None draws them from the operating system.
    """

    agreement: Agreement
    members: Mapping[str, Member]
    model: nn.Module
    engine: str
    device: str
    run: str
    seed: PublicSeed | None

    def block(
        self,
        engine: Engine,
        downloads: Mapping[str, bytes],
        ids: Sequence[str],
        private: dict[str, Tensor],
    ) -> tuple[list[Uplink], dict[str, Tensor]]:
        """Work for one block of clients that were charged; returns their private parts as well.

        Secret generators are made here, where they are used.
        """
        workshop = Workshop(
            agreement=self.agreement,
            run=self.run,
            engine=engine,
            model=self.model,
            secret=lambda round_, client: secret_for(self.seed, "client", round_, client),
        )
        members = {client: self.members[client] for client in ids}
        return client_round(workshop, downloads, members, private), private


def become_worker() -> None:
    """Prepare a spawned process: one thread, Ctrl-C left to the parent, and no life after the
    parent's, however it ends.
    """
    torch.set_num_threads(1)
    ignore_ctrl_c()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def end_workers() -> None:
    """End this process's workers at once.

    What they were doing was charged, and can be resumed: a seeded run repeats the round bit for
    bit, an unseeded one loses it.
    """
    for process in multiprocessing.active_children():
        process.terminate()


_held: tuple[WorkerContext, Engine] | None = None


def _hold(context: WorkerContext) -> None:
    global _held
    become_worker()
    _held = (context, make_engine(context.engine, context.device))


def _work(
    common: Sequence[bytes],
    which: Mapping[str, int],
    ids: Sequence[str],
    private: dict[str, Tensor],
) -> tuple[list[Uplink], dict[str, Tensor]]:
    assert _held is not None
    context, engine = _held
    downloads = {client: common[which[client]] for client in ids}
    return context.block(engine, downloads, ids, private)


def collected(
    found: Sequence[tuple[list[Uplink], dict[str, Tensor]]], private: dict[str, Tensor]
) -> list[Uplink]:
    """What all blocks sent, in canonical order; ``private`` parts are replaced by what came of
    them.
    """
    for _, parts in found:
        private.update(parts)
    return sorted(
        (uplink for part, _ in found for uplink in part), key=lambda uplink: uplink.client
    )


class Workers:
    """One process (this one) or several; the same results either way.

    Blocks of clients are the unit of work. With one process they are computed here, one after the
    other; with several, each block goes to a process that is free. Ctrl-C is held back while
    processes start, and ends them at once.
    """

    def __init__(self, context: WorkerContext, count: int) -> None:
        self._context = context
        self.engine = make_engine(context.engine, context.device)
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            spawn = torch.multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                count, mp_context=spawn, initializer=_hold, initargs=(context,)
            )

    def run(
        self,
        downloads: Mapping[str, bytes],
        blocks: Sequence[Sequence[str]],
        private: dict[str, Tensor],
    ) -> list[Uplink]:
        """Work for all blocks; results come back in canonical order. ``private`` parts are read,
        and replaced.
        """

        def own(ids: Sequence[str]) -> dict[str, Tensor]:
            return {client: private[client] for client in ids if client in private}

        if self._pool is None:
            found = [
                self._context.block(self.engine, {c: downloads[c] for c in ids}, ids, own(ids))
                for ids in blocks
            ]
        else:
            futures = []
            for ids in blocks:
                distinct = list({id(downloads[c]): downloads[c] for c in ids}.values())
                which = {
                    c: next(i for i, d in enumerate(distinct) if d is downloads[c]) for c in ids
                }
                with ctrl_c_held():  # the pool starts its processes as it is given work
                    futures.append(self._pool.submit(_work, distinct, which, ids, own(ids)))
            try:
                found = [future.result() for future in futures]
            except BrokenProcessPool as error:
                raise DpflError(
                    "workers",
                    "a worker process ended",
                    'in a script, call dpfl under if __name__ == "__main__":',
                ) from error
        return collected(found, private)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            if error is not None:
                end_workers()
            self._pool.shutdown(cancel_futures=True)
