"""What a client says about a server that does not answer, or refuses it."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from fedseal.deploy.guard import VERSION_HEADER
from fedseal.deploy.keys import ClientKey
from fedseal.engines.flower.engine import one_line
from fedseal.errors import UserError
from fedseal.system.version import fedseal_version, needed_version

DUPLICATE_SECONDS = 35.0  # the server notices within 30 seconds that another client with this key was killed
EXPIRED, NOT_YET_VALID, REVOKED = 10, 9, 23  # OpenSSL's codes for certificates
NO_LIST, OTHER_LIST, OLD_LIST = 3, 8, 12


@dataclass(frozen=True)
class Obstacle:
    """Why an action fails now: what the user is told, how long it is repeated, and the error after that."""

    status: str
    seconds: float
    failure: str


def server_away(server: str, wait: float, *, joined: bool) -> Obstacle:
    """The server does not answer; `joined` says that this client has been connected before."""
    if joined:
        failure = (
            f"The server at {server} has not answered for {wait:g} seconds: its run may have ended, or it was"
            " stopped. If it is started again, repeat this command."
        )
    else:
        failure = (
            f"No server answered at {server} in {wait:g} seconds: check host and port, and whether its run"
            " has ended."
        )
    status = f"the server at {server} does not answer: waiting for it up to {wait:g} seconds"
    return Obstacle(status, wait, failure)


def same_key(server: str, wait: float) -> Obstacle:
    """Another client with the same key is connected, or was killed a moment ago."""
    seconds = min(wait, DUPLICATE_SECONDS)
    return Obstacle(
        f"{server} has another connected client with this key: stop the other 'fedseal join'. If it was"
        f" killed, the server notices that within 30 seconds: trying again for {seconds:g} seconds",
        seconds,
        f"{server} has another connected client with this key: stop the other 'fedseal join', or create a key"
        " for this client with 'fedseal keys add-client'.",
    )


def wrong_clock(failure: str, wait: float) -> Obstacle:
    """A clock seems to be wrong. A machine that has just started may set it soon."""
    return Obstacle(f"{failure} Trying again for up to {wait:g} seconds", wait, failure)


def explain(error: Exception, server: str, wait: float, key: ClientKey | None, *, joined: bool) -> Obstacle:
    """The obstacle behind an error. Raises if the server will never accept this client."""
    if isinstance(error, httpx.InvalidURL | UnicodeError):
        raise UserError(f"'{server}' is not a valid address: give HOST:PORT.") from error
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code == 412:
            return same_key(server, wait)
        if error.response.status_code == 401:  # the server has refused other keys with 403
            reason = f"{server} refuses this client's signature: check that both machines' clocks agree."
            return wrong_clock(reason, wait)
        if error.response.status_code < 500:
            raise _refusal(server, error.response) from error
    elif not isinstance(error, httpx.TransportError):
        raise UserError(f"{server} is not a fedseal server ({type(error).__name__}).") from error
    tls_error = _find_tls_error(error)
    if isinstance(tls_error, ssl.SSLCertVerificationError):
        if tls_error.verify_code in (EXPIRED, NOT_YET_VALID):
            return wrong_clock(_outside_dates(server, tls_error, key), wait)
        raise _invalid_certificate(server, tls_error) from error
    if tls_error is not None and not isinstance(tls_error, ssl.SSLEOFError):  # EOF: it has just ended
        raise UserError(f"{server} does not use TLS: is it a fedseal server?") from error
    if isinstance(error, httpx.RemoteProtocolError) and key is None and not joined:
        raise UserError(
            f"{server} does not answer without TLS: leave out --insecure and give --key."
        ) from error
    return server_away(server, wait, joined=joined)


def _refusal(server: str, response: httpx.Response) -> UserError:
    if response.status_code == 403:
        return UserError(f"{server} refuses this client: its key is not registered there, or has expired.")
    if response.status_code == 426:
        theirs = one_line(response.headers.get(VERSION_HEADER, "?"))[:40]
        return UserError(
            f"{server} has fedseal {theirs}, this client {fedseal_version()}: install fedseal"
            f" {needed_version(theirs)} on this machine."
        )
    return UserError(f"{server} is not a fedseal server (HTTP status {response.status_code}).")


def _outside_dates(server: str, error: ssl.SSLCertVerificationError, key: ClientKey | None) -> str:
    """If only the server's certificate has expired, and not the CA's, clients need no new files."""
    why = "has expired" if error.verify_code == EXPIRED else "is not valid yet"
    how = "'fedseal keys renew DIR --ca' on the server, and give each client its new file."
    if key is not None and error.verify_code == EXPIRED and datetime.now(UTC) < key.expiry:
        how = "'fedseal keys renew DIR' on the server, and start it again with --resume."
    return f"The certificate of {server} {why}: check this machine's clock. If it is right, run {how}"


def _invalid_certificate(server: str, error: ssl.SSLCertVerificationError) -> UserError:
    if error.verify_code == REVOKED:
        return UserError(
            f"The certificate of {server} was revoked, so it may not be the real server: ask whoever runs it."
        )
    if error.verify_code in (NO_LIST, OTHER_LIST, OLD_LIST):
        return UserError(
            f"--crl is not the present list of revoked certificates of {server}: ask for its newest ca.crl."
        )
    return UserError(
        f"{server} is not the server that this key is for: its certificate is from another CA or for another"
        f" host ({one_line(error.verify_message)})."
    )


def _find_tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error that caused another error, or None."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error
