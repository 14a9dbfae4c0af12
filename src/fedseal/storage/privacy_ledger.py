"""The file `privacy.jsonl`: the rounds in which clients were asked for uploads, and the ε of these.

A round that is repeated after a stop is in the file twice, since its noise is drawn afresh: what was uploaded
the first time may have been seen.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedseal.config.config import Config
from fedseal.data.pool import Ints
from fedseal.errors import UserError
from fedseal.privacy import needed_noise, spent_epsilon
from fedseal.rounds import sample_cohort
from fedseal.storage.events_file import format_line, format_lines, read_events
from fedseal.system.files import sync_folder, write_atomic

ROUNDING = 1e-9


def open_ledger(folder: Path, config: Config, clients: int) -> "Ledger | None":
    """The ledger of a run with differential privacy; None for another run.

    Refuses what differential privacy does not cover, and a new run that would exceed its budget.
    """
    method, mode = config.selected_method(), config.privacy.mode
    if mode == "none" or not method.uses_clients:
        return None
    if method.also_uploads:
        raise UserError(
            f"{config.method} also uploads {', '.join(method.also_uploads)}, which [privacy] does not cover:"
            ' set privacy.mode to "none", or use another method.'
        )
    if mode == "central":
        _check_central(config)
    ledger = Ledger(folder, config, clients)
    if not ledger.rounds:
        ledger.check(0)
    return ledger


def _check_central(config: Config) -> None:
    """Refuses what needs more than the noisy mean, which is all that is known in central mode."""
    found = ""
    if config.selected_method().needs_single_replies:
        found = f"{config.method} needs the replies of single clients"
    elif config.aggregate.rule != "mean":
        found = f'aggregate.rule = "{config.aggregate.rule}" compares the uploads of single clients'
    elif config.secure.enabled:
        found = "secure aggregation hides the updates that the server has to clip"
    if found:
        raise UserError(
            f'{found}, which privacy.mode = "central" rules out: change it, or set privacy.mode to "local".'
        )


class Ledger:
    """Counts each client's uploads in a run, before it is asked for them."""

    def __init__(self, folder: Path, config: Config, clients: int) -> None:
        self.path, self.config, self.settings = folder / "privacy.jsonl", config, config.privacy
        self.uploads = np.zeros(clients, np.int64)  # by client
        self.rounds: list[int] = []
        events = read_events(self.path)
        try:
            for event in events:
                self._count(event["t"], event["clients"])
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(f"{self.path} is damaged, or of other clients: restore it.") from error
        self.text, self.checksum = format_lines(events)

    @property
    def epsilon(self) -> float:
        """ε spent so far, by the client that was asked most often."""
        return self._epsilon(self.uploads)

    def spend(self, t: int, asked: Sequence[int]) -> dict[str, float]:
        """Records the clients of a round, and returns ε with it; nothing without noise.

        Stops a run that would exceed its budget, if clients are asked otherwise than `check` expected.
        """
        self._count(t, asked)
        if 0 < self.settings.epsilon < self.epsilon * (1 - ROUNDING):
            raise UserError(
                f"Round {t} would spend ε = {self.epsilon:.4g}, but privacy.epsilon is"
                f" {self.settings.epsilon:g}: finish the run with --resume and rounds = {t - 1}."
            )
        line, self.checksum = format_line({"event": "asked", "t": t, "clients": list(asked)}, self.checksum)
        self.text += line
        write_atomic(self.path, self.text)
        sync_folder(self.path.parent)  # before a client is asked
        return {"epsilon": self.epsilon} if self.settings.noise else {}

    def check(self, done: int) -> None:
        """Refuses a run whose rounds after the first `done` would spend more than the budget."""
        if missing := set(range(1, done + 1)) - set(self.rounds):
            raise UserError(
                f"{self.path} lacks round {min(missing)}, so the ε that was spent is not known: restore the"
                " file, or choose another --out."
            )
        self._epsilon(self.uploads + 1)  # a missing accountant is found now, not in round 1
        budget, delta, rounds = self.settings.epsilon, self.settings.delta, self.config.rounds
        if not budget:
            return
        uploads, fitting = self.uploads.copy(), done
        most = int((self.settings.noise / needed_noise(budget, 1, delta)) ** 2 * (1 + ROUNDING))  # uploads
        for t in range(done + 1, rounds + 1):
            uploads[list(sample_cohort(self.config.seed, t, range(len(uploads)), self.config.cohort))] += 1
            fitting = t if uploads.max() <= most else fitting
        if fitting == rounds:
            return
        advice = [f"lower rounds to {fitting}"] if fitting else []
        if not self.rounds:  # a run that has begun keeps its noise
            noise = needed_noise(budget, int(uploads.max()), delta)
            advice.append(f"raise privacy.noise to {math.ceil(1000 * noise) / 1000:g}")
        repeated = len(self.rounds) - done
        raise UserError(
            f"privacy.epsilon is {budget:g}, but {rounds} rounds spend ε = {self._epsilon(uploads):.4g} at"
            f" δ = {delta:g}"
            + (f", with {repeated} that were interrupted" if repeated else "")
            + f": {' or '.join(advice) or 'the budget is spent'}."
        )

    def summary(self) -> dict[str, Any]:
        """For `summary.json`; ε is null without noise."""
        settings = self.settings.model_dump(include={"mode", "clip", "noise", "delta"})
        epsilon = self.epsilon if self.settings.noise else None
        return settings | {"epsilon": epsilon, "uploads": int(self.uploads.max(initial=0))}

    def _count(self, t: int, asked: Sequence[int]) -> None:
        self.rounds.append(t)
        self.uploads[list(asked)] += 1

    def _epsilon(self, uploads: Ints) -> float:
        return spent_epsilon(self.settings.noise, int(uploads.max(initial=0)), self.settings.delta)
