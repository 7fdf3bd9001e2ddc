"""The sites of a study as its server knows them: where they are, and what they said.

A site is known by the name in its introduction. Three things keep others from taking part under
that name. The study lists the names. With TLS, Flower lets in registered keys only, and
``nodes.json`` binds each key's node to one name. Without TLS, the token of the first introduction
must come with every later answer; it is kept in ``enrolment.json`` over a restart.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dpfl.core.errors import PeerError
from dpfl.core.files import parsed, readable_file
from dpfl.core.types import Claims
from dpfl.deploy.messages import Introduction, Message, Reply
from dpfl.deploy.processes import SITES
from dpfl.deploy.progress import Progress, SiteProgress, SiteState
from dpfl.deploy.receipts import Countersigner
from dpfl.deploy.requests import Hello
from dpfl.deploy.transport import Transport
from dpfl.runs.deployment import StudyFile

NODES = "nodes.json"


class Connections:
    """Who is connected, who takes part, and who said no.

    ``members``: the claims of those who take part, fixed once enrolment is closed.
    ``introduced``: the claims of everyone who came before that.
    ``tokens``: what tells each site from an impostor.
    ``identities``: the keys that sites know each other by, where the study has a secure sum.
    ``nodes``: where each site was last heard.
    ``willing``: whether a site will take another round, as far as it has said.
    ``bound``: who has committed to the terms.
    ``refusals``: why a site takes no part, in one sentence.
    """

    def __init__(self, study: StudyFile, transport: Transport, folder: Path) -> None:
        self.study = study
        self.transport = transport
        self.run = ""
        self.members: dict[str, Claims] = {}
        self.introduced: dict[str, Claims] = {}
        self.tokens: dict[str, str] = {}
        self.identities: dict[str, str] = {}
        self.nodes: dict[str, int] = {}
        self.willing: dict[str, bool] = {}
        self.bound: set[str] = set()
        self.refusals: dict[str, str] = {}
        self._refusing: set[str] = set()
        self.asked: set[int] = set()  # nodes that need not be asked again who they are
        self.signer = Countersigner(folder)
        self.progress = Progress(folder, dict.fromkeys(study.study.sites, SiteProgress()))
        self._registered = registered_keys(folder)
        for site in study.study.sites if self._registered else ():
            if site not in self._registered:
                self.miss(site, f"its key was not accepted: check {SITES}/{site}.pub")

    @property
    def why(self) -> str:
        """All refusals in one line."""
        return "; ".join(f"{site}: {reason}" for site, reason in sorted(self.refusals.items()))

    def hello(self) -> None:
        """Ask nodes that have not introduced themselves who they are.

        A site that was cut off may come back under another node: it introduces itself again.
        """
        new = [node for node in self.transport.nodes() if node not in self.asked]
        message = Hello(study=self.study, run=self.run).to_message()
        replies = self.transport.ask(dict.fromkeys(new, message), self.study.run.round_timeout)
        names = {node: site for site, node in self._registered.items()}
        for node, reply in replies.items():
            self.asked.add(node)
            if reply.problem:
                said = str(reply.message.header.get("site", f"node {node}"))
                self._refuse(names.get(node, said), reply)
            else:
                self._admit(node, reply.message)

    def _admit(self, node: int, answer: Message) -> None:
        """Take in a site that has introduced itself, unless somebody else did under its name."""
        try:
            said = Introduction.from_header(answer.header)
        except PeerError as error:
            self._refuse(f"node {node}", Reply(problem=str(error)))
            return
        problem = self._impostor(node, said)
        if problem:
            self._refuse(said.site, Reply(problem=problem))
            return
        self.tokens[said.site] = said.token
        self.nodes[said.site] = node
        if said.identity:
            self.identities[said.site] = said.identity
        for name in (said.site, f"node {node}"):
            self.refusals.pop(name, None)
        self.progress.forget(f"node {node}")
        self.progress.note(said.site, SiteState.CONNECTED)
        if not self.members:
            self.introduced[said.site] = said.claims

    def miss(self, site: str, reason: str) -> None:
        """Keep why a site is not there."""
        if site not in self.refusals:
            self.refusals[site] = reason
            self.progress.note(site, SiteState.ABSENT, reason)

    def _refuse(self, site: str, reply: Reply) -> None:
        """Keep why somebody takes no part, where people can see it at once."""
        self.refusals[site[:100]] = reply.problem
        self._show(site[:100], reply)

    def _impostor(self, node: int, said: Introduction) -> str:
        """Say why somebody may not take part under this name; empty if they may."""
        if said.site not in self.study.study.sites:
            return "is not named in the study"
        if self._registered and self._registered.get(said.site) != node:
            return "somebody with another key came under this name"
        if self.tokens.get(said.site, said.token) != said.token:
            return "somebody else came under this name"
        if self.members and said.site not in self.members:
            return "came after enrolment: it can join the next study"
        return ""

    def ask(self, messages: Mapping[str, Message], timeout: float) -> dict[str, Reply]:
        """Ask sites by name, and wait at most ``timeout`` seconds for their answers.

        Returns a reply for each of them; a site that is not connected has given no answer.
        """
        here = {self.nodes[site]: one for site, one in messages.items() if site in self.nodes}
        for site in messages:
            self.progress.note(site, SiteState.ASKED if site in self.nodes else SiteState.ABSENT)
        names = {node: site for site, node in self.nodes.items()}
        replies = self.transport.ask(
            here, timeout, lambda node, reply: self._show(names[node], reply)
        )
        absent = Reply.none("is not connected")
        found = {site: replies.get(self.nodes.get(site, -1), absent) for site in messages}
        for site, reply in found.items():
            self._show(site, reply)
        return found

    def _show(self, site: str, reply: Reply) -> None:
        """Show people what came of a site's answer."""
        state = SiteState.REFUSED if reply.problem else SiteState.ANSWERED
        self.progress.note(site, state if reply.answered else SiteState.SILENT, reply.problem)

    def note(self, site: str, reply: Reply) -> str:
        """Remember whether a site will take another round.

        Returns why its reply is not a result, or an empty text if it is one. A site that was silent
        may come back and is asked again. A refusal is kept for the summary.
        """
        if not reply.answered:  # it may come back, and is asked again
            self.willing.setdefault(site, True)
        elif reply.token != self.tokens.get(site) and (reply.token or not reply.problem):
            return "somebody else answered for it"
        else:
            if reply.token is None:  # a refusal that proves nothing counts for this time only
                self.willing.setdefault(site, True)
            else:
                self.willing[site] = reply.more
            self._note_refusal(site, reply.problem)
        return reply.problem

    def _note_refusal(self, site: str, problem: str) -> None:
        """Keep why a site refuses for as long as it does; what others did in its name stays."""
        if problem:
            self.refusals[site] = problem
            self._refusing.add(site)
        elif site in self._refusing:
            self._refusing.discard(site)
            self.refusals.pop(site, None)

    def can_be_drawn(self, site: str) -> bool:
        """Whether a site has committed to the terms, and will take another round."""
        return site in self.bound and self.willing.get(site, False)

    def too_few(self) -> str:
        """Say why the study ends if some members, but fewer than ``least_sites``, can go on.

        The update of a lone site would be published as it is. That nobody can go on is found when
        the next round is opened.
        """
        left = sum(self.willing.get(site, False) for site in self.members)
        members = self.members
        if not 0 < left < self.study.least_sites:
            return ""
        asking = f"{self.study.least_sites_by} asks for {self.study.least_sites}"
        return f"only {left} of {len(members)} sites can continue, and {asking}"


def registered_keys(folder: Path) -> dict[str, int]:
    """Read which node has the key that was registered for each site; none without TLS."""
    path = folder / NODES
    remedy = "start the server again: it is written then"
    with readable_file(path, remedy), suppress(FileNotFoundError):
        found = parsed(path.read_text())
        return {site: int(node) for site, node in found.items()}
    return {}
