"""Packs what a machine without internet needs to run elaunch and its benchmarks, beside torch.

    python benchmarks/pack.py --python 3.12 packed        # here; 33 MB for the default machine

Copy the repository and the folder there, and run there:

    python3 -m pip install --no-index --no-deps --target site packed/*.whl
    PYTHONPATH=$PWD/site python3 benchmarks/accelerator.py

The folder has a wheel of each package that setup.cfg requires, etcd among them, and of each that those require, with
the versions of constraints.txt, for Linux on x86-64.
"""

from __future__ import annotations

import argparse
import configparser
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
LIMIT_BYTES = 64 << 20


def required(setup: str) -> list[str]:
    """Returns the names of the packages that the text of a setup.cfg requires."""
    parser = configparser.ConfigParser()
    parser.read_string(setup)
    lines = parser["options"]["install_requires"].splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def command(names: Sequence[str], python: str, folder: Path) -> list[str]:
    """Returns the command that downloads wheels of packages and of all they need for another machine's interpreter."""
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
        *(f"--python-version={python}", "--implementation=cp", *(f"--platform={name}" for name in PLATFORMS)),
        *(f"--dest={folder}", f"--constraint={ROOT / 'constraints.txt'}", *names),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new or empty: where the wheels go")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the other machine's Python (default 3.12)")
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty; two versions of a package cannot be installed together")
    names = required((ROOT / "setup.cfg").read_text())
    code = subprocess.run(command(names, args.python, args.folder)).returncode
    if code != 0:
        return code
    wheels = sorted(args.folder.glob("*.whl"))
    size_bytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{args.folder}: {len(wheels)} wheels, {size_bytes / 1e6:.0f} MB. On the other machine:\n")
    print(f"    python3 -m pip install --no-index --no-deps --target site {args.folder}/*.whl")
    print("    PYTHONPATH=$PWD/site python3 benchmarks/accelerator.py")
    if size_bytes >= LIMIT_BYTES:
        print(f"\nthis is more than the {LIMIT_BYTES >> 20} MiB that may be carried there", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
