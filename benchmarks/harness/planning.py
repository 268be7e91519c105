"""The fleets of the planner benchmark, and what is measured of each."""

from __future__ import annotations

import math
import resource
import time

import msgspec

from wbridge.config import Config
from wbridge.plan.bound import lower_bound
from wbridge.plan.build import plan_tables
from wbridge.plan.expand import Expansion
from wbridge.plan.fleets import MODELS, Fleet, Model, Parallelism, Part, build_fleet
from wbridge.plan.geometry import Geometry
from wbridge.plan.topology import Nic, Topology, find_links
from wbridge.plan.traffic import between_links, find_traffic, loads_of
from wbridge.plan.types import Plan

QWEN, KIMI = "Qwen3-30B-A3B", "Kimi-K2"
ROUNDS = 3
NICS = (Nic(50.0, 50.0),) * 8
SLOW = (Nic(25.0, 25.0),) * 8


def megatron(num: int, *, pp: int, tp: int, ep: int) -> Part:
    return Part(workers_per_group=num, parallelism=Parallelism(pp=pp, tp=tp, ep=min(ep, num // pp)))


def engines(tp: int, num: int, *, ep: int = 1) -> Part:
    return Part(workers_per_group=tp, num_groups=num, parallelism=Parallelism(tp=tp, ep=ep, fused=True))


class Case(msgspec.Struct, frozen=True):
    """A fleet to plan."""

    model: Model
    trainers: Part
    rollouts: tuple[Part, ...]
    slow_hosts: int = 0
    """Rollout hosts with half the bandwidth, the first ones."""

    def fleet(self) -> Fleet:
        return build_fleet(self.model, self.trainers, self.rollouts)

    def topology(self, fleet: Fleet) -> Topology:
        hosts = sorted({host for worker, host in fleet.hosts.items() if worker.role == "rollout"})
        slow = set(hosts[: self.slow_hosts])
        return Topology({host: SLOW if host in slow else NICS for host in set(fleet.hosts.values())})


def cases() -> dict[str, Case]:
    qwen, kimi = MODELS[QWEN], MODELS[KIMI]
    found: dict[str, Case] = {}
    for ranks in (16, 32, 64, 128, 256, 512, 1024):
        half = ranks // 2
        found[f"{QWEN}-{ranks}"] = Case(
            qwen, megatron(half, pp=2, tp=4, ep=32), (engines(8, half // 8, ep=8),)
        )
    for ranks in (512, 1024):
        half = ranks // 2
        found[f"{KIMI}-{ranks}"] = Case(
            kimi, megatron(half, pp=8, tp=8, ep=32), (engines(32, half // 32, ep=32),)
        )
    trainers = megatron(128, pp=2, tp=4, ep=32)
    eights = (engines(8, 16, ep=8),)
    long = msgspec.structs.replace(qwen, num_layers=10 * qwen.num_layers)
    found[f"{QWEN}-256-ten-times-the-layers"] = Case(long, trainers, eights)
    found[f"{QWEN}-256-fsdp"] = Case(
        qwen, Part(workers_per_group=128, parallelism=Parallelism(fsdp=128)), eights
    )
    found[f"{QWEN}-256-tp2-and-tp4"] = Case(qwen, trainers, (engines(2, 32), engines(4, 16)))
    found[f"{QWEN}-256-ep8-and-tp8"] = Case(qwen, trainers, (engines(8, 8, ep=8), engines(8, 8)))
    staged = Part(workers_per_group=8, num_groups=8, parallelism=Parallelism(pp=2, tp=4, fused=True))
    found[f"{QWEN}-256-tp8-and-pp2"] = Case(qwen, trainers, (engines(8, 8), staged))
    found[f"{QWEN}-256-mixed-bandwidths"] = Case(qwen, trainers, eights, slow_hosts=4)
    found[f"{QWEN}-256-few-trainers"] = Case(qwen, megatron(16, pp=2, tp=4, ep=8), (engines(8, 30, ep=8),))
    found[f"{QWEN}-256-few-rollouts"] = Case(qwen, megatron(240, pp=2, tp=4, ep=8), (engines(8, 2, ep=8),))
    return found


def measure(name: str) -> dict[str, float]:
    case = cases()[name]
    fleet, config = case.fleet(), Config()
    topology = case.topology(fleet)
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    plan_s, plan = math.inf, None
    for _ in range(ROUNDS):
        start = time.process_time()
        plan = plan_tables(fleet.tables, fleet.hosts, config, topology)
        plan_s = min(plan_s, time.process_time() - start)
    assert plan is not None
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "plan_s": plan_s,
        "peak_mb": peak_mb,
        "grown_mb": peak_mb - before_mb,
        "write_out_s": max(write_out_s(plan, role) for role in ("trainer", "rollout")),
        "classes": float(len(plan.classes)),
        "cells": float(sum(len(planned.cells) for planned in plan.classes)),
        **quality(plan, topology),
    }


def write_out_s(plan: Plan, role: str) -> float:
    worker = next(worker for worker in plan.workers if worker.role == role)
    start = time.process_time()
    Expansion(plan).slice_for(worker)
    return time.process_time() - start


def quality(plan: Plan, topology: Topology) -> dict[str, float]:
    geometry, links = Geometry(), find_links(plan.workers, plan.hosts, topology)
    copy_nbytes, bound = lower_bound(plan, links, geometry)
    crossing = between_links(plan, find_traffic(plan, Expansion(plan)))
    sent, got = crossing.egress(), crossing.ingress()
    by_trainers = sum(nbytes for k, nbytes in sent.items() if plan.workers[k].role == "trainer")
    return {
        "load_over_bound": max(load.seconds for load in loads_of(sent, got, links)) / bound.relayed_s,
        "egress_copies": by_trainers / copy_nbytes,
        "bound_ms": 1e3 * bound.relayed_s,
        "exchanges": float(len(plan.exchanges)),
    }
