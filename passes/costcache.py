"""Measured costs kept on disk: one file for each environment that gives other numbers.

Time and workspaces depend on the device, the version of torch, the number of threads and on
switches that choose other kernels; all of that is in the file's name.
"""

import hashlib
import os
import platform
import re
from pathlib import Path

import torch

from fxremat.costtable import CostTable, CostTableError, load

METHOD = "cold caches"  # of measuring; costs measured in another way are not comparable


def device_name(device_type: str) -> str:
    """What the device is called, for people and for the cache: equal names, equal costs."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})"


def _processor() -> str:
    """The model of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found.group(1) if found else platform.machine()


def environment(device_type: str) -> tuple[tuple[str, str], ...]:
    """All that the costs of one call depend on besides the call, in a fixed order."""
    return (
        ("device", device_name(device_type)),
        ("method", METHOD),
        ("torch", torch.__version__),
        ("cuda", str(torch.version.cuda)),
        ("threads", str(torch.get_num_threads())),
        ("mkldnn", str(torch.backends.mkldnn.enabled)),
        ("deterministic", str(torch.are_deterministic_algorithms_enabled())),
        ("matmul", torch.get_float32_matmul_precision()),
        ("cudnn_benchmark", str(torch.backends.cudnn.benchmark)),
        ("cudnn_deterministic", str(torch.backends.cudnn.deterministic)),
        ("cublas_workspace", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")),
        ("onednn_isa", os.environ.get("ONEDNN_MAX_CPU_ISA", "")),
    )


def cache_path(cache_dir: Path, device_type: str) -> Path:
    """The file for the present environment."""
    parts = environment(device_type)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    slug = re.sub(r"[^a-z0-9]+", "-", parts[0][1].lower()).strip("-")[:40]
    return cache_dir / f"costs-{slug}-{digest}.json"


def read_cache(path: Path) -> CostTable | None:
    """What is kept; None when there is nothing that can be read: it is measured again."""
    try:
        return load(path)
    except (CostTableError, OSError):
        return None


def write_cache(path: Path, measured: CostTable) -> None:
    """Add what was measured to what the file holds by now; guesses are not kept."""
    sure = {key: measured[key] for key in measured if key not in measured.guessed}
    table = CostTable(
        costs=sure,
        kind=measured.kind,
        device=measured.device,
        torch_version=measured.torch_version,
        threads=measured.threads,
    )
    kept = read_cache(path)
    (table if kept is None else kept.merged(table)).save(path)
