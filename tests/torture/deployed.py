"""A deployment: `fedseal serve` and `fedseal join` are disturbed, and started again when they end."""

import random
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from network import SERVER, Hosts, Proxy
from single import NAMES, SMALL, Torture, compare_runs, settings, small_disk, wait_on_full_disk
from victims import HANG_SECONDS, LostError, Victim, count_lines

from fedseal.deploy import keys

CLIENTS = NAMES[:2]
# Flower gives a client up after 30 seconds without a sign of life.
SHORT, LONG = (0.2, 3.0), (33.0, 40.0)


@dataclass
class Deployment:
    """A server and its clients. Whoever ends is started again, as systemd does it."""

    torture: Torture
    folder: Path
    run: Path
    port: int
    host: str = "127.0.0.1"
    hosts: Hosts | None = None
    doors: dict[str, int] = field(default_factory=dict)  # ports of the clients' proxies; then without TLS
    victims: dict[str, Victim] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Starts the server or a client."""
        if name == "server":
            images, changes = self.torture.images, settings(SMALL | {"rounds": self.torture.rounds})
            words = ["serve", "folders", "--labels", images / "server", "--test", images / "test"]
            words += ["--host", self.host, "--port", self.port, "--out", self.run, "--resume", *changes]
            insecure = ["--insecure", *(word for client in CLIENTS for word in ("--name", client))]
            words += insecure if self.doors else ["--keys", make_keys(self.torture.work)]
        else:
            words = ["join", f"{self.host}:{self.doors.get(name, self.port)}"]
            words += ["--images", self.torture.images / "clients" / name]
            words += ["--memory", self.folder / "memory" / name]
            key = make_keys(self.torture.work) / "clients" / f"{name}.key"
            words += ["--insecure", "--name", name] if self.doors else ["--key", key]
        space = self.hosts.spaces[name] if self.hosts else ""
        variables = {"FEDSEAL_DATA": str(self.folder / name)}
        self.victims[name] = Victim(words, self.folder / f"{name}.txt", space, variables)

    def start_all(self) -> None:
        for name in ("server", *CLIENTS):
            if name not in self.victims or self._has_failed(name):
                self.start(name)

    def _has_failed(self, name: str) -> bool:
        victim = self.victims[name]
        return not victim.running and victim.wait_for_end() != 0

    @property
    def finished(self) -> bool:
        """True if the server has ended as it should."""
        server = self.victims["server"]
        return not server.running and server.wait_for_end() == 0

    def signs_of_life(self) -> tuple[int, ...]:
        return count_lines(self.run), *(len(victim.output) for victim in self.victims.values())

    def wait(self, seconds: float, signs: "tuple[int, ...] | None" = None) -> None:
        """Waits, and starts what has ended; returns earlier if `signs` have changed or the run is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.finished:
            self.start_all()
            if signs is not None and self.signs_of_life() != signs:
                return
            time.sleep(0.01)

    def close(self) -> None:
        for victim in self.victims.values():
            victim.__exit__()


def torture_deployment(torture: Torture) -> None:
    """Server and clients with TLS, each on its own host, are killed, paused, cut off and short of disk."""
    folder, whole = torture.folder, undisturbed_deployment(torture)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk"))
        deployment = Deployment(torture, folder, folder / "disk" / "run", free_port())
        with suppress(subprocess.CalledProcessError, FileNotFoundError):  # not allowed here
            deployment.hosts, deployment.host = stack.enter_context(Hosts(CLIENTS)), SERVER
        stack.callback(deployment.close)
        deployment.start_all()
        while torture.goes_on and not deployment.finished:
            torture.left -= disturb(torture, deployment, disk)
            deployment.start_all()
        finish(deployment)
        compare_runs(deployment.run, whole)


def torture_messages(torture: Torture) -> None:
    """Messages are late, come twice, and answers get lost."""
    port, whole = free_port(), undisturbed_deployment(torture)
    with ExitStack() as stack:
        proxies = {name: Proxy(port, torture.rng, torture.report) for name in CLIENTS}
        doors = {name: stack.enter_context(proxy).port for name, proxy in proxies.items()}
        deployment = Deployment(torture, torture.folder, torture.folder / "run", port, doors=doors)
        stack.callback(deployment.close)
        deployment.start_all()
        finish(deployment)
        compare_runs(deployment.run, whole)


def undisturbed_deployment(torture: Torture) -> Path:
    """The folder of a run of the same configuration."""

    def make(place: Path) -> None:
        deployment = Deployment(torture, place, place / "run", free_port())
        try:
            deployment.start_all()
            finish(deployment)
        finally:
            deployment.close()

    return torture.reference(f"deployment-{torture.rounds}", make) / "run"


def finish(deployment: Deployment) -> None:
    """Waits for the end of the run; fails if nothing happens for a long time."""
    while not deployment.finished:
        signs = deployment.signs_of_life()
        deployment.wait(HANG_SECONDS, signs)
        if not deployment.finished and deployment.signs_of_life() == signs:
            outputs = "\n".join(victim.output[-1500:] for victim in deployment.victims.values())
            raise LostError(f"the deployment makes no progress: {outputs}")


def disturb(torture: Torture, deployment: Deployment, disk: Path | None) -> int:
    """Disturbs a deployment at a random moment; returns the number of disturbances."""
    rng, moment = torture.rng, wait_for_moment(deployment, torture.rng)
    server = deployment.victims["server"]
    if deployment.finished:
        return 0
    clients = [name for name in CLIENTS if rng.random() < 0.5]
    chances = {"server": 4, "serve": 3, "SuperLink": 3, "client": 1, "pause": 1, "long pause": 0.15}
    chances |= {"cut": 1, "long cut": 0.15} if deployment.hosts else {}
    chances |= {"disk": 0.5} if disk else {}
    what = rng.choices(list(chances), list(chances.values()))[0]
    if what in ("server", "serve", "SuperLink"):
        found = server.processes()
        chosen = [number for number, role in found.items() if what in ("server", role)]
        for name in clients if chosen else ():
            kill_client(torture, deployment, name, moment)
        if chosen:
            number = f"{len(chosen)} of {len(found)} processes"
            torture.report("kill SuperLink" if what == "SuperLink" else "kill serve", f"{number}, {moment}")
            server.kill(chosen)
            server.wait_for_end()
        return len(clients) + 1 if chosen else 0
    if what == "client":
        kill_client(torture, deployment, rng.choice(CLIENTS), moment)
    elif what == "disk" and disk:
        torture.report("disk full", f"serve, {moment}")
        wait_on_full_disk(server, disk)
    else:
        name, seconds = rng.choice(("server", *CLIENTS)), rng.uniform(*(LONG if "long" in what else SHORT))
        torture.report("pause" if "pause" in what else "network cut", f"{name}, {seconds:.1f} s, {moment}")
        if "pause" in what:
            victim = deployment.victims[name]
            victim.pause(rng.choice((list(victim.processes()), [victim.process.pid])), seconds)
        elif deployment.hosts:
            with deployment.hosts.cut(name):
                time.sleep(seconds)
    return 1


def kill_client(torture: Torture, deployment: Deployment, name: str, moment: str) -> None:
    victim = deployment.victims[name]
    if victim.running:
        torture.report("kill join", f"{name}, {moment}")
        victim.kill(victim.processes())
        victim.wait_for_end()


def wait_for_moment(deployment: Deployment, rng: random.Random) -> str:
    """Waits for a random moment: after some time, after a round, when a reply is sent, or at a new file."""
    kind = rng.choice(("time", "round", "sending", "file"))
    if kind == "time":
        seconds = rng.uniform(0, 10)
        deployment.wait(seconds)
        return f"after {seconds:.1f} s"
    if kind == "sending":
        name = rng.choice(CLIENTS)
        before = deployment.victims[name].output.count("sends")
        deployment.victims[name].wait_until(
            lambda: deployment.victims[name].output.count("sends") > before, 30
        )
        return f"while {name} sends"
    if kind == "round":
        before = count_lines(deployment.run)
        deployment.victims["server"].wait_until(lambda: count_lines(deployment.run) > before, 30)
        return f"after round {count_lines(deployment.run)}"
    return deployment.victims["server"].wait_for_moment(rng, deployment.run, 10)


def make_keys(work: Path) -> Path:
    """The keys of all deployments."""
    folder = work / "keys"
    if not folder.exists():
        new = folder.with_name(".keys")
        shutil.rmtree(new, ignore_errors=True)
        keys.create_keys(new, [SERVER], CLIENTS)
        new.rename(folder)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
