"""Train a small policy with reinforcement learning, and follow it with two inference engines.

python docs/tutorial/rl_loop [--mode async | --compare-modes] [--steps 40] [--link-mbit 5] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing
from colocated import run_colocated
from links import open_link
from report import Channels, Results, closing_table, comparison_table, greedy_tokens
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rollout import CHECK_PROMPT, run_rollout
from task import NUM_NEW_TOKENS, Settings, policy_config
from trainer import run_trainer

ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_LOGS": "-all",
    "TRANSFORMERS_VERBOSITY": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What every process of the demo inherits: one thread each, nothing downloaded, few words."""

PRELOADED = [
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "wbridge.integrations.vllm.target",
]
"""What takes long to import: done once, in the process that the others are forked from."""

MODES = ("sync", "sender_overlap", "receiver_overlap", "async")


def main() -> int:
    arguments = parse_arguments()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    console = Console()
    modes = [arguments.mode] if arguments.compare_modes is None else arguments.compare_modes or MODES
    numbers: dict[str, dict[str, float | int]] = {}
    problems: list[str] = []
    with open_link(arguments.link_mbit) as hosts:
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()  # it imports while this process does the same
        for mode in modes:
            numbers[mode], found = play(mode, arguments, hosts, console)
            problems += found
    if arguments.compare_modes is not None:
        console.print(comparison_table(numbers))
        if arguments.link_mbit:
            problems += order_of(numbers)
    if arguments.json:
        told = numbers[modes[0]] if arguments.compare_modes is None else numbers
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


def play(
    mode: str, arguments: argparse.Namespace, hosts: Mapping[str, Any], console: Console
) -> tuple[dict[str, float | int], list[str]]:
    """Run the loop once; return its closing numbers and what is wrong with them."""
    with tempfile.TemporaryDirectory(prefix="wbridge-demo-") as directory:
        settings = Settings(
            mode=mode,
            steps=arguments.steps,
            sync=not arguments.no_sync,
            colocated=arguments.colocated,
            size=arguments.size,
            directory=Path(directory),
            hosts=hosts,
        )
        policy_config(settings.size).save_pretrained(settings.model_directory)
        results = run(settings, console)
        greedy = greedy_tokens(settings.trained_directory, CHECK_PROMPT)
    console.print(closing_table(results, settings, greedy))
    return results.as_json(greedy), verdict(results, settings, greedy)


def order_of(numbers: Mapping[str, Mapping[str, float | int]]) -> list[str]:
    """On a slow link, waiting for nobody must pay."""
    if "sync" not in numbers or "async" not in numbers:
        return []
    slow, fast = numbers["sync"]["steps_per_s"], numbers["async"]["steps_per_s"]
    return [] if fast > slow else [f"async made {fast} steps per second and sync {slow}: is the link slow?"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rl_loop", description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, default="async", help="who waits for whom")
    parser.add_argument("--compare-modes", choices=MODES, nargs="*", help="one run each; of all by default")
    parser.add_argument("--steps", type=int, default=40, help="training steps, each a version")
    parser.add_argument("--json", type=Path, help="write the closing numbers here")
    parser.add_argument("--colocated", action="store_true", help="a trainer and an engine per process")
    parser.add_argument("--no-sync", action="store_true", help="a control: withhold the updates")
    parser.add_argument("--size", choices=("tiny", "medium"), default="tiny", help="of the policy")
    parser.add_argument("--link-mbit", type=float, help="limit the link between the sides, as root")
    arguments = parser.parse_args()
    if arguments.colocated and arguments.link_mbit:
        parser.error("--colocated and --link-mbit: there is no link inside a process")
    return arguments


def run(settings: Settings, console: Console) -> Results:
    """Start the processes, show how they do, and wait for them.

    Raises:
        SystemExit: a process failed; its own message is on the terminal.
    """
    context = multiprocessing.get_context("forkserver")
    channels = Channels(
        samples=[context.Queue(maxsize=2) for _ in range(settings.num_trainers)],
        events=context.Queue(),
        trained=context.Event(),
        checked=context.Event(),
    )
    if settings.colocated:
        roles = [(run_colocated, index) for index in range(settings.num_trainers)]
    else:
        roles = [(run_trainer, rank) for rank in range(settings.num_trainers)]
        roles += [(run_rollout, index) for index in range(settings.num_engines)]
    processes = [context.Process(target=role, args=(number, settings, channels)) for role, number in roles]
    for process in processes:
        process.start()
    results = Results(settings)
    try:
        with open_progress(console) as progress:
            task = progress.add_task("starting", total=settings.steps, numbers="")
            while any(process.is_alive() for process in processes):
                watch(channels, results, progress, task)
                if any(process.exitcode for process in processes):
                    raise SystemExit(f"a process of the demo failed: {[p.exitcode for p in processes]}")
            watch(channels, results, progress, task)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return results


def open_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
    )


def watch(channels: Channels, results: Results, progress: Progress, task: Any) -> None:
    """Take what the processes have reported, waiting a moment for the first report."""
    timeout_s = 0.2
    while True:
        try:
            event = channels.events.get(timeout=timeout_s)
        except queue.Empty:
            return
        timeout_s = 0.01
        results.add(event)
        if event["kind"] == "step":
            numbers = describe(event, results)
            progress.update(task, description="training", completed=event["step"], numbers=numbers)
            if not progress.console.is_terminal:
                progress.console.print(f"step {event['step']:3d}  {numbers}", soft_wrap=True)
        if results.has_all_weights:
            channels.checked.set()


def describe(step: dict[str, Any], results: Results) -> str:
    """Say how a training step went, and what the last update cost each side."""
    updates = results.all_of("update")
    rollout_stall_s = updates[-1]["stall_s"] if updates else 0.0
    return (
        f"reward {step['reward']:5.2f} of {NUM_NEW_TOKENS}  lag {step['lag']:.1f} versions  "
        f"stall {1e3 * step['stall_s']:.1f} ms trainer, {1e3 * rollout_stall_s:.1f} ms rollout"
    )


def verdict(results: Results, settings: Settings, greedy: list[int]) -> list[str]:
    """Return what is wrong with this run; empty if it shows what it should."""
    first, last = results.mean_reward(last=False), results.mean_reward(last=True)
    if not settings.sync:
        rose = last > first + 1
        return [f"the reward rose from {first:.2f} to {last:.2f} without updates"] if rose else []
    problems = results.failures(greedy)
    if settings.size == "tiny" and settings.steps >= 30 and last < 2 * first:
        problems.append(f"the reward did not double: {first:.2f} to {last:.2f}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
