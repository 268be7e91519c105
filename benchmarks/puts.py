"""Measure what the ucxx transport costs: its native worker and its Python one beside a raw socket.

    python -m benchmarks puts [--json PATH] [--nbytes N] [--updates N] [--tls tcp]

Two processes on this machine. `direct`: each piece is put where it is to stay; `slots`: into one of four
slots, which the receiver copies out. Over TCP, as between hosts; `--tls all` lets UCX choose. The lower bound
is one stream of a TCP socket, received into its final buffer. CPU seconds are those of both processes: they
say more than the rate where other work shares the cores. A put's wake-ups are those of the two event loops.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.harness.puts import (  # noqa: E402  # needs the path
    PIECE_NBYTES,
    receive_puts,
    receive_stream,
    send_puts,
    send_stream,
)
from wbridge.native.ucx import why_missing  # noqa: E402

CASES = ("native-direct", "native-slots", "python-direct", "python-slots", "raw-socket")


def main() -> None:
    options = parse_arguments()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, UCX_TLS={options.tls}"
    )
    os.environ["UCX_TLS"] = options.tls
    rows: list[dict[str, object]] = []
    for case in options.case or CASES:
        if case.startswith("native") and (why := why_missing()) is not None:
            print(f"{case}: {why}")
            continue
        found = measure(case, options.nbytes // PIECE_NBYTES, options.updates)
        print(f"{case:14}" + "".join(f"{name} {value:9.3f}  " for name, value in found.items()))
        rows += [
            {"benchmark": "puts", "case": case, "metric": metric, "value": value}
            for metric, value in found.items()
        ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--nbytes", type=int, default=1_200_000_000)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--tls", default="tcp")
    parser.add_argument("--case", action="append", choices=CASES)
    return parser.parse_args()


def measure(case: str, num_pieces: int, num_updates: int) -> dict[str, float]:
    """Run both processes of a case; medians over the updates after the first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sides = {"raw-socket": (send_stream, receive_stream)}
    send, receive = sides.get(case, (send_puts, receive_puts))
    process = context.Process(target=send, args=(theirs, case, num_pieces, num_updates))
    process.start()
    received = receive(ours, case, num_pieces, num_updates)
    sent = ours.recv()
    process.join()
    taken, total = (
        received["taken"],
        {key: sent[key] + received[key] for key in ("cpu_s", "calls", "wakeups")},
    )
    return {
        "gb_per_s": num_pieces * PIECE_NBYTES / statistics.median(taken[1:]) / 1e9,
        "cpu_s": total["cpu_s"] / num_updates,
        "calls_per_put": total["calls"] / num_pieces,
        "wakeups_per_put": total["wakeups"] / num_pieces / num_updates,
    }


if __name__ == "__main__":
    main()
