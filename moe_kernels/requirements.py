"""The versions that the kernels need, checked at the first kernel use: importing moe_kernels stays possible without."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import warnings
from importlib import metadata

# helion 1.5.1 cannot be imported with torch 2.11, and 1.4 knows no descriptor coordinates that come from memory.
# triton 3.9 rejects code that helion 1.5.0 generates. Loops over device values crash in triton 3.6's interpreter
# with numpy 2.4.
_BOUNDS = {"torch": ("2.11", None), "triton": ("3.6", "3.8"), "helion": ("1.5.0", "1.5.1")}
FIX = "pip install 'torch>=2.11' 'helion==1.5.0' 'triton>=3.6,<3.8' 'numpy<2.4' packaging"


def installed(package: str) -> str | None:
    """The version of an installed package, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver, None if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def problems() -> list[str]:
    """What keeps the kernels from running here, a line each; empty if nothing does."""
    try:
        from packaging.version import Version  # not named by helion, which needs it
    except ImportError:
        return ["packaging is not installed"]
    found = []
    for package, (low, high) in _BOUNDS.items():
        version = installed(package)
        wanted = f">={low}" + (f",<{high}" if high else "")
        if version is None:
            found.append(f"{package}{wanted} is not installed")
        elif Version(Version(version).public) < Version(low) or (high and Version(version) >= Version(high)):
            found.append(f"{package}{wanted} is needed, {version} is installed")
    numpy = installed("numpy")
    if os.environ.get("TRITON_INTERPRET") == "1" and (numpy is None or Version(numpy) >= Version("2.4")):
        found.append(f"Triton's interpreter needs numpy<2.4, {numpy or 'none'} is installed")
    return found


def require() -> None:
    """Raise ImportError with the fixing command unless the kernels can run."""
    if found := problems():
        raise ImportError(f"moe_kernels cannot run its kernels: {'; '.join(found)}. To fix it: {FIX}")


@functools.cache
def warn_if_untested(package: str, version: str, oldest: str, newest: str) -> None:
    """Warn, once, unless the version is between these two minor ones."""
    from packaging.version import Version

    low, high, minor = (Version(text).release[:2] for text in (oldest, newest, version))
    if not low <= minor <= high:
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        warnings.warn(
            f"moe_kernels was tested with {package} {tested}, this is {version}; "
            f"if it fails: pip install '{package}>={oldest},<{high[0]}.{high[1] + 1}'",
            stacklevel=3,
        )
