"""SourceFence: finds out, in debug mode, that weights changed while a version was read from them."""

from __future__ import annotations

from wbridge.control.messages import Sums
from wbridge.device.base import Event
from wbridge.errors import ProtocolError
from wbridge.ids import WorkerId
from wbridge.session.verification import Holdings


class SourceFence:
    """Digests the weights when a version is taken from them and again when they are free; costs two reads."""

    def __init__(self, worker: WorkerId, holdings: Holdings) -> None:
        self._worker = worker
        self._holdings = holdings

    async def take(self, after: Event) -> Sums:
        """Digest the weights as they are after `after`."""
        return await self._holdings.digest_outgoing(after)

    async def find_change(self, version: int, before: Sums, after: Event) -> ProtocolError | None:
        """Digest again, and return the error that names what has changed since."""
        now = await self._holdings.digest_outgoing(after)
        changed = sorted({t for name, sums in now.items() for t in sums if sums[t] != before[name][t]})
        if not changed:
            return None
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return ProtocolError(
            f"{self._worker}: {changed[0]!r}{more} changed while version {version} was read from it; change"
            " weights only after send_weights() has returned, and pass the stream that writes them"
        )
