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
    ("plugins", "has"),
    [
        ([], "no part for GPUs"),
        (["libuct_cuda.so.0"], "CUDA copies"),
        (["libuct_cuda.so.0", "libuct_cuda_gdrcopy.so.0"], "CUDA copies and gdrcopy"),
    ],
)
def test_what_ucx_could_do_on_gpus_is_told_and_that_it_does_not(
    plugins: list[str], has: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ucx").mkdir()
    for plugin in plugins:
        (tmp_path / "ucx" / plugin).touch()
    monkeypatch.setattr(doctor, "_ucx_folder", lambda: tmp_path)
    assert doctor._ucx_on_gpus().detail == f"through page-locked host memory; UCX has {has}, not used"


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
