#!/usr/bin/env bash
# Makes a virtual environment for the project: setup_venv.sh PYTHON VENV TORCH_SPEC
#
# A torch that PYTHON already has (2.11 or later) is used as it is: the new environment sees PYTHON's packages through
# a .pth file and nothing of theirs is changed. Otherwise TORCH_SPEC is installed into the new environment.
set -euo pipefail

python=$1
venv=$2
torch_spec=$3

"$python" -m venv --clear "$venv"

# The site directories of PYTHON when its torch is new enough; nothing otherwise.
found=$("$python" - <<'PY'
import importlib.metadata
import sys

try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(0)
if tuple(int(part) for part in version.split(".")[:2]) >= (2, 11):
    print("\n".join(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))))
PY
)

if [ -n "$found" ]; then
    echo "setup: $python has torch 2.11 or later; it is used as it is"
    "$venv/bin/python" - "$found" <<'PY'
import sysconfig
import sys
from pathlib import Path

Path(sysconfig.get_path("purelib"), "_packages_of_the_base_python.pth").write_text(sys.argv[1] + "\n")
PY
else
    echo "setup: $python has no torch 2.11 or later; installing $torch_spec"
    "$venv/bin/python" -m pip install --quiet "$torch_spec"
fi

"$venv/bin/python" -m pip install --quiet setuptools wheel

# The triton that goes with this torch, unless one is there already (CUDA builds bring theirs).
triton_spec=$("$venv/bin/python" - <<'PY'
import importlib.metadata
import importlib.util
import sys

MATCHING = {(2, 11): "3.6.0", (2, 12): "3.7.0", (2, 13): "3.7.1", (2, 14): "3.8.0"}
version = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
if importlib.util.find_spec("triton") is None and sys.platform == "linux":
    print(f"triton=={MATCHING[version]}" if version in MATCHING else "triton")
PY
)
if [ -n "$triton_spec" ]; then
    "$venv/bin/python" -m pip install --quiet "$triton_spec"
fi

"$venv/bin/python" -m pip install --quiet --editable ".[test]"
"$venv/bin/python" - <<'PY'
import importlib.metadata
import platform

versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "detpass"))
print(f"setup: Python {platform.python_version()}, {versions}")
PY
