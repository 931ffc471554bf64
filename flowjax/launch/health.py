"""Whether a role that serves HTTP is well."""

import asyncio
import errno

# What the asker itself lacks: it says nothing of the role.
_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EAGAIN)


class Unwell(Exception):
    """A role does not serve: nobody listens at its port, or it says itself that something is wrong."""


async def answers(host: str, port: int, path: str, timeout_s: float = 5.0) -> bool:
    """Whether an HTTP server answers `GET path` with a status below 400; False while it is silent, as one that is busy
    may be.

    Raises:
        Unwell: connections are refused or broken off, or the status is 400 or more.
        OSError: this process cannot ask (it has too many files open); the role may be well.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except TimeoutError:
        return False
    except OSError as error:
        if error.errno in _OWN:
            raise
        raise Unwell("refused connections") from error
    if len(status) < 2 or not status[1].isdigit():
        raise Unwell("broke connections off")
    if int(status[1]) >= 400:
        raise Unwell(f"answered {path} with status {int(status[1])}")
    return True
