"""Measured costs kept on disk: one file for each environment that gives other numbers.

Time and workspaces depend on the device, the version of torch, the number of threads and on
switches that choose other kernels; all of that is in the file's name.

A cache may save time and nothing else: whatever is wrong with the file or its folder, the costs are
measured, and the log says so once.
"""

import hashlib
import logging
import os
import platform
import re
from pathlib import Path

import torch

from fxremat.costtable import SCHEMA_VERSION, CostTable, CostTableError, load

log = logging.getLogger("fxremat")  # not a warning, which a filter can turn into an error

# Of measuring; costs measured in another way are not comparable.
METHOD = "cold caches, full masks, strides"


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
        ("schema", str(SCHEMA_VERSION)),
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
    return cache_dir / f"{_stem(parts[0][1])}{digest}.json"


def default_cache_dir() -> Path | None:
    """The user's cache folder; None where nobody says where that is."""
    try:
        return Path.home() / ".cache" / "fxremat"
    except RuntimeError:  # HOME is unset, and the user id is not one that the machine knows
        return None


def read_cache(path: Path) -> CostTable | None:
    """What is kept; None when there is nothing that can be used: it is measured again."""
    try:
        if path.exists() and not path.is_file():  # to read a pipe would be to wait for ever
            raise CostTableError("it is no regular file.", str(path))
        table = load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CostTableError, OSError) as error:
        _tell(path, f"cannot be read: {error}")
        return None
    stranger = _stranger(table, path)
    if stranger:
        _tell(path, f"cannot be used: {stranger}")
        return None
    return table


def _stranger(table: CostTable, path: Path) -> str:
    """What says that a table does not belong here; empty if nothing does."""
    if table.kind != "measured" or table.guessed:
        return f"its costs are of kind {table.kind!r}, with {len(table.guessed)} guesses"
    if table.torch_version != torch.__version__:
        return f"they were measured with torch {table.torch_version}"
    if table.threads != torch.get_num_threads():
        return f"they were measured with {table.threads} threads"
    if not path.name.startswith(_stem(table.device)):
        return f"they were measured on {table.device!r}"
    return ""


def _stem(device: str) -> str:
    """How the name of a device's file begins."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:40]
    return f"costs-{slug}-"


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
    try:
        (table if kept is None else kept.merged(table)).save(path)
    except (OSError, ValueError) as error:  # ValueError: no path at all, such as one with a NUL
        _tell(path, f"cannot be written: {error}")


_told: set[str] = set()


def _tell(path: Path, problem: str) -> None:
    """Say once in a process what is wrong with a file."""
    if str(path) not in _told:
        _told.add(str(path))
        log.warning(
            "the file of measured costs '%s' %s; the costs are measured anew.",
            path,
            problem.rstrip("."),
        )
