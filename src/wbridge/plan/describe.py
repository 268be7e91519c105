"""describe: a job to come, from a model's config and the parallelism of its workers; nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

import msgspec

from wbridge.errors import ConfigError
from wbridge.plan.fleets import MODELS, Fleet, Model, Parallelism, Part, build_fleet
from wbridge.plan.topology import Nic, Topology

_Described = TypeVar("_Described")


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal workers: the group of trainers, or `engines` engines of `workers` each."""

    workers: int
    engines: int = 1
    pp: int = 1
    tp: int = 1
    ep: int = 1
    fsdp: int = 0

    def part(self, role: str) -> Part:
        """Return it as `build_fleet` takes it; an engine keeps some of its parameters fused.

        Raises:
            ConfigError: a field is out of range, or the workers do not divide; it is named.
        """
        for name in ("workers", "engines", "pp", "tp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{role}: {name} = {getattr(self, name)}: must be at least 1")
        if self.fsdp < 0 or (self.fsdp and self.workers % self.fsdp):
            raise ConfigError(f"{role}: fsdp = {self.fsdp} must divide workers = {self.workers}, or be 0")
        if role == "trainers" and self.engines != 1:
            raise ConfigError(f"trainers: engines = {self.engines}: trainers are one group; give workers")
        for name in ("tp", "ep"):
            if self.workers % (self.pp * getattr(self, name)):
                raise ConfigError(
                    f"{role}: workers = {self.workers} is no multiple of pp x {name} ="
                    f" {self.pp * getattr(self, name)}; change one of them"
                )
        shape = Parallelism(pp=self.pp, tp=self.tp, ep=self.ep, fsdp=self.fsdp, fused=role == "rollouts")
        return Part(workers_per_group=self.workers, num_groups=self.engines, parallelism=shape)


class HostLinks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NICs of the hosts whose names match a shell-style pattern."""

    hosts: str
    nics: int
    gb_s: float


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A description of a job: what a file of one has, and what the command line can override.

    `model` is a name, or the path of a model's `config.json`. Every host has `nics_per_host` NICs of
    `nic_gb_s` in each direction; the last entry of `links` that matches a host wins. `nics_per_host` 0:
    nothing is known of the links.
    """

    model: str
    trainers: Group
    rollouts: tuple[Group, ...]
    gpus_per_host: int = 8
    nics_per_host: int = 8
    nic_gb_s: float = 50.0
    links: tuple[HostLinks, ...] = ()

    def fleet(self, model: Model) -> Fleet:
        """Return the tables and hosts of its workers.

        Raises:
            ConfigError: a field is out of range; it is named.
        """
        if not self.rollouts:
            raise ConfigError("rollouts: at least one is needed; give workers, and engines if several")
        if self.gpus_per_host < 1:
            raise ConfigError(f"gpus_per_host = {self.gpus_per_host}: must be at least 1")
        parts = tuple(group.part("rollouts") for group in self.rollouts)
        return build_fleet(model, self.trainers.part("trainers"), parts, gpus_per_host=self.gpus_per_host)

    def topology(self, hosts: set[str]) -> Topology:
        return links_of(hosts, self.nics_per_host, self.nic_gb_s, self.links)


def links_of(
    hosts: set[str], nics_per_host: int, nic_gb_s: float, others: tuple[HostLinks, ...] = ()
) -> Topology:
    """Return the NICs of these hosts; 0 NICs: nothing is known.

    Raises:
        ConfigError: a number is out of range, or an entry of `others` names no host.
    """
    if nics_per_host < 0 or nic_gb_s <= 0:
        raise ConfigError(
            f"nics_per_host = {nics_per_host}, nic_gb_s = {nic_gb_s}: give 0 or more NICs and a positive rate"
        )
    nics = {host: (Nic(nic_gb_s, nic_gb_s),) * nics_per_host for host in sorted(hosts) if nics_per_host}
    for entry in others:
        matching = [host for host in hosts if fnmatchcase(host, entry.hosts)]
        if not matching:
            raise ConfigError(f"links: hosts = {entry.hosts!r} matches none of {', '.join(sorted(hosts))}")
        if entry.nics < 1 or entry.gb_s <= 0:
            raise ConfigError(f"links: {entry}: nics must be at least 1 and gb_s positive")
        nics.update((host, (Nic(entry.gb_s, entry.gb_s),) * entry.nics) for host in matching)
    return Topology(nics)


def group_of(text: str) -> dict[str, object]:
    """Read `16,pp=2,tp=4` (workers) or `2x8,tp=8` (engines x workers) into the fields of a `Group`.

    Raises:
        ConfigError: it is written otherwise.
    """
    first, *rest = text.split(",")
    engines, times, workers = first.rpartition("x")
    fields: dict[str, object] = {"workers": workers, **({"engines": engines} if times else {})}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(
                f"{text!r}: {word!r} has no value; write WORKERS or ENGINESxWORKERS, then name=number"
            )
        fields[name.strip()] = value
    return fields


def read_job(fields: Mapping[str, object], where: str) -> Job:
    """Check what a file or a command line says.

    Raises:
        ConfigError: a field is missing, unknown or of the wrong type; it is named.
    """
    return _converted(fields, Job, where, "a job has model, trainers and rollouts")


def read_group(text: str, where: str) -> Group:
    """As `group_of`, checked."""
    return _converted(group_of(text), Group, where, f"it has {', '.join(Group.__struct_fields__)}")


def _converted(fields: object, kind: type[_Described], where: str, remedy: str) -> _Described:
    try:
        return msgspec.convert(fields, type=kind, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{where}: {exc}; {remedy}") from exc


def model_of(config: Mapping[str, object], name: str) -> Model:
    """Return the shapes that a model's `config.json` describes. Biases, and norms of queries and keys that
    a model may or may not have, are taken as in Qwen3: they are a millionth of its bytes.

    Raises:
        ConfigError: a field is missing or out of range; it is named.
    """
    nested = config.get("text_config")
    fields = _Fields(nested if isinstance(nested, dict) else config, name)
    num_layers, heads, hidden = (
        fields.number(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    num_experts = fields.number("num_experts", "n_routed_experts", "num_local_experts", default=0)
    expert_hidden = fields.number("moe_intermediate_size", "intermediate_size") if num_experts else 0
    num_shared = fields.number("n_shared_experts", default=0)
    latent, head = (0, 0, 0), fields.number("head_dim", default=hidden // heads)
    if fields.number("kv_lora_rank", default=0):
        names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
        query, key_value, rotary = (fields.number(key, default=0) for key in names)
        latent, head = (query, key_value, rotary), fields.number("v_head_dim", "qk_nope_head_dim")
    return Model(
        name=name,
        num_layers=num_layers,
        num_dense_layers=fields.number("first_k_dense_replace", default=0) if num_experts else num_layers,
        num_experts=num_experts,
        hidden=hidden,
        expert_hidden=expert_hidden,
        dense_hidden=fields.number("intermediate_size", default=0),
        shared_hidden=num_shared * expert_hidden,
        num_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", default=heads),
        head=head,
        latent=latent,
        vocab=fields.number("vocab_size"),
        tied=(nested if isinstance(nested, dict) else config).get("tie_word_embeddings") is True,
        dtype=fields.text("torch_dtype", "dtype", default="bfloat16"),
    )


def named_model(name: str) -> Model:
    """Return one of `MODELS`.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in MODELS:
        raise ConfigError(
            f"model = {name!r} is neither a file nor one of {', '.join(MODELS)}; give the path of its"
            " config.json"
        )
    return MODELS[name]


class _Fields:
    """What a config says under one of several names."""

    def __init__(self, config: Mapping[str, object], name: str) -> None:
        self._config, self._name = config, name

    def number(self, *names: str, default: int | None = None) -> int:
        found = self._first(names)
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise ConfigError(
                f"{self._name}: {' or '.join(names)} is {found!r}; a model's config.json has a number there"
            )
        return found

    def text(self, *names: str, default: str) -> str:
        found = self._first(names)
        return found if isinstance(found, str) else default

    def _first(self, names: tuple[str, ...]) -> object:
        return next((self._config[name] for name in names if self._config.get(name) is not None), None)
