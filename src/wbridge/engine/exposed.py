"""Exposed: the memory that writers may write now, by what they are to write there."""

from __future__ import annotations

from collections.abc import Iterator

from wbridge.transport.base import RemoteSlot, Transport

Key = tuple[int, int, int, str]
"""Ticket, group, piece, writer."""


class Exposed:
    """One entry for each credit until its piece has arrived, or the transport has withdrawn it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._remote: dict[Key, RemoteSlot] = {}
        self._slots: dict[Key, int] = {}
        self._in_slot: dict[int, set[Key]] = {}  # the keys of `_slots`

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of what is exposed."""
        return tuple(self._remote)

    @property
    def remote_slots(self) -> list[RemoteSlot]:
        return list(self._remote.values())

    def add(self, key: Key, remote: RemoteSlot, slot: int) -> None:
        self._remote[key], self._slots[key] = remote, slot
        self._in_slot.setdefault(slot, set()).add(key)

    def arrived(self, key: Key) -> bool:
        """It is not exposed any more. False: the arrival is stale, or a second one."""
        self._remote.pop(key, None)
        return self._forget(key)

    def of_writer(self, writer: str, ticket: int, group: int) -> Iterator[Key]:
        """Yield what is exposed to it for a ticket, or for one group of that if `group` is not -1."""
        for key in self._remote:
            if key[0] == ticket and group in (-1, key[1]) and key[3] == writer:
                yield key

    async def retract(self, key: Key) -> bool:
        """Withdraw what was exposed for a piece. Cancelled, or not proven: it counts as exposed."""
        remote = self._remote.get(key)
        if remote is None:
            return True
        proven = await self._transport.withdraw(remote)
        if proven:
            self._remote.pop(key, None)
            self._forget(key)
        return proven

    async def withdraw(self, slot: int, ticket: int, writer: str) -> bool:
        """Whether the transport proves that `writer` will not write the slot any more."""
        proven = True
        for key in sorted(self._in_slot.get(slot, ())):
            if (key[0], key[3]) == (ticket, writer):
                proven = await self.retract(key) and proven
        return proven

    def _forget(self, key: Key) -> bool:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._in_slot[slot].discard(key)
        return slot is not None
