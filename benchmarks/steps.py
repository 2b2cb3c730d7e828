"""Training-step benchmark: a thin caller of ``deltafuse bench steps``, for a checkout that is not installed.

python benchmarks/steps.py --out steps.json            # on a CUDA machine
python benchmarks/steps.py --device cpu --small        # a smoke run
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from deltafuse.cli.app import main

if __name__ == "__main__":
    main(["bench", "steps", *sys.argv[1:]])
