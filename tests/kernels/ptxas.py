"""What ptxas says about a kernel that was compiled for a GPU that this machine need not have."""

import re
import subprocess
from pathlib import Path


def ptxas_report(ptx: str, capability: int, folder: Path) -> str:
    """What the ptxas that triton brings says about the kernel. Newer GPUs have a ptxas of their own."""
    import triton

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    assert target[1].startswith(f"sm_{capability}")
    errors = []
    for ptxas in sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*")):
        command = [str(ptxas), "-v", f"--gpu-name={target[1]}", str(source), "-o", str(folder / "kernel.cubin")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode == 0:
            return run.stderr
        errors.append(run.stderr)
    raise AssertionError(f"no bundled ptxas takes the kernel: {errors}")
