"""`wbridge plan`: what a plan moves, why it takes as long as it does, and what another one would change."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from wbridge.cli import job
from wbridge.cli.config import load
from wbridge.cli.job import Loaded, load_source
from wbridge.cli.picture import heat_map, svg
from wbridge.cli.table import print_table
from wbridge.config import Config
from wbridge.control.planning import stored
from wbridge.errors import ConfigError
from wbridge.plan.difference import Difference, compare
from wbridge.plan.expand import Expansion
from wbridge.plan.explain import explain
from wbridge.plan.matrix import Matrix, find_matrix
from wbridge.plan.report import LOCAL, Report, report_of
from wbridge.plan.sizes import size_of, time_of
from wbridge.plan.topology import find_links
from wbridge.plan.traffic import find_traffic
from wbridge.plan.types import Plan


class GroupRow(msgspec.Struct, frozen=True):
    """A group of trainers or an engine."""

    name: str
    num_workers: int
    hosts: tuple[str, ...]
    sent_nbytes: int
    got_nbytes: int


class Shown(msgspec.Struct, frozen=True):
    """What `wbridge plan show --json` prints."""

    fingerprint: str
    num_workers: int
    num_hosts: int
    num_tensors: int
    num_unused_tensors: int
    num_classes: int
    num_cells: int
    slot_nbytes: int
    groups: tuple[GroupRow, ...]
    traffic: Matrix


def add_commands(command: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Add show, explain and diff; return those that take settings."""
    verbs = command.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = verbs.add_parser("show", help="who sends how much to whom")
    show.add_argument("source", help=job.HELP)
    show.add_argument(
        "--by", choices=("worker", "host", "group"), help="default: worker, or host if too many"
    )
    show.add_argument("--svg", type=Path, metavar="PATH", help="write the traffic matrix as a picture")
    show.add_argument("--save", type=Path, metavar="PATH", help="write the plan to a file")
    show.set_defaults(run=run_show)
    why = verbs.add_parser("explain", help="the lower bound, the load of each kind of link, rings and groups")
    why.add_argument("source", help=job.HELP)
    why.set_defaults(run=run_explain)
    diff = verbs.add_parser("diff", help="what changes from one plan to another")
    diff.add_argument("source", metavar="before", help=job.HELP)
    diff.add_argument(
        "after", nargs="?", help="the same; left out: before, with --then-trainers or --then-rollouts"
    )
    diff.add_argument("--then-trainers", metavar="GROUP", help="instead of those before")
    diff.add_argument("--then-rollouts", metavar="GROUP", action="append", help="instead of all those before")
    diff.set_defaults(run=run_diff)
    for verb in (why, diff):
        verb.add_argument("--top", type=int, default=10, metavar="N", help="list that many pairs; default 10")
    for verb in (show, why, diff):
        verb.add_argument("--json", action="store_true", help="print a JSON object")
        job.add_arguments(verb)
    return [show, why, diff]


def run_show(options: argparse.Namespace) -> int:
    config, _ = load(options)
    plan = load_source(options.source, options, config).plan
    shown = _shown(plan, options.by)
    if options.save is not None:
        _write(options.save, stored(plan))
    if options.svg is not None:
        title = f"plan {plan.fingerprint[:12]}: bytes by {shown.traffic.by}, rows write, columns receive"
        _write(options.svg, svg(shown.traffic, title).encode())
    if options.json:
        print(msgspec.json.encode(shown).decode())
        return 0
    print(
        f"plan {plan.fingerprint[:12]}: {shown.num_tensors} tensors in {shown.num_classes} classes and"
        f" {shown.num_cells} cells, {shown.num_workers} workers on {shown.num_hosts} hosts,"
        f" slots of {size_of(shown.slot_nbytes)}\n"
    )
    rows = (
        (g.name, g.num_workers, _range(g.hosts), size_of(g.sent_nbytes), size_of(g.got_nbytes))
        for g in shown.groups
    )
    print_table(("group", "workers", "hosts", "sends", "gets"), rows)
    print()
    for line in heat_map(shown.traffic):
        print(line)
    for what, path in (("picture", options.svg), ("plan", options.save)):
        if path is not None:
            print(f"{what} written to {path}")
    return 0


def run_explain(options: argparse.Namespace) -> int:
    config, _ = load(options)
    loaded = load_source(options.source, options, config)
    report = _report(loaded, config)
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        _explain(report, options.top, known=bool(loaded.topology.nics))
    return 0


def run_diff(options: argparse.Namespace) -> int:
    config, _ = load(options)
    before = load_source(options.source, options, config)
    difference = compare(before.plan, _after(before, options, config).plan)
    if options.json:
        print(msgspec.json.encode(difference).decode())
    else:
        _differ(difference, options.top)
    return 0


def _after(before: Loaded, options: argparse.Namespace, config: Config) -> Loaded:
    changed = options.then_trainers is not None or options.then_rollouts is not None
    if options.after is not None:
        if changed:
            raise ConfigError(
                "--then-trainers and --then-rollouts change BEFORE; leave AFTER out, or leave them out"
            )
        return load_source(options.after, options, config)
    if before.job is None or not changed:
        raise ConfigError(
            "AFTER is missing: name a second plan or description, or, if BEFORE is described and not saved,"
            " say --then-rollouts or --then-trainers"
        )
    beside = Path(options.source).parent
    then = job.overridden(before.job, trainers=options.then_trainers, rollouts=options.then_rollouts)
    return job.planned(then, config, beside=beside)


def _shown(plan: Plan, by: str | None) -> Shown:
    pairs = find_traffic(plan, Expansion(plan)).pairs
    members: dict[str, list[int]] = {}
    for k, worker in enumerate(plan.workers):
        members.setdefault(f"{worker.role}/{worker.group}", []).append(k)
    sent, got = [0] * len(plan.workers), [0] * len(plan.workers)
    for (writer, receiver), nbytes in pairs.items():
        sent[writer] += nbytes
        got[receiver] += nbytes
    return Shown(
        fingerprint=plan.fingerprint,
        num_workers=len(plan.workers),
        num_hosts=len(set(plan.hosts)),
        num_tensors=sum(planned.num_tensors for planned in plan.classes),
        num_unused_tensors=plan.num_unused_tensors,
        num_classes=len(plan.classes),
        num_cells=sum(len(planned.cells) for planned in plan.classes),
        slot_nbytes=plan.slot_nbytes,
        groups=tuple(
            GroupRow(
                name,
                len(own),
                tuple(sorted({plan.hosts[k] for k in own})),
                sum(sent[k] for k in own),
                sum(got[k] for k in own),
            )
            for name, own in sorted(members.items(), reverse=True)
        ),
        traffic=find_matrix(plan, pairs, by),  # type: ignore[arg-type]  # one of the choices, or None
    )


def _report(loaded: Loaded, config: Config) -> Report:
    plan, topology = loaded.plan, loaded.topology
    links = find_links(plan.workers, plan.hosts, topology)
    return report_of(plan, explain(plan, config, topology), links)


def _explain(report: Report, top: int, *, known: bool) -> None:
    told, bound = report.explanation, report.explanation.bound
    print(
        f"plan {told.fingerprint[:12]}: {told.num_tensors} tensors in {told.num_transfers} transfers;"
        f" trainers send {size_of(told.sent_nbytes)}, {told.copies_sent:.2f} copies of"
        f" {size_of(told.model_nbytes)}"
    )
    if not known:
        print(
            "nothing is known of the links, so all count 1 GB/s and only ratios mean something: see"
            " --nics-per-host"
        )
    print(f"lower bound {time_of(bound.relayed_s)}: {report.reason}")
    print(f"busiest link {time_of(told.busiest_s)}, ratio {told.ratio:.3f}\n")
    rows = (
        (
            c.name,
            c.num_links,
            size_of(c.total_nbytes),
            size_of(c.largest_nbytes),
            *_times(c.name, c.busiest_s, c.of_bound),
        )
        for c in report.classes
    )
    print_table(("links", "number", "all", "largest", "takes", "of the bound"), rows)
    if report.busiest is not None:
        print(f"\n{report.busiest.link} is busiest, with {report.busiest.direction} of")
        for carried in report.carried[:top]:
            print(
                f"  {carried.share:6.1%}  {carried.writer} -> {carried.receiver}: {size_of(carried.nbytes)}"
            )
        if len(report.carried) > top:
            print(f"  and {len(report.carried) - top} more pairs; see --top")
    print()
    rings = (
        (
            r.role,
            r.num_workers,
            _range(tuple(map(str, sorted(set(r.num_groups)))), "to"),
            size_of(r.slot_nbytes),
            f"{r.direct_slots} slots, {size_of(r.direct_nbytes)}",
            f"{r.pinned_slots} {'slots' if r.role == 'rollout' else 'snapshots'}, {size_of(r.pinned_nbytes)}",
        )
        for r in report.rings
    )
    print_table(("workers", "number", "groups", "largest", "direct", "pinned"), rings)


def _times(name: str, seconds: float, ratio: float) -> tuple[str, str]:
    return ("", "") if name == LOCAL else (time_of(seconds), f"{ratio:.3f}")


def _differ(difference: Difference, top: int) -> None:
    d = difference
    print(
        f"from plan {d.before[:12]} to {d.after[:12]}: transfers {d.transfers_before} -> {d.transfers_after}"
    )
    for verb, names in (("join", d.joined), ("leave", d.left)):
        if names:
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            print(f"{len(names)} workers {verb}: {listed}")
    print(
        f"bytes: {size_of(d.added_nbytes)} added, {size_of(d.removed_nbytes)} removed,"
        f" {size_of(d.moved_nbytes)} come from another writer; {d.num_equal_pairs} pairs stay"
        f" as they are, {len(d.pairs)} change\n"
    )
    rows = (
        (
            f"{p.writer} -> {p.receiver}",
            size_of(p.nbytes_before),
            size_of(p.nbytes_after),
            ("+" if p.change_nbytes >= 0 else "-") + size_of(abs(p.change_nbytes)),
            f"{p.transfers_before} -> {p.transfers_after}",
        )
        for p in d.pairs[:top]
    )
    print_table(("pair", "before", "after", "change", "transfers"), rows)
    if len(d.pairs) > top:
        print(f"and {len(d.pairs) - top} more pairs; see --top")


def _range(names: tuple[str, ...], between: str = "..") -> str:
    return names[0] if len(names) == 1 else f"{names[0]} {between} {names[-1]}" if names else "none"


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc}; name a file that can be written") from exc
