"""A client's side of secure aggregation: its answers to the phases of a round (see fedseal/secure.py).

Between the phases its secrets are a group of its memory, so that any process can answer for it. The last
phase deletes them, and the first one replaces what a broken round has left. Another group remembers the sum
that the client has helped to unmask last: a server that is resumed repeats a round, and the sums of two sets
of clients would reveal the difference, for example the update of one client.
"""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from cryptography.fernet import InvalidToken

from fedseal import secure, weights
from fedseal.core import Method, Packet
from fedseal.weights import Tensors

PHASE = "secure"  # the scalar of a request that names its phase
GROUP = "secure"  # the tensor group of what a phase needs, and of the secrets in a memory
SUM = "secure_sum"  # the tensor group of a memory: the last round that was unmasked, and its clients
REFUSED = "refused"  # the scalar of a reply to a request that the client does not answer
CLIP, CLIENTS, NAMES = (
    "secure_clip",
    "secure_clients",
    "count_names",
)  # scalars of an upload's request and reply

KEYS, SHARES, UPLOAD, LISTEN, UNMASK = "keys", "shares", "upload", "listen", "unmask"
STAGES = (KEYS, SHARES, UPLOAD)  # phases that leave secrets for the next one
WITHOUT_TRAINING = (KEYS, SHARES, UNMASK)

# Why a client does not answer. The server knows the texts, so a client cannot choose what is logged there.
REASONS = {
    "late": "it has no secrets for this phase of the round (was it restarted?)",
    "again": "it has helped to add up this round before, with other clients",
    "few": "the server asked for the sum of too few clients",
    "keys": "the server sent it other keys or shares than those of the clients",
    "content": "its method sends more than a model and counts, which masks cannot hide",
    "layout": "its model has other names, shapes or types than the one it was sent",
    "counts": "it has too many counts, or a count is not a number of images",
    "finite": "its model has NaN or infinite weights (is client.lr too high?)",
}

Train = Callable[[Packet, bytes], tuple[Packet, bytes]]


class RefusedError(Exception):
    """A client does not answer; the text is a key of `REASONS`."""


def answer(
    method: Method, train: Train, request: Packet, memory: bytes, *, counts: bool
) -> tuple[Packet, bytes]:
    """The reply to a phase, and the client's new memory.

    `train` is the client's part of a round without masks. `counts` says that the sum may have its counts.
    """
    phase = request.scalars[PHASE]
    if phase in WITHOUT_TRAINING:
        return answer_without_training(request, memory)
    plain = replace(request, scalars={k: v for k, v in request.scalars.items() if k != PHASE})
    without_sum, last_sum = _take(memory, SUM)
    rest, secrets = take_secrets(without_sum)
    if phase == LISTEN:  # nothing else is sent, because it would not be masked
        _, rest = train(plain, rest)
        return Packet(scalars={"t": request.scalars["t"]}), _put(rest, SUM, last_sum)
    if stage(secrets) != SHARES:  # also a second upload: the same masks must not hide two vectors
        return Packet(scalars={REFUSED: "late"}), memory
    try:
        peers = find_peers(request, secrets)
        full, rest = train(plain, rest)
        reply = upload(method, request, full, secrets, peers, counts=counts)
    except RefusedError as error:
        return Packet(scalars={REFUSED: str(error)}), _put(rest, SUM, last_sum)
    kept = {name: secrets[name] for name in ("me", "threshold", "cipher", "clients", "ciphers")}
    return reply, put_secrets(_put(rest, SUM, last_sum), kept | {"peers": torch.tensor(peers)}, UPLOAD)


def answer_without_training(request: Packet, memory: bytes) -> tuple[Packet, bytes]:
    """The reply to a phase that needs neither images nor a network, and the client's new memory."""
    phase = request.scalars[PHASE]
    rest, secrets = take_secrets(memory)
    try:
        if phase == KEYS:
            # If the request was sent twice, either reply may be used: nothing was hidden by these keys yet.
            kept = secrets if stage(secrets) == KEYS else make_keys()
            return public_keys(kept), put_secrets(rest, kept, KEYS)
        if phase == SHARES and stage(secrets) in (KEYS, SHARES):
            reply, kept = share(request, secrets)
            return reply, put_secrets(rest, kept, SHARES)
        if phase == UNMASK and stage(secrets) == UPLOAD:
            without_sum, last_sum = _take(rest, SUM)
            reply, this_sum = reveal(request, secrets, last_sum)
            return reply, _put(without_sum, SUM, this_sum)
    except RefusedError as error:
        return Packet(scalars={REFUSED: str(error)}), rest
    return Packet(scalars={REFUSED: "late"}), memory  # sent twice, or late: the next one may be in order


def make_keys() -> Tensors:
    """Phase 1: new keys for this round."""
    return {name: secure.to_rows([secure.new_key()]) for name in ("cipher", "mask")}


def public_keys(secrets: Tensors) -> Packet:
    """The part of the keys that is sent."""
    pairs = {name: secure.from_rows(secrets[name], 1) for name in ("cipher", "mask")}
    return Packet({GROUP: {name: secure.to_rows([secure.public_key(key)]) for name, [key] in pairs.items()}})


def share(request: Packet, secrets: Tensors) -> tuple[Packet, Tensors]:
    """Phase 2: a new seed; shares of it and of the mask key, encrypted for each client."""
    lists, threshold = request.tensors[GROUP], int(request.scalars["threshold"])
    clients = lists["clients"].tolist()
    ciphers, masks = (secure.from_rows(lists[name], len(clients)) for name in ("ciphers", "masks"))
    [cipher], [mask] = (secure.from_rows(secrets[name], 1) for name in ("cipher", "mask"))
    own = (secure.public_key(cipher), secure.public_key(mask))
    found = [k for k, *keys in zip(clients, ciphers, masks, strict=True) if tuple(keys) == own]
    if len(found) != 1 or clients != sorted(set(clients)):
        raise RefusedError("keys")
    if not 2 <= threshold <= len(clients):
        raise RefusedError("few")
    # If the request was sent twice, either reply may be used.
    again = "seed" in secrets and all(torch.equal(secrets[name], value) for name, value in lists.items())
    [me], [seed] = found, secure.from_rows(secrets["seed"], 1) if again else [secure.new_seed()]
    shares = [secure.split_secret(secret, threshold, len(clients)) for secret in (seed, mask)]
    sealed = [
        secure.seal(secure.agree(cipher, public), me, k, (of_seed, of_key))
        for k, public, of_seed, of_key in zip(clients, ciphers, *shares, strict=True)
    ]
    kept = {"cipher": secrets["cipher"], "mask": secrets["mask"], "seed": secure.to_rows([seed])}
    numbers = {"me": torch.tensor(me), "threshold": torch.tensor(threshold)}
    return Packet({GROUP: {"sealed": secure.to_rows(sealed)}}), kept | numbers | lists


def find_peers(request: Packet, secrets: Tensors) -> list[int]:
    """The clients with which an upload shares masks: those that have sent their shares."""
    peers = sorted(set(request.tensors[GROUP]["peers"].tolist()))
    if not {int(secrets["me"])} <= {*peers} <= {*secrets["clients"].tolist()}:
        raise RefusedError("keys")
    if len(peers) < int(secrets["threshold"]):
        raise RefusedError("few")
    return peers


def upload(
    method: Method, request: Packet, reply: Packet, secrets: Tensors, peers: list[int], *, counts: bool
) -> Packet:
    """Phase 3: the quantised update and the counts, masked. The names of the counts are not secret."""
    group, known = method.uploads, reply.counts
    if set(reply.tensors) != {group} or not set(reply.scalars) <= {"t", *known}:
        raise RefusedError("content")
    sent, trained = request.tensors[group], reply.tensors[group]
    if not weights.same_layout(trained, sent):
        raise RefusedError("layout")
    if not weights.all_finite(trained):
        raise RefusedError("finite")
    scale = secure.FixedPoint(float(request.scalars[CLIP]), int(request.scalars[CLIENTS]))
    takes_part = method.takes_part(reply)
    update = secure.update_of(trained, sent) * takes_part
    clipped = int((np.abs(update) > scale.clip).sum())
    names = sorted(known) if counts else []
    try:
        numbers = secure.encode_counts([int(takes_part), clipped, *(known[name] for name in names)])
    except ValueError:
        raise RefusedError("counts") from None
    [seed], [mask] = (secure.from_rows(secrets[name], 1) for name in ("seed", "mask"))
    publics = _by_client(secrets, "masks")
    vector = secure.mask(
        np.concatenate([scale.encode(update), numbers]),
        int(secrets["me"]),
        seed,
        mask,
        {k: publics[k] for k in peers},
    )
    tensor = torch.from_numpy(vector.view(np.int32))
    return Packet({GROUP: {"vector": tensor}}, {"t": request.scalars["t"], NAMES: json.dumps(names)})


def reveal(request: Packet, secrets: Tensors, last_sum: Tensors) -> tuple[Packet, Tensors]:
    """Phase 4: of each client either the share of its seed or that of its mask key, never both."""
    me, peers, publics = int(secrets["me"]), secrets["peers"].tolist(), _by_client(secrets, "ciphers")
    uploaded, closed = {*request.tensors[GROUP]["uploaded"].tolist()}, request.tensors[GROUP]["sealed"]
    if not {me} <= uploaded <= {*peers}:
        raise RefusedError("keys")
    if len(uploaded) < int(secrets["threshold"]):
        raise RefusedError("few")
    this_sum = {"round": torch.tensor(request.scalars["round"]), "uploaded": torch.tensor(sorted(uploaded))}
    repeated = last_sum and torch.equal(last_sum["round"], this_sum["round"])
    if repeated and not torch.equal(last_sum["uploaded"], this_sum["uploaded"]):
        raise RefusedError("again")
    [cipher] = secure.from_rows(secrets["cipher"], 1)
    shares: dict[str, list[bytes]] = {"seeds": [], "keys": []}
    try:
        for k, sealed in zip(peers, secure.from_rows(closed, len(peers)), strict=True):
            of_seed, of_key = secure.unseal(secure.agree(cipher, publics[k]), k, me, sealed)
            if k in uploaded:
                shares["seeds"].append(of_seed)
            else:
                shares["keys"].append(of_key)
    except (InvalidToken, ValueError):
        raise RefusedError("keys") from None
    return Packet({GROUP: {name: secure.to_rows(values) for name, values in shares.items()}}), this_sum


def _by_client(secrets: Tensors, name: str) -> dict[int, bytes]:
    clients = secrets["clients"].tolist()
    return dict(zip(clients, secure.from_rows(secrets[name], len(clients)), strict=True))


def take_secrets(memory: bytes) -> tuple[bytes, Tensors]:
    """A memory without its secrets, and those."""
    return _take(memory, GROUP)


def put_secrets(memory: bytes, secrets: Tensors, phase: str) -> bytes:
    """A memory with the secrets that a phase leaves."""
    return _put(memory, GROUP, {**secrets, "stage": torch.tensor(STAGES.index(phase))})


def stage(secrets: Tensors) -> str:
    """The phase that has left the secrets; empty if there are none."""
    return STAGES[int(secrets["stage"])] if secrets else ""


def _take(memory: bytes, name: str) -> tuple[bytes, Tensors]:
    """A memory without a group, and the group."""
    packet = Packet.from_bytes(memory) if memory else Packet()
    if name not in packet.tensors:
        return memory, {}
    rest = {other: group for other, group in packet.tensors.items() if other != name}
    return (Packet(rest, packet.scalars).to_bytes() if rest or packet.scalars else b""), packet.tensors[name]


def _put(memory: bytes, name: str, group: Tensors) -> bytes:
    """A memory with a group, unless it is empty."""
    if not group:
        return memory
    packet = Packet.from_bytes(memory) if memory else Packet()
    return replace(packet, tensors={**packet.tensors, name: group}).to_bytes()
