from __future__ import annotations

from pathlib import Path

import pytest

from wbridge import native
from wbridge.cli import doctor
from wbridge.cli.main import main
from wbridge.device import select
from wbridge.device.kernels import program


def rows(text: str) -> dict[str, str]:
    lines = text.splitlines()
    verdict = lines[0].index("verdict")
    return {line[:verdict].strip(): line[verdict:] for line in lines[1:]}


def test_what_is_missing_comes_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(module: str) -> None:
        raise native.NativeUnavailable(f"{module} is not installed; install the extra")

    monkeypatch.setattr(native, "require", absent)
    monkeypatch.setattr(doctor, "_ucx_folder", lambda: None)

    assert main(["doctor"]) == 1

    report = rows(capsys.readouterr().out)
    assert report["between hosts"] == "missing  ucxx is not installed; install the extra"
    assert report["RDMA"].startswith("absent")
    assert report["wbridge"].startswith("ok")


@pytest.mark.parametrize("missing", [None, "the extension was not built; install wbridge again"])
def test_copies_without_the_extension_are_called_slow(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "why_missing", lambda: missing)
    monkeypatch.setattr(doctor, "num_copy_threads", lambda: 3)

    finding = doctor._copies()

    assert finding.ok is (True if missing is None else None)
    assert finding.detail == (
        "native, up to 3 threads each"
        if missing is None
        else f"slow for many small or transposed tensors: {missing}"
    )


@pytest.mark.parametrize(("plugin", "ok"), [("libuct_ib.so.0", True), ("libuct_cma.so.0", None)])
def test_rdma_is_told_by_the_plugin_beside_the_library(
    plugin: str, ok: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / plugin).touch()
    monkeypatch.setattr(doctor, "_ucx_folder", lambda: tmp_path)

    finding = doctor._rdma()

    assert finding.ok is ok
    assert ok or "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in finding.detail


@pytest.mark.parametrize(
    ("plugins", "lacks"),
    [
        (["cuda"], "no verbs, no gdrcopy"),
        (["cuda", "cuda_gdrcopy"], "no verbs"),
        (["ib", "cuda"], "no gdrcopy"),
        ([], "no verbs, no CUDA copies, no gdrcopy"),
    ],
)
def test_what_ucx_lacks_to_reach_gpus_is_told_with_the_remedy(
    plugins: list[str], lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_ucx_folder", lambda: folder_with(tmp_path, plugins))
    monkeypatch.setattr(select, "why_no_network", lambda: None)
    monkeypatch.setattr(select, "find_network", lambda _: None)
    monkeypatch.setattr(doctor, "memory_kinds", lambda _: ["host", "cuda"])
    finding = doctor._ucx_on_gpus()
    assert finding.ok is (True if plugins else None)
    assert f"has {lacks}: for those set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in finding.detail


@pytest.mark.parametrize(
    ("reason", "kinds", "told"),
    [
        ("cuda:0 orders nothing", ["host", "cuda"], "cuda:0 orders nothing"),
        (None, ["host"], "UCX_TLS=tcp,cuda"),
    ],
)
def test_why_slots_between_hosts_are_not_on_gpus_is_told(
    reason: str | None, kinds: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_ucx_folder", lambda: folder_with(tmp_path, ["ib", "cuda", "cuda_gdrcopy"]))
    monkeypatch.setattr(select, "why_no_network", lambda: reason)
    monkeypatch.setattr(select, "find_network", lambda _: None)
    monkeypatch.setattr(doctor, "memory_kinds", lambda _: kinds)
    finding = doctor._ucx_on_gpus()
    assert finding.ok is None
    assert finding.detail.startswith("through page-locked host memory: ")
    assert told in finding.detail


def folder_with(path: Path, plugins: list[str]) -> Path:
    (path / "ucx").mkdir()
    for plugin in plugins:
        (path / "ucx" / f"libuct_{plugin}.so.0").touch()
    return path


@pytest.mark.parametrize("missing", [None, "NVRTC is not installed; install wbridge[cu13]"])
def test_a_gpu_without_the_kernel_is_called_slow(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Device:
        name = "cuda:3"

        def close(self) -> None:
            return

    answers = {3: missing}
    monkeypatch.setattr(select, "open_device", lambda where: Device())
    monkeypatch.setattr(program, "why_missing", answers.pop)

    finding = doctor._gpu()

    assert not answers
    assert finding.ok is (True if missing is None else None)
    assert finding.detail.startswith("cuda:3, ")
    assert missing is None or finding.detail.endswith(missing)


@pytest.mark.parametrize("limits", [[], ["slots are in host memory: no cuda.bindings", "it is polled"]])
def test_what_a_gpu_does_without_is_told_with_its_reason(
    limits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "find_gpu_limits", lambda: limits)
    finding = doctor._gpu_processes()
    assert finding.ok is (None if limits else True)
    assert all(limit in finding.detail for limit in limits)
