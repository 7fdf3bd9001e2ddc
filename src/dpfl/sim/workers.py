"""Who computes the clients' part of a round: this process, or worker processes of one thread each.

Workers take whole blocks of clients, so their number never changes a bit. :class:`Workers` computes
in this process, :class:`Pool` in several, and :class:`dpfl.sim.ray_workers.RayWorkers` on a
cluster; they differ in :meth:`Workers.compute` alone.
"""

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Self

import torch.multiprocessing
from torch import Tensor

from dpfl.core.errors import DpflError
from dpfl.engine import make_engine
from dpfl.rounds import Uplink, Workshop, client_round
from dpfl.rounds.members import Member
from dpfl.runs.processes import ctrl_c_held, end_with, ignore_ctrl_c

Private = dict[str, Tensor]
"""The parts of the model that stay at clients, by client."""

Block = tuple[Sequence[str], Private]
"""Clients that are computed together, and their own parts."""

Done = tuple[list[Uplink], Private]
"""What the clients of a block send, and what stays with them."""


class Worker:
    """Works for blocks of clients that were charged.

    ``workshop`` makes what local work is done with from an engine; ``engine`` and ``device`` name
    that engine, and ``members`` are all clients of the run. A worker is sent to other processes as
    these arguments: each process makes an engine of its own, and secret generators are made where
    they are used.
    """

    def __init__(
        self, workshop: partial[Workshop], engine: str, device: str, members: Mapping[str, Member]
    ) -> None:
        self.arguments = (workshop, engine, device, members)
        self.workshop = workshop(engine=make_engine(engine, device))
        self.members = members

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), self.arguments

    def block(self, downloads: Mapping[str, bytes], block: Block) -> Done:
        """Do the local work of one block of clients, in this process."""
        ids, private = block
        members = {client: self.members[client] for client in ids}
        return client_round(self.workshop, downloads, members, private, blocks=[ids]), private


class Workers:
    """This process, which computes one block after the other.

    Subclasses give each block to a process that is free, with the same results. They are context
    managers, and end their processes at the end.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.engine = worker.workshop.engine

    def run(
        self, downloads: Mapping[str, bytes], blocks: Sequence[Sequence[str]], private: Private
    ) -> list[Uplink]:
        """Work for all blocks; uploads come back in canonical order.

        ``private`` parts are read, and replaced by what came of them.
        """
        own = [(ids, {c: private[c] for c in ids if c in private}) for ids in blocks]
        found = self.compute(downloads, own)
        for _, parts in found:
            private.update(parts)
        return sorted((one for sent, _ in found for one in sent), key=lambda one: one.client)

    def compute(self, downloads: Mapping[str, bytes], blocks: Sequence[Block]) -> list[Done]:
        """Return what :meth:`Worker.block` returns for each of the blocks."""
        return [self._worker.block(downloads, block) for block in blocks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """End all processes; at once, if something was raised."""


class Pool(Workers):
    """Several processes of this machine.

    Ctrl-C is held back while processes start, and ends them at once.
    """

    def __init__(self, worker: Worker, count: int) -> None:
        super().__init__(worker)
        spawn = torch.multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, spawn, initializer=_hold, initargs=(worker,))

    def compute(self, downloads: Mapping[str, bytes], blocks: Sequence[Block]) -> list[Done]:
        """Work for each block in a process that is free."""
        futures = []
        for block in blocks:
            # Messages that are one object for several clients are also sent once.
            messages = {client: downloads[client] for client in block[0]}
            with ctrl_c_held():  # the pool starts its processes as it is given work
                futures.append(self._pool.submit(_work, messages, block))
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise DpflError(
                "workers",
                "a worker process ended",
                'in a script, call dpfl under if __name__ == "__main__":',
            ) from error

    def __exit__(self, *raised: object) -> None:
        """End all processes; at once, if something was raised."""
        if any(raised):
            end_workers()
        self._pool.shutdown(cancel_futures=True)


_held: Worker | None = None


def _hold(worker: Worker) -> None:
    global _held
    become_worker()
    _held = worker


def _work(downloads: Mapping[str, bytes], block: Block) -> Done:
    assert _held is not None
    return _held.block(downloads, block)


def become_worker() -> None:
    """Prepare a spawned process: one thread, Ctrl-C left to the parent, and no life after the
    parent's, however it ends.
    """
    torch.set_num_threads(1)
    ignore_ctrl_c()
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with(parent.pid)


def end_workers() -> None:
    """End this process's workers at once.

    What they were doing was charged, and can be resumed: a seeded run repeats the round bit for
    bit, an unseeded one loses it.
    """
    for process in multiprocessing.active_children():
        process.terminate()
