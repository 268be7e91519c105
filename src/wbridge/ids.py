"""Small typed identifiers that every layer shares."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from wbridge.errors import ConfigError

Role = Literal["trainer", "rollout"]


class WorkerId(msgspec.Struct, frozen=True, order=True):
    """One process of a trainer group or of an engine: its place in the group's mesh.

    For a rollout, `group` is the name of its engine. The worker at coordinate 0 leads its group.
    """

    role: Role
    group: str
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    def __post_init__(self) -> None:
        for field, value in (("mesh_shape", self.mesh_shape), ("coordinate", self.coordinate)):
            if not is_shape(value):
                raise ConfigError(
                    f"{self.role} {self.group!r}: {field} {value!r} is no tuple of integers from 0 on"
                )
        if self.role not in ("trainer", "rollout") or not self.group or not isinstance(self.group, str):
            raise ConfigError(
                f"{self.role!r} {self.group!r}: role is trainer or rollout, group a name of its own"
            )
        if len(self.mesh_shape) != len(self.coordinate) or not all(
            0 <= c < n for c, n in zip(self.coordinate, self.mesh_shape, strict=False)
        ):
            raise ConfigError(
                f"{self.role} {self.group!r}: coordinate {self.coordinate} is not inside mesh"
                f" {self.mesh_shape}"
            )

    @property
    def rank(self) -> int:
        """The row-major index of the coordinate in the mesh."""
        rank = 0
        for c, n in zip(self.coordinate, self.mesh_shape, strict=True):
            rank = rank * n + c
        return rank

    @property
    def group_size(self) -> int:
        return math.prod(self.mesh_shape)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def __str__(self) -> str:
        return f"{self.role}/{self.group}[{','.join(map(str, self.coordinate))}]"


class Epoch(msgspec.Struct, frozen=True):
    """One membership: `counter` numbers them inside one coordinator's `incarnation`, 64 random bits."""

    incarnation: int
    counter: int

    def __str__(self) -> str:
        return f"{self.incarnation:016x}.{self.counter}"


def is_shape(value: object) -> bool:
    """Whether this is a tuple of sizes or indices: a list cannot be hashed, and nothing else has a length."""
    return isinstance(value, tuple) and all(isinstance(n, int) and n >= 0 for n in value)
